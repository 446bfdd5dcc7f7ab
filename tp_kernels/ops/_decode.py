"""The shortest way through Python, for few rows without gradients.

Streaming a weight empties the caches that the interpreter's code and data were in: in decoding, a call of
Python that takes a tenth of a microsecond in a loop takes one or more. So these functions ask little, once,
and whatever is unusual goes the ordinary way, which gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.host_slot import OPERATIONS, REDUCIBLE
from tp_kernels.comm.symmetric_memory import _host

from ._gemm import FEW_ROWS
from ._op import direct

_LINEAR_ALL_REDUCE = OPERATIONS["linear_all_reduce"]


def linear_all_reduce(x: Tensor, weight: Any, bias: Any, group: ParallelGroup) -> Tensor | None:
    """`linear_all_reduce` of few rows, or None if it has to go the ordinary way."""
    if not isinstance(weight, Tensor) or not isinstance(bias, Tensor | None):
        return None
    if not direct(x, weight, bias) or not _usual(group, x):
        return None
    dtype, shape = x.dtype, x.shape
    depth = shape[-1]
    rows = x.numel() // depth if depth else 0
    if not 0 < rows <= FEW_ROWS[dtype] or not _matches(weight, dtype, depth):
        return None
    columns = weight.shape[0]
    if rows > group.slot.rows_of(columns, dtype):
        return None
    address = 0
    if bias is not None:
        if bias.dtype is not dtype or bias.shape != (columns,) or not bias.is_contiguous():
            return None
        address = bias.data_ptr()
    out = x.new_empty(*shape[:-1], columns)
    group.calls["linear_all_reduce", "host"] += 1
    try:
        group.slot.raw_linear(
            _LINEAR_ALL_REDUCE,
            REDUCIBLE[dtype],
            rows,
            columns,
            depth,
            x.data_ptr(),
            depth,
            weight.data_ptr(),
            depth,
            out.data_ptr(),
            address,
        )
    except BaseException as failure:
        group.fail_with(failure, "linear_all_reduce", "host")
    return out


def copy_linear(x: Tensor, weights: Sequence[Tensor], group: ParallelGroup) -> list[Tensor] | None:
    """`copy_linear` of few rows without bias, or None if it has to go the ordinary way."""
    if not direct(x, *weights) or not _usual(group, x):
        return None
    dtype, shape = x.dtype, x.shape
    depth = shape[-1]
    rows = x.numel() // depth if depth else 0
    if not 0 < rows <= FEW_ROWS[dtype]:
        return None
    if not all(_matches(weight, dtype, depth) for weight in weights):
        return None
    group.calls["copy_linear", "local"] += 1
    source, code, outs = x.data_ptr(), REDUCIBLE[dtype], []
    for weight in weights:
        columns = weight.shape[0]
        out = x.new_empty(*shape[:-1], columns)
        _host.product(
            source, depth, weight.data_ptr(), depth, 0, out.data_ptr(), rows, columns, depth, code
        )
        outs.append(out)
    return outs


def _usual(group: ParallelGroup, x: Tensor) -> bool:
    # After `direct`: a compiler does not see what follows.
    return (
        type(group) is ParallelGroup
        and group.decodes
        and x.dtype in FEW_ROWS
        and x.is_cpu
        and x.dim() > 0
        and x.is_contiguous()
        and torch.get_num_threads() == 1
        and not torch.is_autocast_enabled("cpu")
    )


def _matches(weight: Tensor, dtype: torch.dtype, depth: int) -> bool:
    return (
        weight.dtype is dtype
        and weight.dim() == 2
        and weight.shape[1] == depth
        and weight.is_contiguous()
    )
