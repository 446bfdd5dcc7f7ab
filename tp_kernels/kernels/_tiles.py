"""What kernels do with tiles of partial sums: multiply for their owner, sum, pass on.

The rows of a result are divided over the ranks (see start_of). A tile is a block of columns and, of every
rank's part of the rows, the block of rows at the same place: `down` in the part, `right` in the columns.
"""

from __future__ import annotations

import triton.language as tl

from ._device import device_function, narrow, widen
from ._gemm import product
from ._rounds import receive, send, send_to_peers, start_of, sum_of_ranks
from ._signals import CREDIT, READY, observe, publish


@device_function
def rows_at(part, down, small, larger, unit):
    """(first row of the tile in the part of rank `part`, rows left from there, which may be negative)."""
    start = start_of(part, small, larger, unit)
    return start + down, start_of(part + 1, small, larger, unit) - start - down


@device_function
def send_products(
    operands, down, right, width, small, larger, unit, TYPE: tl.constexpr,
    table, record, rank, channel, epoch, alive, timeout,
    OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Every rank's rows of the tile, rounded to TYPE, to that rank; then READY. Returns `alive`."""
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    # Not all to the same rank at once, to itself last. What could be computed ahead of the loop would
    # take registers from the product, and be spilled.
    for step in tl.range(1, WORLD + 1, disable_licm=True):
        owner = (rank + step) % WORLD
        first, rows = rows_at(owner, down, small, larger, unit)
        value = narrow(
            product(operands, first, rows, right, width - right, BLOCK_M, BLOCK_N, BLOCK_K, TMA),
            TYPE,
        )
        if step == 1:  # not earlier: the first product hides the wait
            alive = observe(
                table, record, rank, channel, CREDIT, epoch - DEPTH, alive, timeout,
                OPERATION, WORLD, STRIDE, LANES,
            )  # fmt: skip
        send(
            value, table, owner, rank, channel, epoch,
            m[:, None] * BLOCK_N + n[None, :], (m < rows)[:, None] & alive,
            WORLD, STRIDE, DEPTH, CHUNK,
        )  # fmt: skip
        if step == WORLD - 1:
            publish(table, rank, channel, READY, epoch, alive, WORLD, STRIDE, LANES)
    return alive


@device_function
def sum_tile(
    bias, out, first, rows, right, width, table, rank, channel, epoch, alive, onward,
    PASS_ON: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum what all ranks have sent in round `epoch`, with bias, to `rows` rows of out from `first` on.

    PASS_ON: also to every peer, in round `onward`. BLOCK: elements at a time.
    """
    TYPE: tl.constexpr = out.dtype.element_ty
    for start in tl.range(0, tl.minimum(rows, BLOCK_M) * BLOCK_N, BLOCK, disable_licm=True):
        offsets = start + tl.arange(0, BLOCK)
        row, column = offsets // BLOCK_N, right + offsets % BLOCK_N
        inside = (row < rows) & alive
        own = receive(
            TYPE, table, rank, rank, channel, epoch, offsets, inside, WORLD, STRIDE, DEPTH, CHUNK
        )
        total = sum_of_ranks(
            own, table, rank, channel, epoch, offsets, inside, WORLD, STRIDE, DEPTH, CHUNK
        )
        if bias is not None:
            total += widen(tl.load(bias + column, mask=column < width, other=0.0))
        value = narrow(total, TYPE)
        place = (first + row).to(tl.int64) * width + column
        tl.store(out + place, value, mask=inside & (column < width))
        if PASS_ON:
            send_to_peers(
                value, table, rank, channel, onward, offsets, inside,
                WORLD, STRIDE, DEPTH, CHUNK,
            )  # fmt: skip


@device_function
def copy_tile(
    bias, out, source, first, rows, right, width, table, rank, channel, epoch, alive,
    WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What rank `source` has sent in round `epoch`, with bias, to `rows` rows of out from `first` on."""
    TYPE: tl.constexpr = out.dtype.element_ty
    for start in tl.range(0, tl.minimum(rows, BLOCK_M) * BLOCK_N, BLOCK, disable_licm=True):
        offsets = start + tl.arange(0, BLOCK)
        row, column = offsets // BLOCK_N, right + offsets % BLOCK_N
        inside = (row < rows) & alive
        value = receive(
            TYPE, table, source, rank, channel, epoch, offsets, inside, WORLD, STRIDE, DEPTH, CHUNK
        )
        if bias is not None:
            added = tl.load(bias + column, mask=column < width, other=0.0)
            value = narrow(widen(value) + widen(added), TYPE)
        place = (first + row).to(tl.int64) * width + column
        tl.store(out + place, value, mask=inside & (column < width))
