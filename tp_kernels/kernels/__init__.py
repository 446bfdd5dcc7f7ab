"""Triton kernels that exchange data between ranks: tensors and pointers, never processes.

Not imported by `tp_kernels` itself: Triton is optional (`pip install 'tp_kernels[triton]'`).

Limits: one host. CUDA GPUs from compute capability 8.0, or the Triton interpreter (TRITON_INTERPRET=1 before
this is imported) for CPU tensors. Kernels do not compare what their ranks were called with: shapes and dtypes
that differ are the caller's to find.
"""

from .all_gather import all_gather
from .all_gather_linear import all_gather_linear
from .all_gather_weight_gradient import all_gather_weight_gradient
from .all_reduce import all_reduce
from .all_reduce_rms_norm import all_reduce_rms_norm
from .linear_all_reduce import linear_all_reduce
from .linear_reduce_scatter import linear_reduce_scatter
from .reduce_scatter import reduce_scatter
from .workspace import Workspace, WorkspaceShape

__all__ = [
    "Workspace",
    "WorkspaceShape",
    "all_gather",
    "all_gather_linear",
    "all_gather_weight_gradient",
    "all_reduce",
    "all_reduce_rms_norm",
    "linear_all_reduce",
    "linear_reduce_scatter",
    "reduce_scatter",
]
