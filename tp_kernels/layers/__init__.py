"""Transformer layers divided over ranks; thin modules over `tp_kernels.ops`."""

from .attention import ParallelAttention
from .embedding import ParallelLMHead, VocabParallelEmbedding
from .heads import HeadShard, partition_heads
from .kv_cache import KVCache, StaticKVCache
from .linear import ColumnParallelLinear, RowParallelLinear
from .mlp import ParallelMLP
from .placement import ParamPlacement, finalize_gradients, placements
from .qkv import QKVParallelLinear
from .rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RotaryEmbedding,
    RotaryOptions,
    YarnScaling,
)

__all__ = [
    "ColumnParallelLinear",
    "DynamicScaling",
    "HeadShard",
    "KVCache",
    "LinearScaling",
    "Llama3Scaling",
    "ParallelAttention",
    "ParallelLMHead",
    "ParallelMLP",
    "ParamPlacement",
    "QKVParallelLinear",
    "RotaryEmbedding",
    "RotaryOptions",
    "RowParallelLinear",
    "StaticKVCache",
    "VocabParallelEmbedding",
    "YarnScaling",
    "finalize_gradients",
    "partition_heads",
    "placements",
]
