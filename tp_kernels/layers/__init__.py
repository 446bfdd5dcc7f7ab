"""Transformer layers divided over ranks; thin modules over `tp_kernels.ops`."""

from .attention import KVCache, ParallelAttention
from .embedding import VocabParallelEmbedding
from .heads import HeadShard, partition_heads
from .linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from .lm_head import ParallelLMHead
from .loss import VocabParallelCrossEntropy
from .mlp import ParallelMLP
from .placement import ParamPlacement, finalize_gradients, placements

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
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "finalize_gradients",
    "partition_heads",
    "placements",
]
