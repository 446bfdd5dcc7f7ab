"""Transformer layers divided over ranks; thin modules over `tp_kernels.ops`."""

from .attention import KVCache, ParallelAttention
from .checkpoint import load_sharded, save_sharded
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
from .sharded import ShardedTensor, as_dtensor, sharded_state_dict
from .state import full_state_dict, full_tensors, load_full_state_dict

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
    "ShardedTensor",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "as_dtensor",
    "draw_key",
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
