"""y_i = all_gather(x) W_i^T + b_i: rows that are spread over the ranks, one or several products.

Forward of `all_gather_linear`, and the gradient of `linear_reduce_scatter`.

    x [counts[rank], K], W_i [N_i, K], b_i [N_i] -> y_i [sum(counts), N_i], gathered x [sum(counts), K]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.short_way import GATHER_FIRST_ROWS

from . import _peers
from ._gemm import block_rows, linear, part_blocks, products, starts, weight_gradients
from ._signalled import groups_of, signals_of
from ._workspace import agree, launch

Gathered = tuple[list[Tensor], Tensor | None]


def reference(
    group: ParallelGroup,
    x: Tensor,
    ws: Sequence[Tensor],
    biases: Sequence[Tensor],
    counts: Sequence[int],
    keep: bool,
) -> Gathered:
    """The collective, then the products: the oracle and the serial baseline."""
    group.transport.agree("all_gather_linear", x, sum(counts), x.shape[1])
    gathered = group.transport.all_gather(x, counts).wait()
    return products(gathered, ws, biases), gathered if keep else None


def chunked(
    group: ParallelGroup,
    x: Tensor,
    ws: Sequence[Tensor],
    biases: Sequence[Tensor],
    counts: Sequence[int],
    keep: bool,
) -> Gathered:
    """Own rows first, then round k of the peers' rows while round k+1 travels."""
    transport = group.transport
    rows, width = sum(counts), x.shape[1]
    transport.agree("all_gather_linear", x, rows, width)
    first = starts(counts)
    own = first[group.rank]
    size = -(-block_rows(rows, rows) // group.size)
    flying = []
    for ranges in part_blocks(counts, size):
        start, stop = ranges[group.rank]
        sizes = [b - a for a, b in ranges]
        flying.append((ranges, transport.all_gather(x[start - own : stop - own], sizes)))
    ys = [x.new_empty(rows, w.shape[0]) for w in ws]
    _rows_into(x, own, ws, biases, ys)
    gathered = x.new_empty(rows, width) if keep else None
    for ranges, pending in flying:
        block, position = pending.wait(), 0
        for peer, (start, stop) in enumerate(ranges):
            piece = block[position : position + stop - start]
            position += stop - start
            if gathered is not None:
                gathered[start:stop] = piece
            if peer != group.rank:
                _rows_into(piece, start, ws, biases, ys)
    return ys, gathered


def host(
    group: ParallelGroup,
    x: Tensor,
    ws: Sequence[Tensor],
    biases: Sequence[Tensor],
    counts: Sequence[int],
    keep: bool,
) -> Gathered:
    """Own rows first, then the peers' in order of arrival, straight from their shared buffers.

    Few rows, or ranks that share their cores, gain nothing from that: one product of gathered rows.
    """
    slot = group.slot
    rows, width = sum(counts), x.shape[1]
    x = x.contiguous()
    if rows <= GATHER_FIRST_ROWS or not group.communication_thread:
        whole = x.new_empty(rows, width)
        slot.all_gather(x, whole, counts, width, "all_gather_linear")
        return products(whole, ws, biases), whole if keep else None
    own = starts(counts)[group.rank]
    ys = [x.new_empty(rows, w.shape[0]) for w in ws]
    gathered = x.new_empty(rows, width) if keep else None
    most = slot.rows_of(width, x.dtype)
    unread: list[list[tuple[int, int]]] = []

    def read(ranges: list[tuple[int, int]]) -> None:
        waiting = [(group.rank + step) % group.size for step in range(1, group.size)]
        while waiting:
            place, index = slot.wait_any(waiting)
            peer = waiting.pop(place)
            start, stop = ranges[peer]
            piece = slot.view(peer, index, (stop - start, width), x.dtype)
            if gathered is not None:
                gathered[start:stop] = piece
            _rows_into(piece, start, ws, biases, ys)
        slot.finish()

    for ranges in part_blocks(counts, block_rows(max(counts), most)):
        start, stop = ranges[group.rank]
        index = slot.begin()
        slot.view(group.rank, index, (stop - start, width), x.dtype).copy_(
            x[start - own : stop - own]
        )
        slot.publish("all_gather_linear", x.dtype, rows, width, ranges[0][0])
        _rows_into(x[start - own : stop - own], start, ws, biases, ys)
        unread.append(ranges)
        if len(unread) > 1:
            read(unread.pop(0))
    read(unread.pop())
    if gathered is not None:
        gathered[own : own + x.shape[0]] = x
    return ys, gathered


def triton(
    group: ParallelGroup,
    x: Tensor,
    ws: Sequence[Tensor],
    biases: Sequence[Tensor],
    counts: Sequence[int],
    keep: bool,
) -> Gathered:
    """One kernel: it multiplies own rows first, then the peers' as they arrive."""
    agree(group, "all_gather_linear", x, x.shape[1], counts)
    used = ws or [x.new_empty(0, x.shape[1])]  # only to gather: a product without features
    ys, whole = launch(group, x, "all_gather_linear", x, used, counts=counts, bias=biases or None)
    return ys[: len(ws)], whole if keep else None


def triton_weight_gradients(
    group: ParallelGroup,
    dys: Sequence[Tensor],
    x: Tensor,
    counts: Sequence[int],
    needed: Sequence[bool],
    main_grads: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """See weight_gradients, with x of all ranks.

    For the first one kernel gathers the rows and uses them as they arrive; the others are plain products.
    """
    agree(group, "all_gather_weight_gradient", x, x.shape[1], counts)
    first = list(needed).index(True)
    main = main_grads[first] if main_grads else None
    options = {"counts": counts, "accumulate_into": main}
    dw, gathered = launch(group, x, "all_gather_weight_gradient", x, dys[first], **options)
    others = [need and index != first for index, need in enumerate(needed)]
    dws = weight_gradients(dys, gathered, others, main_grads)
    if main is None:
        dws[first] = dw
    return dws


def cuda(
    group: ParallelGroup,
    x: Tensor,
    ws: Sequence[Tensor],
    biases: Sequence[Tensor],
    counts: Sequence[int],
    keep: bool,
) -> Gathered:
    """Row groups through the process group on a stream of its own, products as they arrive.

    As `chunked`, but also the rows are put in their places beside the products. Or the copy engine brings
    rows, see _peers.py.
    """
    width = x.shape[1]
    if _peers.applies("all_gather_linear", group, x, counts, width, len(ws)):
        ys, whole = _peers.all_gather(group, x, ws, biases, counts)
        return ys, whole if keep else None
    groups = groups_of(group, "all_gather_linear", x, counts, width)
    gathered = x.new_empty(groups.total, width)
    ys = [x.new_empty(groups.total, w.shape[0]) for w in ws]
    first = starts(counts)[group.rank]
    with torch.cuda.device_of(x):
        own = signals_of(group, x)
    with torch.cuda.device_of(x), own.forked() as beside:
        flying = []
        with beside:
            for index in range(len(groups)):
                mine = groups.ranges(index)[group.rank]
                start = mine.source - first
                sizes = [piece.rows for piece in groups.ranges(index)]
                flying.append(group.transport.all_gather(x[start : start + mine.rows], sizes))
        _rows_into(x, first, ws, biases, ys)
        for index, pending in enumerate(flying):
            begin = groups.start(index)
            with beside:
                block = pending.wait()
                for piece in groups.ranges(index):
                    at = piece.target - begin
                    gathered[piece.source : piece.source + piece.rows] = block[at : at + piece.rows]
            own.join()
            for peer, piece in enumerate(groups.ranges(index)):
                if peer != group.rank:
                    rows = gathered[piece.source : piece.source + piece.rows]
                    _rows_into(rows, piece.source, ws, biases, ys)
    return ys, gathered if keep else None


IMPLEMENTATIONS = {
    "reference": reference,
    "chunked": chunked,
    "host": host,
    "triton": triton,
    "cuda": cuda,
}


def _rows_into(
    x: Tensor,
    start: int,
    ws: Sequence[Tensor],
    biases: Sequence[Tensor],
    ys: Sequence[Tensor],
) -> None:
    if x.shape[0]:
        for index, (w, y) in enumerate(zip(ws, ys, strict=True)):
            bias = biases[index] if biases else None
            linear(x, w, bias, y[start : start + x.shape[0]])
