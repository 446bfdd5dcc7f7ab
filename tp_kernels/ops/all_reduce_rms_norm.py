"""all_reduce_rms_norm: what closes a block of a decoder and opens the next one, as one step.

    s = all_reduce(x) + bias + residual        the new residual
    y = s / sqrt(mean(s^2) + epsilon) * weight

In decoding these are four passes over a row of a few kilobytes, and each costs more to start than to do.
Where a gradient or tracing is involved the same functions run one after the other, with their own
gradients: the all-reduce passes dy on unchanged, the norm has torch's. Both ways give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tp_kernels.comm.errors import ShapeError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.dispatch import choose

from ._gemm import partial_product
from ._op import check_call, device_type, direct, prepare, rows_of
from .elementwise import rms_norm
from .linear_all_reduce import linear_all_reduce
from .regions import reduce_from_ranks

# From here on a product is faster into memory that no other core reads, and the passes cost their work.
DECODE_ROWS = 16


def all_reduce_rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    group: ParallelGroup,
    residual: Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Sum over ranks, residual and RMS norm (Zhang and Sennrich, 2019).

    Args:
        x: [..., H], this rank's summand; float32, bfloat16 or float16.
        weight: [H] of the norm, equal on all ranks.
        residual: [..., H], equal on all ranks; None: nothing is added.

    Returns:
        (y, s), both [..., H] with the same bits on every rank. s is rounded to the dtype after the sum
        over ranks and again after the residual, as separate operations would.
    """
    group = check_call("all_reduce_rms_norm", group, "auto")
    _check(group, x.shape, x.dtype, weight, residual)
    if _fuses(group, "auto", x, x.shape, weight, residual):

        def fill(out: Tensor) -> None:
            out.copy_(x)

        return group.run(
            "all_reduce_rms_norm",
            "host",
            _host,
            group,
            fill,
            x,
            x.shape,
            None,
            residual,
            weight,
            epsilon,
        )
    return _add_rms_norm(reduce_from_ranks(x, group=group), residual, weight, epsilon)


def linear_all_reduce_rms_norm(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    *,
    group: ParallelGroup,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    epsilon: float = 1e-6,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`linear_all_reduce(x, weight, bias)`, residual and RMS norm; the product lands in shared memory.

    Args:
        x: [..., K_r]; weight: [N, K_r]; bias: [N]; as in `linear_all_reduce`.
        norm_weight: [N]; residual: [..., N]; as in `all_reduce_rms_norm`.
        implementation: "auto", or one of "reference", "chunked", "host".

    Returns:
        (y, s), both [..., N], as `all_reduce_rms_norm`.
    """
    group = check_call("linear_all_reduce_rms_norm", group, implementation)
    shape = (*x.shape[:-1], weight.shape[0])
    _check(group, shape, x.dtype, norm_weight, residual)
    if _fuses(group, implementation, x, shape, norm_weight, residual, weight, bias):
        x, (w,), biases = prepare("linear_all_reduce_rms_norm", group, x, weight, bias, None)

        def fill(out: Tensor) -> None:
            partial_product([rows_of(x)], [w], rows_of(out))

        return group.run(
            "linear_all_reduce_rms_norm",
            "host",
            _host,
            group,
            fill,
            x,
            shape,
            biases[0] if biases else None,
            residual,
            norm_weight,
            epsilon,
        )
    y = linear_all_reduce(x, weight, bias, group=group, implementation=implementation)
    return _add_rms_norm(y, residual, norm_weight, epsilon)


def _check(
    group: ParallelGroup,
    shape: Sequence[int],
    dtype: torch.dtype,
    weight: Tensor,
    residual: Tensor | None,
) -> None:
    where = f"all_reduce_rms_norm on rank {group.rank} of {group.size}"
    if len(shape) == 0 or weight.shape != shape[-1:]:
        raise ShapeError(
            f"{where}: the norm's weight is {tuple(weight.shape)}, the rows are {tuple(shape)}; "
            "expected [H] and [..., H]"
        )
    if residual is not None and (residual.shape != tuple(shape) or residual.dtype != dtype):
        raise ShapeError(
            f"{where}: residual is {tuple(residual.shape)} {residual.dtype}, expected "
            f"{tuple(shape)} {dtype}"
        )


def _fuses(
    group: ParallelGroup,
    implementation: str,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor,
    residual: Tensor | None,
    *others: Tensor | None,
) -> bool:
    """True for what one round can do, from values that are equal on all ranks."""
    if group.size == 1 or group.memory is None or not direct(x, weight, residual, *others):
        return False
    if torch.is_autocast_enabled(device_type(x)) or weight.dtype != x.dtype:
        return False
    if not (weight.is_contiguous() and (residual is None or residual.is_contiguous())):
        return False
    rows, width = math.prod(shape[:-1]), shape[-1]
    most = min(DECODE_ROWS, group.slot.rows_of(width, x.dtype))
    if rows * width == 0 or rows > most:
        return False
    choice = choose(
        "linear_all_reduce",
        group,
        rows=rows,
        width=width,
        dtype=x.dtype,
        device=device_type(x),
        implementation=implementation,
    )
    return choice.implementation == "host"


def _host(
    group: ParallelGroup,
    fill: Callable[[Tensor], None],
    x: Tensor,
    shape: Sequence[int],
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    slot = group.slot
    fill(slot.view(group.rank, slot.begin(), tuple(shape), x.dtype))
    y, total = x.new_empty(shape), x.new_empty(shape)
    slot.complete_rms_norm("all_reduce_rms_norm", total, bias, residual, weight, y, epsilon)
    return y, total


def _add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    return rms_norm(total, weight, epsilon), total
