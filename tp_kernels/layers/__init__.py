"""Transformer layers divided over ranks; thin modules over `tp_kernels.ops`."""

from .attention import KVCache, ParallelAttention
from .checkpoint import load_sharded, save_sharded
from .embedding import ParallelLMHead, VocabParallelEmbedding
from .heads import HeadShard, partition_heads
from .linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from .mlp import ParallelMLP
from .placement import ParamPlacement, finalize_gradients, placements
from .sharded import ShardedTensor, as_dtensor, sharded_state_dict
from .state import full_state_dict, full_tensors, load_full_state_dict

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
    "ShardedTensor",
    "VocabParallelEmbedding",
    "as_dtensor",
    "finalize_gradients",
    "full_state_dict",
    "full_tensors",
    "load_full_state_dict",
    "load_sharded",
    "partition_heads",
    "placements",
    "save_sharded",
    "sharded_state_dict",
]
