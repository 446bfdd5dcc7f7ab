"""Functional ops: sharded products with their collectives, and collectives with gradients."""

from .all_gather_linear import all_gather_linear
from .copy_linear import copy_linear
from .linear_all_reduce import linear_all_reduce
from .linear_reduce_scatter import linear_reduce_scatter
from .regions import (
    copy_to_ranks,
    gather_features,
    gather_rows,
    reduce_from_ranks,
    scatter_rows,
)

__all__ = [
    "all_gather_linear",
    "copy_linear",
    "copy_to_ranks",
    "gather_features",
    "gather_rows",
    "linear_all_reduce",
    "linear_reduce_scatter",
    "reduce_from_ranks",
    "scatter_rows",
]
