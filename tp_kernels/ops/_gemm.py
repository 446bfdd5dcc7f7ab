"""Local products and row arithmetic shared by the implementations of every op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tp_kernels.comm.host_slot import REDUCIBLE
from tp_kernels.comm.process_group import ordered_sum
from tp_kernels.comm.short_way import FEW_ROWS
from tp_kernels.comm.symmetric_memory import _host

from ._op import rows_of

Between = Callable[[], None] | None

# Row blocks below this lose GEMM efficiency; more than a handful of blocks hides nothing more.
MIN_BLOCK_ROWS = 256
TARGET_BLOCKS = 4
# Rows of 16-bit numbers that are widened to fp32 at a time: enough for a good product, little memory.
WIDENED_ROWS = 1024


def few_rows(x: Tensor, w: Tensor) -> bool:
    """Whether `x` [M, K] @ `w` [N, K]^T is bound by reading `w`, which the engine does once for all rows."""
    return (
        x.shape[0] <= FEW_ROWS.get(x.dtype, -1)
        and x.is_cpu
        and x.stride(1) == 1 == w.stride(1)
        and torch.get_num_threads() == 1
    )


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x [M, K] @ w [N, K]^T + bias -> [M, N], into `out` (contiguous) if given. One rounding."""
    if few_rows(x, w):
        out = x.new_empty(x.shape[0], w.shape[0]) if out is None else out
        _host.product(
            x.data_ptr(),
            x.stride(0),
            w.data_ptr(),
            w.stride(0),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            *out.shape,
            x.shape[1],
            REDUCIBLE[x.dtype],
        )
        return out
    if out is None:
        return torch.nn.functional.linear(x, w, bias)
    if bias is None:
        return torch.mm(x, w.t(), out=out)
    return torch.addmm(bias, x, w.t(), out=out)


def partial_product(
    xs: Sequence[Tensor], ws: Sequence[Tensor], out: Tensor | None = None
) -> Tensor:
    """sum_i xs[i] [M, K_i] @ ws[i] [N, K_i]^T -> [M, N], into `out` if given."""
    out = linear(xs[0], ws[0], out=out)
    for x, w in zip(xs[1:], ws[1:], strict=True):
        out.addmm_(x, w.t())
    return out


def linear_layers(x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """What torch computes, bit by bit; `biases` is empty or has one for each weight."""
    if not biases:
        return [torch.nn.functional.linear(x, w) for w in ws]
    return [torch.nn.functional.linear(x, w, b) for w, b in zip(ws, biases, strict=True)]


def products(x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """x [..., K] W_i^T + b_i; `biases` is empty or has one for each weight."""
    rows, ys = rows_of(x), []
    for i, w in enumerate(ws):
        bias = biases[i] if biases else None
        if few_rows(rows, w):
            y = x.new_empty(*x.shape[:-1], w.shape[0])
            linear(rows, w, bias, rows_of(y))
        else:
            y = torch.nn.functional.linear(x, w, bias)
        ys.append(y)  # no views: autograd would forbid to write to them
    return ys


def add_parts(parts: Tensor, bias: Tensor | None, out: Tensor, start: int) -> Tensor:
    """ordered_sum of parts [W, ...] into `out`, element i of which has bias [(start + i) % N]."""
    if bias is not None:
        index = torch.arange(start, start + out.numel(), device=bias.device)
        bias = bias[index % bias.numel()].view(out.shape)
    return ordered_sum(parts.view(parts.shape[0], *out.shape), bias, out)


def block_rows(rows: int, most: int) -> int:
    """Rows per block when `rows` are cut for overlap and a block may hold at most `most`."""
    wanted = max(MIN_BLOCK_ROWS, -(-rows // TARGET_BLOCKS))
    return max(1, min(wanted, most))


def blocks(rows: int, size: int) -> Iterator[tuple[int, int]]:
    """Half-open row ranges of `size` rows; one empty block when there are no rows."""
    for start in range(0, max(rows, 1), size):
        yield start, min(start + size, rows)


def starts(counts: Sequence[int]) -> list[int]:
    """First row of each rank's part."""
    result, total = [], 0
    for count in counts:
        result.append(total)
        total += count
    return result


def part_blocks(counts: Sequence[int], size: int) -> Iterator[list[tuple[int, int]]]:
    """Per round, the block of each destination's part: all ranks stay busy in every round."""
    first = starts(counts)
    for offset in range(0, max(max(counts), 1), size):
        yield [
            (start + min(offset, count), start + min(offset + size, count))
            for start, count in zip(first, counts, strict=True)
        ]


def weight_gradients(
    dys: Sequence[Tensor],
    x: Tensor,
    needed: Sequence[bool],
    main_grads: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """dW_i = dy_i^T x where needed, else an empty tensor (torch ops return no None in a list).

    Where there is a main_grad, it gets dW_i added, and the result is empty, too.
    """
    dws = []
    for dy, need, main in zip(dys, needed, main_grads or [None] * len(dys), strict=True):
        if need and main is not None:
            add_weight_gradient(main, dy, x)
        dws.append(torch.mm(dy.t(), x) if need and main is None else x.new_empty(0))
    return dws


def add_weight_gradient(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """main_grad [N, K] += dy [R, N]^T x [R, K], summed in fp32, rounded once if at all."""
    total = main_grad if main_grad.dtype in (torch.float32, torch.float64) else main_grad.float()
    if total.dtype == x.dtype:
        total.addmm_(dy.t(), x)
    elif x.is_cuda:
        total += torch.mm(dy.t(), x, out_dtype=torch.float32)
    else:  # torch has no such product for the CPU
        for start, stop in blocks(x.shape[0], WIDENED_ROWS):
            total.addmm_(dy[start:stop].to(total.dtype).t(), x[start:stop].to(total.dtype))
    if total is not main_grad:
        main_grad.copy_(total)
