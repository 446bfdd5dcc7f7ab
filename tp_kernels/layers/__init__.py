"""Transformer layers divided over ranks; thin modules over `tp_kernels.ops`."""

from .attention import ParallelAttention
from .block import ParallelTransformerBlock
from .checkpoint import load_sharded, save_sharded
from .dropout import ParallelDropout
from .embedding import VocabParallelEmbedding
from .gradients import (
    backward_dw,
    clip_grad_norm_,
    count_parameters,
    finalize_gradients,
    gradient_of,
    main_grads_to_grads,
    use_main_grads,
)
from .heads import HeadShard, partition_heads
from .initialize import initialize_, materialize
from .kv_cache import KVCache, StaticKVCache
from .linear import ColumnParallelLinear, RowParallelLinear
from .lm_head import ParallelLMHead
from .loss import VocabParallelCrossEntropy
from .mlp import ParallelMLP
from .norm import LayerNorm, RMSNorm
from .placement import ParamPlacement, placements
from .qkv import QKVParallelLinear
from .random import RandomStreams, draw_key
from .rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RotaryEmbedding,
    RotaryOptions,
    YarnScaling,
)
from .sharded import ShardedTensor, as_dtensor, sharded_state_dict
from .state import full_state_dict, full_tensors, load_full_state_dict

__all__ = [
    "ColumnParallelLinear",
    "DynamicScaling",
    "HeadShard",
    "KVCache",
    "LayerNorm",
    "LinearScaling",
    "Llama3Scaling",
    "ParallelAttention",
    "ParallelDropout",
    "ParallelLMHead",
    "ParallelMLP",
    "ParallelTransformerBlock",
    "ParamPlacement",
    "QKVParallelLinear",
    "RMSNorm",
    "RandomStreams",
    "RotaryEmbedding",
    "RotaryOptions",
    "RowParallelLinear",
    "ShardedTensor",
    "StaticKVCache",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "YarnScaling",
    "as_dtensor",
    "backward_dw",
    "clip_grad_norm_",
    "count_parameters",
    "draw_key",
    "finalize_gradients",
    "full_state_dict",
    "full_tensors",
    "gradient_of",
    "initialize_",
    "load_full_state_dict",
    "load_sharded",
    "main_grads_to_grads",
    "materialize",
    "partition_heads",
    "placements",
    "save_sharded",
    "sharded_state_dict",
    "use_main_grads",
]
