"""Rows of all ranks on every rank, chunk by chunk, and products that begin before all of them are there.

Communication programs, one per channel, send this rank's rows to every peer and copy what the peers sent
to the result. Chunk j of every rank's rows belongs to channel j % channels, where it is round j // channels.
When a round is done, the channel's DONE flag says so to the programs of the same launch that multiply:

    communication:  ... round t of channel c -> result   DONE[c] = t + 1
    products:       wait until DONE says that the rows of the tile are there, multiply

DONE counts rounds of this launch; the last program that multiplies puts the flags back to zero. Programs
wait for others of their launch, so those that communicate come first in the grid, and all have to fit on the
device.

Rows arrive at the same rate from every peer. So they are taken in this order: this rank's own, for which
nothing is waited; then the first rows of every peer, the next ones of every peer, and so on.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

from tp_kernels.comm.layout import Division

from ._device import device_function, store_release
from ._gemm import Tiling
from ._rounds import length_of, receive, send_to_peers, start_of
from ._signals import CREDIT, DONE, FINISHED, READY, enter, leave, observe, publish, wait
from .workspace import Workspace


class Plan(NamedTuple):
    part: int  # elements that a rank sends a peer in a round
    channels: int
    programs: int  # of a launch
    senders: int  # of those, to gather: one for each channel, or none


def plan_gather(
    workspace: Workspace, division: Division, width: int, itemsize: int, tiling: Tiling, tiles: int
) -> Plan:
    """How rows of `width` elements are gathered for `tiles` tiles of products with `tiling`."""
    block = tiling.constants(itemsize)["BLOCK"]
    programs = min(tiling.programs, workspace.programs or tiling.programs)
    most = min(workspace.shape.channels, tiling.senders, 32 * tiling.warps, max(1, programs // 2))
    part, channels = workspace.divide(division.most * width, itemsize, block, most)
    return Plan(part, channels, channels + max(1, min(tiles, programs - channels)), channels)


@device_function
def gather_rows(
    x, out, small, larger, unit, width, part, channels, table, record, rank, timeout,
    REPORT: tl.constexpr, OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr,
    DEPTH: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [own rows, width] -> out [rows, width]; `part` elements of every rank in a round.

    small, larger, unit: see start_of, in rows.
    REPORT: whether programs of this launch wait for the rows.
    """
    channel = tl.program_id(0).to(tl.int64)
    me = tl.cast(rank, tl.int64)
    small, unit = tl.cast(small, tl.int64) * width, tl.cast(unit, tl.int64) * width  # in elements
    most = small + tl.minimum(larger, 1) * unit
    epoch, alive = enter(table, record, rank, channel, STRIDE, LANES)
    begin = epoch
    mine = start_of(me, small, larger, unit)
    my_count = start_of(me + 1, small, larger, unit) - mine
    first = channel * part
    while (first < most) & alive:
        epoch += 1
        my_length = length_of(my_count, first, part)
        alive = observe(
            table, record, rank, channel, CREDIT, epoch - DEPTH, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        for start in range(0, part, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = (offsets < my_length) & alive
            value = tl.load(x + first + offsets, mask=mask)
            tl.store(out + mine + first + offsets, value, mask=mask)
            send_to_peers(
                value, table, rank, channel, epoch, offsets, mask,
                WORLD, STRIDE, DEPTH, CHUNK,
            )  # fmt: skip
        publish(table, rank, channel, READY, epoch, alive, WORLD, STRIDE, LANES)
        alive = observe(
            table, record, rank, channel, READY, epoch, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        for step in range(1, WORLD):
            peer = (me + step) % WORLD
            theirs = start_of(peer, small, larger, unit)
            their_count = start_of(peer + 1, small, larger, unit) - theirs
            length = length_of(their_count, first, part)
            for start in range(0, part, BLOCK):
                offsets = start + tl.arange(0, BLOCK)
                mask = (offsets < length) & alive
                value = receive(
                    out.dtype.element_ty, table, peer, rank, channel, epoch, offsets, mask,
                    WORLD, STRIDE, DEPTH, CHUNK,
                )  # fmt: skip
                tl.store(out + theirs + first + offsets, value, mask=mask)
        publish(table, rank, channel, CREDIT, epoch, alive, WORLD, STRIDE, LANES)
        if REPORT:  # behind the barrier of `publish`
            lanes = tl.arange(0, LANES)
            flag = tl.load(table + rank) + channel * STRIDE + DONE + lanes.to(tl.int64) * 0
            store_release(flag, epoch - begin + lanes * 0, (lanes == 0) & alive)
        first += channels * part
    leave(table, rank, channel, epoch, alive, STRIDE)


@device_function
def await_rows(
    first, stop, small, larger, unit, width, part, channels, table, record, rank, alive, timeout,
    OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Wait for rows `first` to `stop` of the result, no more; returns whether `alive` still holds.

    small, larger, unit: see start_of, in rows of `width` elements. Lasts as long as the two waits of a round,
    so that the record of a failure names the peer: this program may have begun to wait before that one.
    """
    lanes = tl.arange(0, LANES)
    rounds = lanes * 0
    for peer in tl.static_range(WORLD):
        start = start_of(peer, small, larger, unit)
        low = tl.maximum(first, start) - start
        high = tl.minimum(stop, start_of(peer + 1, small, larger, unit)) - start
        if high > low:
            oldest = (low.to(tl.int64) * width // part).to(tl.int32)
            latest = ((high.to(tl.int64) * width - 1) // part).to(tl.int32)
            # The latest chunk of each channel.
            chunk = latest - (latest - lanes + channels * LANES) % channels
            needed = tl.where(chunk >= oldest, chunk // channels + 1, 0)
            rounds = tl.maximum(rounds, needed)
    used = (lanes < channels) & (rounds > 0)
    words = tl.load(table + rank) + lanes.to(tl.int64) * STRIDE + DONE
    patience = 2 * tl.cast(timeout, tl.int64)
    return wait(words, rounds, used, record, rank, -1, DONE, alive, patience, OPERATION, LANES)


@device_function
def finish(
    small, larger, unit, width, part, channels, programs, table, record, rank, alive, timeout,
    OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """After the last `await_rows` of each of the `programs` that multiply: the last one clears DONE."""
    tl.debug_barrier()
    base = tl.load(table + rank)
    counter = (base + FINISHED).to(tl.pointer_type(tl.int32))
    if tl.atomic_add(counter, 1, mask=alive, sem="acq_rel", scope="gpu") == programs - 1:
        # Of chunks that no tile waits for, since their rows are this rank's own, flags come later.
        alive = await_rows(
            0, start_of(WORLD, small, larger, unit), small, larger, unit, width, part, channels,
            table, record, rank, alive, timeout, OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        lanes = tl.arange(0, LANES)
        flags = (base + lanes.to(tl.int64) * STRIDE + DONE).to(tl.pointer_type(tl.int32))
        tl.store(flags, lanes * 0, mask=(lanes < channels) & alive)
        tl.store(counter, 0, mask=alive)


@device_function
def row_blocks_of(part, small, larger, unit, BLOCK: tl.constexpr):
    """(first, number) of the blocks of BLOCK rows that start in the rows of rank `part`."""
    first = tl.cdiv(start_of(part, small, larger, unit), BLOCK)
    return first, tl.cdiv(start_of(part + 1, small, larger, unit), BLOCK) - first


@device_function
def row_block_at(
    turn, rank, small, larger, unit, WORLD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """(block, whether there is one) that comes at place `turn` in the order of arrival.

    Own ones first. Then one of each peer in turn; a peer that has less than others leaves its last turn out.
    """
    first, own = row_blocks_of(rank, small, larger, unit, BLOCK)
    after = tl.maximum(turn - own, 0)
    peer = tl.where(turn < own, rank, (rank + 1 + after % (WORLD - 1)) % WORLD)
    index = tl.where(turn < own, turn, after // (WORLD - 1))
    first, count = row_blocks_of(peer, small, larger, unit, BLOCK)
    return first + index, index < count
