"""Kernels in CUDA C++ (module tp_kernels._cuda): tensors and pointers, never processes.

Importing this needs neither Triton nor a GPU; `_cuda` is loaded by the first call. The collectives have the
signatures and the bits of those in tp_kernels.kernels, and take turns with them in one workspace. A call
launches one kernel and waits for nothing, so that it can be captured in a graph: `Workspace.check` says
afterwards whether all waits were over in time.
"""

from .collectives import all_gather, all_reduce, all_reduce_rms_norm, reduce_scatter
from .wait import wait_for, write_flag

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_rms_norm",
    "reduce_scatter",
    "wait_for",
    "write_flag",
]
