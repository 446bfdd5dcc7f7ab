"""Overlapped tensor-parallel products, layers and collectives that also run without a GPU."""

from .comm import (
    BuildError,
    CollectiveTimeoutError,
    GroupMismatchError,
    ParallelGroup,
    PeerLostError,
    RankError,
    Ranks,
    ShapeError,
    SymmetricMemory,
    SymmetricTensor,
    TpKernelsError,
    UnsupportedError,
    all_gather,
    all_reduce,
    barrier,
    launch,
    reduce_scatter,
    split_range,
    split_sizes,
)
from .dispatch import Choice, explain
from .ops import (
    all_gather_linear,
    all_reduce_rms_norm,
    copy_linear,
    linear_all_reduce,
    linear_all_reduce_rms_norm,
    linear_reduce_scatter,
)

__version__ = "0.1.0"

__all__ = [
    "BuildError",
    "Choice",
    "CollectiveTimeoutError",
    "GroupMismatchError",
    "ParallelGroup",
    "PeerLostError",
    "RankError",
    "Ranks",
    "ShapeError",
    "SymmetricMemory",
    "SymmetricTensor",
    "TpKernelsError",
    "UnsupportedError",
    "all_gather",
    "all_gather_linear",
    "all_reduce",
    "all_reduce_rms_norm",
    "barrier",
    "copy_linear",
    "explain",
    "launch",
    "linear_all_reduce",
    "linear_all_reduce_rms_norm",
    "linear_reduce_scatter",
    "reduce_scatter",
    "split_range",
    "split_sizes",
]
