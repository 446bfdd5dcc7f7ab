"""all_reduce_rms_norm: what closes a block of a decoder and opens the next one, as one step.

    s = all_reduce(x) + bias + residual        the new residual
    y = s / sqrt(mean(s^2) + epsilon) * weight

In decoding these are four passes over a row of a few kilobytes, and each costs more to start than to do.
Where a gradient or tracing is involved the same functions run one after the other, with their own
gradients: the all-reduce passes dy on unchanged, the norm has torch's. Both ways give the same bits, but by
kernels of _cuda, whose s has the same bits and whose y may differ in the last one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tp_kernels.comm.errors import ShapeError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.short_way import SHORT_ROWS
from tp_kernels.dispatch import choose

from . import _peers
from ._gemm import partial_product
from ._op import check_call, device_type, direct, prepare, rows_of
from ._workspace import LEAST_CHUNK
from .elementwise import rms_norm
from .linear_all_reduce import linear_all_reduce
from .regions import reduce_from_ranks


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
    # One piece, as the same round that `all_reduce` makes of it: ranks need not all come this way.
    if x.nbytes <= _piece(group) and _fuses(group, "auto", x, x.shape, weight, residual):
        slot, dense = group.slot, x.contiguous()

        def run() -> tuple[Tensor, Tensor]:
            slot.begin()
            slot.fill_summands(dense)
            d = ("all_reduce", dense.numel(), 0)
            return _complete(group, d, dense, dense.shape, None, residual, weight, epsilon)

        return group.run("all_reduce_rms_norm", "host", run)
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
        implementation: "auto", or one of "reference", "chunked", "host", "triton", "cuda".

    Returns:
        (y, s), both [..., N], as `all_reduce_rms_norm`.
    """
    group = check_call("linear_all_reduce_rms_norm", group, implementation)
    shape = (*x.shape[:-1], weight.shape[0])
    _check(group, shape, x.dtype, norm_weight, residual)
    if _fuses(group, implementation, x, shape, norm_weight, residual, weight, bias):
        x, (w,), biases = prepare("linear_all_reduce_rms_norm", group, x, weight, bias, None)
        slot, rows, b = group.slot, rows_of(x), biases[0] if biases else None

        def run() -> tuple[Tensor, Tensor]:  # the round of `linear_all_reduce`
            size = (rows.shape[0], shape[-1])
            partial_product([rows], [w], slot.view(group.rank, slot.begin(), size, x.dtype))
            d = ("linear_all_reduce", *size)
            return _complete(group, d, x, shape, b, residual, norm_weight, epsilon)

        return group.run("linear_all_reduce_rms_norm", "host", run)
    if _fuses_on_peers(group, implementation, x, shape, norm_weight, residual, weight, bias):
        x, (w,), biases = prepare("linear_all_reduce_rms_norm", group, x, weight, bias, None)
        b, norm = biases[0] if biases else None, (residual, norm_weight, epsilon)
        y, s = group.run(
            "linear_all_reduce_rms_norm", "cuda", _peers.linear_norm, group, rows_of(x), w, b, *norm
        )
        return y.view(shape), s.view(shape)
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


def _fuses_on_peers(
    group: ParallelGroup,
    implementation: str,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor,
    residual: Tensor | None,
    *others: Tensor | None,
) -> bool:
    """Whether the sum is one of few rows by a kernel of _cuda, which may do the rest of it as well.

    Gradients, autocast and the dtype of the norm's weight have to be alike on all ranks.
    """
    if group.size == 1 or not _is_plain(x, weight, residual, *others):
        return False
    rows, width = math.prod(shape[:-1]), shape[-1]
    call = ("linear_all_reduce", group, rows, width, x.dtype, device_type(x))
    return (
        choose(*call, implementation).implementation == "cuda"
        and _peers.applies("linear_all_reduce", group, x, [rows], width, 1)
        and width * x.element_size() <= LEAST_CHUNK
    )


def _is_plain(x: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
    """Whether nothing has to see the separate steps: no gradient, no tracing, no cast."""
    autocast = torch.is_autocast_enabled(device_type(x))
    return direct(x, weight, *others) and not autocast and weight.dtype == x.dtype


def _piece(group: ParallelGroup) -> int:
    return 0 if group.memory is None else group.slot.piece


def _fuses(
    group: ParallelGroup,
    implementation: str,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor,
    residual: Tensor | None,
    *others: Tensor | None,
) -> bool:
    """Whether this call is one round, and this rank does the rest of it in the same step."""
    if group.size == 1 or group.memory is None or not _is_plain(x, weight, residual, *others):
        return False
    rows, width = math.prod(shape[:-1]), shape[-1]
    most = min(SHORT_ROWS, group.slot.rows_of(width, x.dtype))
    if rows * width == 0 or rows > most:
        return False
    choice = choose(
        "linear_all_reduce", group, rows, width, x.dtype, device_type(x), implementation
    )
    return choice.implementation == "host"


def _complete(
    group: ParallelGroup,
    round_of: tuple[str, int, int],
    like: Tensor,
    shape: Sequence[int],
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """Publish and sum the round whose buffer is filled; (y, s)."""
    y, total = like.new_empty(shape), like.new_empty(shape)
    residual = None if residual is None else residual.contiguous()
    group.slot.complete_rms_norm(*round_of, total, bias, residual, weight.contiguous(), y, epsilon)
    return y, total


def _add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    return rms_norm(total, weight, epsilon), total
