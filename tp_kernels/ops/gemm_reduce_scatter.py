"""y = reduce_scatter(sum_i x_i W_i^T) + bias: every rank keeps the sums of its own rows.

Forward of `linear_reduce_scatter`, input gradient of `all_gather_linear`. Summed over ranks in fp32, in
rank order; bias is added once, before the one rounding.

    x_i [sum(counts), K_i], W_i [N, K_i], bias [N] -> y [counts[rank], N]
    between: called when this rank's part is on its way, to do work that hides the transfer.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.process_group import Pending
from tp_kernels.comm.row_groups import Piece
from tp_kernels.comm.short_way import SHORT_ROWS

from ._gemm import Between, add_parts, block_rows, part_blocks, partial_product, starts
from ._round import RoundReader
from ._signalled import Add, send_by_groups
from ._workspace import agree, launch


def reference(
    group: ParallelGroup,
    xs: Sequence[Tensor],
    ws: Sequence[Tensor],
    bias: Tensor | None,
    counts: Sequence[int],
    between: Between = None,
) -> Tensor:
    """Whole product, then the collective: the oracle and the serial baseline."""
    transport, mine = group.transport, counts[group.rank]
    transport.agree("linear_reduce_scatter", xs[0], sum(counts), ws[0].shape[0])
    pending = transport.all_to_all(partial_product(xs, ws), counts, [mine] * group.size)
    if between:
        between()
    return _sum(pending, group, bias, xs[0].new_empty(mine, ws[0].shape[0]))


def chunked(
    group: ParallelGroup,
    xs: Sequence[Tensor],
    ws: Sequence[Tensor],
    bias: Tensor | None,
    counts: Sequence[int],
    between: Between = None,
) -> Tensor:
    """Row blocks through the process group: round k travels while round k+1 is computed."""
    transport = group.transport
    width = ws[0].shape[0]
    transport.agree("linear_reduce_scatter", xs[0], sum(counts), width)
    out = xs[0].new_empty(counts[group.rank], width)
    first = starts(counts)[group.rank]
    flying: tuple[Pending, Tensor] | None = None
    size = -(-block_rows(sum(counts), sum(counts)) // group.size)
    for ranges in part_blocks(counts, size):
        sizes = [stop - start for start, stop in ranges]
        partial = xs[0].new_empty(sum(sizes), width)
        _products(xs, ws, ranges, partial)
        start, stop = ranges[group.rank]
        pending = transport.all_to_all(partial, sizes, [stop - start] * group.size)
        if flying is not None:
            _sum(flying[0], group, bias, flying[1])
        flying = (pending, out[start - first : stop - first])
    if between:
        between()
    if flying is not None:
        _sum(flying[0], group, bias, flying[1])
    return out


def host(
    group: ParallelGroup,
    xs: Sequence[Tensor],
    ws: Sequence[Tensor],
    bias: Tensor | None,
    counts: Sequence[int],
    between: Between = None,
) -> Tensor:
    """Sums in shared memory, as in gemm_all_reduce.host; every round has a block for each owner."""
    slot = group.slot
    dtype = xs[0].dtype
    rows, width = sum(counts), ws[0].shape[0]
    out = xs[0].new_empty(counts[group.rank], width)
    if rows <= SHORT_ROWS or not group.communication_thread:  # as all ranks see it
        whole = partial_product(xs, ws)
        if between:
            between()
        slot.reduce_scatter(whole, out, counts, width, "linear_reduce_scatter", bias)
        return out
    first = starts(counts)[group.rank]
    size = max(1, block_rows(rows, slot.rows_of(width, dtype)) // group.size)
    with RoundReader("linear_reduce_scatter", slot) as reader:
        for ranges in part_blocks(counts, size):
            slot.begin()
            sizes = [stop - start for start, stop in ranges]
            block = xs[0].new_empty(sum(sizes), width)
            _products(xs, ws, ranges, block)
            start, stop = ranges[group.rank]
            own = sum(sizes[: group.rank]) * width
            slot.fill(block, own, own + (stop - start) * width)
            slot.publish("linear_reduce_scatter", dtype, rows, width, ranges[0][0])
            reader.add(out[start - first : stop - first], own, bias, keep=block)
        if between:
            between()
    return out


def triton(
    group: ParallelGroup,
    xs: Sequence[Tensor],
    ws: Sequence[Tensor],
    bias: Tensor | None,
    counts: Sequence[int],
    between: Between = None,
) -> Tensor:
    """One kernel, as gemm_all_reduce.triton; it sends tiles to the owners of their rows."""
    agree(group, "linear_reduce_scatter", xs[0], ws[0].shape[0], counts)
    out = launch(group, xs[0], "linear_reduce_scatter", xs, ws, counts=counts, bias=bias)
    if between:
        between()
    return out


def cuda(
    group: ParallelGroup,
    xs: Sequence[Tensor],
    ws: Sequence[Tensor],
    bias: Tensor | None,
    counts: Sequence[int],
    between: Between = None,
) -> Tensor:
    """One product, as gemm_all_reduce.cuda; of each row group every rank gets its rows."""
    transport, first = group.transport, starts(counts)[group.rank]
    out = xs[0].new_empty(counts[group.rank], ws[0].shape[0])

    def send(partial: Tensor, pieces: Sequence[Piece], add: Add) -> None:
        mine, sizes = pieces[group.rank], [piece.rows for piece in pieces]
        pending = transport.all_to_all(partial, sizes, [mine.rows] * group.size)
        start = mine.source - first
        _sum(pending, group, bias, out[start : start + mine.rows], add)

    send_by_groups(group, "linear_reduce_scatter", xs, ws, counts, send, between)
    return out


IMPLEMENTATIONS = {
    "reference": reference,
    "chunked": chunked,
    "host": host,
    "triton": triton,
    "cuda": cuda,
}


def _products(
    xs: Sequence[Tensor], ws: Sequence[Tensor], ranges: list[tuple[int, int]], out: Tensor
) -> None:
    """Products of the row ranges, one after the other in `out`; adjacent ranges as one product."""
    if out.shape[0] == xs[0].shape[0]:
        partial_product(xs, ws, out)
        return
    position = 0
    for start, stop in ranges:
        if stop > start:
            target = out[position : position + stop - start]
            partial_product([x[start:stop] for x in xs], ws, target)
            position += stop - start


def _sum(
    pending: Pending, group: ParallelGroup, bias: Tensor | None, out: Tensor, add: Add = add_parts
) -> Tensor:
    parts = pending.wait()
    if out.numel() == 0:
        return out
    return add(parts.view(group.size, *out.shape), bias, out, 0)
