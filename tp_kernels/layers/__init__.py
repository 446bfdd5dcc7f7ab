"""Transformer layers divided over ranks; thin modules over `tp_kernels.ops`."""

from .attention import KVCache, ParallelAttention
from .embedding import ParallelLMHead, VocabParallelEmbedding
from .gradients import finalize_gradients
from .heads import HeadShard, partition_heads
from .linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from .mlp import ParallelMLP
from .placement import ParamPlacement, placements

__all__ = [
    "ColumnParallelLinear",
    "HeadShard",
    "KVCache",
    "ParallelAttention",
    "ParallelLMHead",
    "ParallelMLP",
    "ParamPlacement",
    "QKVParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "finalize_gradients",
    "partition_heads",
    "placements",
]
