"""Overlapped tensor-parallel products, layers and collectives that also run without a GPU."""

from .comm import (
    BuildError,
    CollectiveTimeoutError,
    GroupMismatchError,
    P2PChannel,
    ParallelGroup,
    PeerLostError,
    RankError,
    Ranks,
    ShapeError,
    SymmetricMemory,
    TpKernelsError,
    UnsupportedError,
    all_gather_object,
    broadcast,
    broadcast_object,
    launch,
    split_range,
    split_sizes,
)
from .dispatch import Choice, explain
from .ops import (
    all_gather_linear,
    copy_linear,
    linear_all_reduce,
    linear_reduce_scatter,
)

__version__ = "0.1.0"

__all__ = [
    "BuildError",
    "Choice",
    "CollectiveTimeoutError",
    "GroupMismatchError",
    "P2PChannel",
    "ParallelGroup",
    "PeerLostError",
    "RankError",
    "Ranks",
    "ShapeError",
    "SymmetricMemory",
    "TpKernelsError",
    "UnsupportedError",
    "all_gather_linear",
    "all_gather_object",
    "broadcast",
    "broadcast_object",
    "copy_linear",
    "explain",
    "launch",
    "linear_all_reduce",
    "linear_reduce_scatter",
    "split_range",
    "split_sizes",
]
