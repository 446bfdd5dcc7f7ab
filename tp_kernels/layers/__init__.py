"""Transformer layers divided over ranks; thin modules over `tp_kernels.ops`."""

from .attention import KVCache, ParallelAttention
from .block import ParallelTransformerBlock
from .dropout import ParallelDropout
from .embedding import VocabParallelEmbedding
from .gradients import finalize_gradients
from .heads import HeadShard, partition_heads
from .linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from .lm_head import ParallelLMHead
from .loss import VocabParallelCrossEntropy
from .mlp import ParallelMLP
from .norm import LayerNorm, RMSNorm
from .placement import ParamPlacement, placements
from .random import RandomStreams, draw_key

__all__ = [
    "ColumnParallelLinear",
    "HeadShard",
    "KVCache",
    "LayerNorm",
    "ParallelAttention",
    "ParallelDropout",
    "ParallelLMHead",
    "ParallelMLP",
    "ParallelTransformerBlock",
    "ParamPlacement",
    "QKVParallelLinear",
    "RMSNorm",
    "RandomStreams",
    "RowParallelLinear",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "draw_key",
    "finalize_gradients",
    "partition_heads",
    "placements",
]
