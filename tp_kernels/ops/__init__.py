"""Functional ops: sharded products with their collectives, and collectives with gradients."""

from .all_gather_linear import all_gather_linear
from .all_reduce_rms_norm import all_reduce_rms_norm, linear_all_reduce_rms_norm
from .copy_linear import copy_linear
from .linear_all_reduce import linear_all_reduce
from .linear_reduce_scatter import linear_reduce_scatter
from .regions import (
    copy_to_ranks,
    gather_features,
    gather_rows,
    reduce_from_ranks,
    reduce_scatter_rows,
    scatter_features,
    scatter_rows,
)

__all__ = [
    "all_gather_linear",
    "all_reduce_rms_norm",
    "copy_linear",
    "copy_to_ranks",
    "gather_features",
    "gather_rows",
    "linear_all_reduce",
    "linear_all_reduce_rms_norm",
    "linear_reduce_scatter",
    "reduce_from_ranks",
    "reduce_scatter_rows",
    "scatter_features",
    "scatter_rows",
]
