"""How ranks of a group reach each other: groups, symmetric memory, collectives, errors."""

from .collectives import all_gather, all_reduce, barrier, broadcast, reduce_scatter
from .errors import (
    BuildError,
    CollectiveTimeoutError,
    GroupMismatchError,
    PeerLostError,
    ShapeError,
    TpKernelsError,
    UnsupportedError,
)
from .group import ParallelGroup, as_group
from .launch import RankError, Ranks, launch
from .layout import split_range, split_sizes
from .objects import all_gather_object, broadcast_object
from .p2p import Message, P2PChannel
from .symmetric_memory import SymmetricMemory
from .symmetric_tensor import SymmetricTensor

__all__ = [
    "BuildError",
    "CollectiveTimeoutError",
    "GroupMismatchError",
    "Message",
    "P2PChannel",
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
    "all_gather_object",
    "all_reduce",
    "as_group",
    "barrier",
    "broadcast",
    "broadcast_object",
    "launch",
    "reduce_scatter",
    "split_range",
    "split_sizes",
]
