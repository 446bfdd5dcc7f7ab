"""Local products and row arithmetic shared by the implementations of every op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

Between = Callable[[], None] | None

# Row blocks below this lose GEMM efficiency; more than a handful of blocks hides nothing more.
MIN_BLOCK_ROWS = 128
TARGET_BLOCKS = 4


def partial_product(
    xs: Sequence[Tensor], ws: Sequence[Tensor], out: Tensor | None = None
) -> Tensor:
    """sum_i xs[i] [M, K_i] @ ws[i] [N, K_i]^T -> [M, N], into `out` if given."""
    out = torch.mm(xs[0], ws[0].t(), out=out) if out is not None else torch.mm(xs[0], ws[0].t())
    for x, w in zip(xs[1:], ws[1:], strict=True):
        out.addmm_(x, w.t())
    return out


def products(x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """x W_i^T + b_i; `biases` is empty or has one for each weight."""
    if not biases:
        return [torch.nn.functional.linear(x, w) for w in ws]
    return [torch.nn.functional.linear(x, w, b) for w, b in zip(ws, biases, strict=True)]


def linear_into(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x [M, K] @ w [N, K]^T + bias."""
    if bias is None:
        torch.mm(x, w.t(), out=out)
    else:
        torch.addmm(bias, x, w.t(), out=out)


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


def weight_gradients(dys: Sequence[Tensor], x: Tensor, needed: Sequence[bool]) -> list[Tensor]:
    """dW_i = dy_i^T x where needed, else an empty tensor (torch ops return no None in a list)."""
    return [
        torch.mm(dy.t(), x) if need else x.new_empty(0)
        for dy, need in zip(dys, needed, strict=True)
    ]
