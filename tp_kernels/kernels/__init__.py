"""Triton kernels, most of which exchange data between ranks: tensors and pointers, never processes.

Not imported by `tp_kernels` itself: Triton is optional (`pip install 'tp_kernels[triton]'`).

Limits: one host, but for linear_signalled, which involves no peer. CUDA GPUs from compute capability 8.0, for
kernels that exchange nothing also AMD GPUs, or
the Triton interpreter (TRITON_INTERPRET=1 before this is imported) for CPU tensors. Kernels do not compare
what their ranks were called with: shapes and dtypes that differ are the caller's to find. Nothing is recorded
for autograd: a kernel's backward is a function of its own. Ops call them as implementation "triton".
"""

from .all_gather import all_gather
from .all_gather_linear import all_gather_linear
from .all_gather_weight_gradient import all_gather_weight_gradient
from .all_reduce import all_reduce
from .all_reduce_rms_norm import all_reduce_rms_norm
from .barrier import barrier
from .cross_entropy import (
    CrossEntropyOptions,
    vocab_parallel_cross_entropy,
    vocab_parallel_cross_entropy_backward,
)
from .gated import geglu, geglu_backward, swiglu, swiglu_backward
from .linear_all_reduce import linear_all_reduce
from .linear_reduce_scatter import linear_reduce_scatter
from .linear_signalled import linear_signalled
from .norm import layer_norm, layer_norm_backward, rms_norm, rms_norm_backward
from .reduce_scatter import reduce_scatter
from .rotary import rotary, rotary_backward
from .sum_parts import sum_parts
from .wait_for_group import wait_for_group
from .workspace import Workspace, WorkspaceShape

__all__ = [
    "CrossEntropyOptions",
    "Workspace",
    "WorkspaceShape",
    "all_gather",
    "all_gather_linear",
    "all_gather_weight_gradient",
    "all_reduce",
    "all_reduce_rms_norm",
    "barrier",
    "geglu",
    "geglu_backward",
    "layer_norm",
    "layer_norm_backward",
    "linear_all_reduce",
    "linear_reduce_scatter",
    "linear_signalled",
    "reduce_scatter",
    "rms_norm",
    "rms_norm_backward",
    "rotary",
    "rotary_backward",
    "sum_parts",
    "swiglu",
    "swiglu_backward",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_cross_entropy_backward",
    "wait_for_group",
]
