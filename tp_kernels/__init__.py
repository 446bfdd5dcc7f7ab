"""Overlapped tensor-parallel products, layers and collectives that also run without a GPU."""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name == "torch":
        message = "tp_kernels needs torch 2.11 or later, which is not installed: pip install torch"
        raise ImportError(message) from error
    raise

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
    SymmetricTensor,
    TpKernelsError,
    UnsupportedError,
    all_gather,
    all_gather_object,
    all_reduce,
    barrier,
    broadcast,
    broadcast_object,
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
    "all_gather_linear",
    "all_gather_object",
    "all_reduce",
    "all_reduce_rms_norm",
    "barrier",
    "broadcast",
    "broadcast_object",
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
