"""Functional ops: sharded products with their collectives, collectives with gradients, element-wise work."""

from ._local import explain_local
from ._weight_gradient import WeightGradientQueue
from .all_gather_linear import all_gather_linear
from .all_reduce_rms_norm import all_reduce_rms_norm, linear_all_reduce_rms_norm
from .copy_linear import copy_linear
from .cross_entropy import vocab_parallel_cross_entropy
from .dropout import dropout
from .gated import gated, geglu, swiglu
from .linear_all_reduce import linear_all_reduce
from .linear_cross_entropy import linear_cross_entropy
from .linear_reduce_scatter import linear_reduce_scatter
from .norm import layer_norm, rms_norm
from .regions import (
    copy_to_ranks,
    gather_features,
    gather_rows,
    reduce_from_ranks,
    reduce_scatter_rows,
    scatter_features,
    scatter_rows,
)
from .rotary import apply_rotary

__all__ = [
    "WeightGradientQueue",
    "all_gather_linear",
    "all_reduce_rms_norm",
    "apply_rotary",
    "copy_linear",
    "copy_to_ranks",
    "dropout",
    "explain_local",
    "gated",
    "gather_features",
    "gather_rows",
    "geglu",
    "layer_norm",
    "linear_all_reduce",
    "linear_all_reduce_rms_norm",
    "linear_cross_entropy",
    "linear_reduce_scatter",
    "reduce_from_ranks",
    "reduce_scatter_rows",
    "rms_norm",
    "scatter_features",
    "scatter_rows",
    "swiglu",
    "vocab_parallel_cross_entropy",
]
