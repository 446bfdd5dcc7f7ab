"""y = all_reduce(sum_i x_i W_i^T) + bias: the product whose summands are spread over the ranks.

Forward of `linear_all_reduce`, input gradient of `copy_linear`. Partial products have the dtype of x and
are summed over ranks in fp32, in rank order; bias is added once, before the one rounding.

    x_i [M, K_i], W_i [N, K_i], bias [N] -> y [M, N] on every rank
    between: called when this rank's part is on its way, to do work that hides the transfer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.process_group import Pending
from tp_kernels.comm.row_groups import Piece
from tp_kernels.comm.short_way import SHORT_ROWS

from . import _peers
from ._gemm import Between, add_parts, block_rows, blocks, few_rows, partial_product
from ._round import RoundReader
from ._signalled import Add, send_by_groups
from ._workspace import agree, launch


def reference(
    group: ParallelGroup,
    xs: Sequence[Tensor],
    ws: Sequence[Tensor],
    bias: Tensor | None,
    between: Between = None,
) -> Tensor:
    """Whole product, then the collective: the oracle and the serial baseline."""
    group.transport.agree("linear_all_reduce", xs[0], xs[0].shape[0], ws[0].shape[0])
    summed = _send(group, partial_product(xs, ws), bias)
    if between:
        between()
    return summed.gather().wait()


def chunked(
    group: ParallelGroup,
    xs: Sequence[Tensor],
    ws: Sequence[Tensor],
    bias: Tensor | None,
    between: Between = None,
) -> Tensor:
    """Row blocks through the process group: block k travels while block k+1 is computed."""
    rows, width = xs[0].shape[0], ws[0].shape[0]
    group.transport.agree("linear_all_reduce", xs[0], rows, width)
    sending: list[_Block] = []
    gathering: list[_Gathering] = []
    for start, stop in blocks(rows, block_rows(rows, rows)):
        sending.append(_send(group, partial_product([x[start:stop] for x in xs], ws), bias))
        if len(sending) > 1:
            gathering.append(sending.pop(0).gather())
    if between:
        between()
    gathering.append(sending.pop().gather())
    return torch.cat([block.wait() for block in gathering])


def host(
    group: ParallelGroup,
    xs: Sequence[Tensor],
    ws: Sequence[Tensor],
    bias: Tensor | None,
    between: Between = None,
) -> Tensor:
    """Sums in shared memory: block k-1 on a thread while block k is computed, if there is a core for it.

    Otherwise nothing can be hidden, and blocks would only make the product slower: it is computed whole
    and summed where it is.
    """
    slot = group.slot
    dtype = xs[0].dtype
    rows, width = xs[0].shape[0], ws[0].shape[0]
    out = xs[0].new_empty(rows, width)
    if between is None and rows <= SHORT_ROWS and slot.fits(out):  # as all ranks see it
        if len(xs) == 1 and few_rows(xs[0], ws[0]):  # as this rank may
            slot.linear("linear_all_reduce", xs[0], ws[0], bias, out)
        else:
            partial_product(xs, ws, slot.view(group.rank, slot.begin(), (rows, width), dtype))
            slot.complete("linear_all_reduce", rows, width, 0, out, bias)
        return out
    if not group.communication_thread:
        partial_product(xs, ws, out)
        if between:
            between()
        slot.all_reduce_rows("linear_all_reduce", out, bias)
        return out
    with RoundReader("linear_all_reduce", slot) as reader:
        for start, stop in blocks(rows, block_rows(rows, slot.rows_of(width, dtype))):
            slot.begin()
            block = out[start:stop]
            partial_product([x[start:stop] for x in xs], ws, block)
            slot.fill_summands(block)
            slot.publish("linear_all_reduce", dtype, rows, width, start)
            reader.add(block, None, bias)
        if between:
            between()
    return out


def triton(
    group: ParallelGroup,
    xs: Sequence[Tensor],
    ws: Sequence[Tensor],
    bias: Tensor | None,
    between: Between = None,
) -> Tensor:
    """One kernel: it sends tiles to the peers' memory while it computes the next ones.

    Several products are summed in fp32 and rounded once, where the others round each of them.
    """
    agree(group, "linear_all_reduce", xs[0], ws[0].shape[0], [xs[0].shape[0]])
    out = launch(group, xs[0], "linear_all_reduce", xs, ws, bias=bias)
    if between:
        between()
    return out


def cuda(
    group: ParallelGroup,
    xs: Sequence[Tensor],
    ws: Sequence[Tensor],
    bias: Tensor | None,
    between: Between = None,
) -> Tensor:
    """One product; the process group sums its row groups as they are finished, see _signalled.py.

    Several products are summed as in `triton`. Few rows are summed in the memory of the peers, see
    _peers.py; there each of several products is rounded.
    """
    rows = xs[0].shape[0]
    if _peers.applies("linear_all_reduce", group, xs[0], [rows], ws[0].shape[0], 1):
        out = _peers.all_reduce(group, xs, ws, bias)
        if between:
            between()
        return out
    out = xs[0].new_empty(rows, ws[0].shape[0])

    def send(partial: Tensor, pieces: Sequence[Piece], add: Add) -> None:
        (piece,) = pieces
        target = out[piece.source : piece.source + piece.rows]
        summed = _send(group, partial, bias).gather(add, target).wait()
        if summed.data_ptr() != target.data_ptr():
            target.copy_(summed)

    send_by_groups(group, "linear_all_reduce", xs, ws, [rows], send, between)
    return out


IMPLEMENTATIONS = {
    "reference": reference,
    "chunked": chunked,
    "host": host,
    "triton": triton,
    "cuda": cuda,
}


class _Block:
    """One row block on its way to the ranks that sum its parts."""

    def __init__(
        self, group: ParallelGroup, pending: Pending | None, partial: Tensor, bias: Tensor | None
    ) -> None:
        self._group, self._pending, self._partial, self._bias = group, pending, partial, bias

    def gather(self, add: Add = add_parts, out: Tensor | None = None) -> _Gathering:
        """Sum this rank's part and send the sum to everybody; to `out` if it is of the right size."""
        partial, group = self._partial, self._group
        if self._pending is None:
            return _Gathering(None, partial)
        parts = self._pending.wait()
        length = parts.shape[1]
        mine = add(parts, self._bias, parts.new_empty(1, length), group.rank * length)
        return _Gathering(group.transport.all_gather(mine, [1] * group.size, out), partial)


class _Gathering:
    def __init__(self, pending: Pending | None, like: Tensor) -> None:
        self._pending, self._like = pending, like

    def wait(self) -> Tensor:
        if self._pending is None:
            return self._like
        return self._pending.wait().view(-1)[: self._like.numel()].view(self._like.shape)


def _send(group: ParallelGroup, partial: Tensor, bias: Tensor | None) -> _Block:
    """Start the all-to-all of equal parts; part r is summed by rank r."""
    if partial.numel() == 0:
        return _Block(group, None, partial, bias)
    part = -(-partial.numel() // group.size)
    padded = partial.view(-1)
    if part * group.size != partial.numel():
        padded = partial.new_zeros(group.size * part)
        padded[: partial.numel()] = partial.view(-1)
    ones = [1] * group.size
    pending = group.transport.all_to_all(padded.view(group.size, part), ones, ones)
    return _Block(group, pending, partial, bias)
