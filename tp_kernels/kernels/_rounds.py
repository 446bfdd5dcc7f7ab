"""Steps that kernels have in common: send elements in a round, sum what a round has brought."""

from __future__ import annotations

import triton.language as tl

from ._device import device_function, widen
from ._signals import buffer


@device_function
def send(
    value, table, peer, rank, channel, epoch, offsets, mask,
    WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store `value` to this rank's chunk at `peer`, by `offsets` in elements."""
    TYPE: tl.constexpr = value.dtype.scalar
    chunk = buffer(TYPE, table, peer, channel, epoch, rank, WORLD, STRIDE, DEPTH, CHUNK)
    tl.store(chunk + offsets, value, mask=mask)


@device_function
def send_to_peers(
    value, table, rank, channel, epoch, offsets, mask,
    WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """As send, to every peer."""
    for step in range(1, WORLD):  # not all to the same rank at once
        send(
            value, table, (rank + step) % WORLD, rank, channel, epoch, offsets, mask,
            WORLD, STRIDE, DEPTH, CHUNK,
        )  # fmt: skip


@device_function
def receive(
    TYPE: tl.constexpr, table, source, rank, channel, epoch, offsets, mask,
    WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Elements of type TYPE that rank `source` has sent in this round; 0 where not `mask`."""
    chunk = buffer(TYPE, table, rank, channel, epoch, source, WORLD, STRIDE, DEPTH, CHUNK)
    return tl.load(chunk + offsets, mask=mask, other=0)


@device_function
def sum_of_ranks(
    own, table, rank, channel, epoch, offsets, mask,
    WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """float32 sums, in rank order, of `own` and what the peers have sent in this round."""
    total = tl.full(offsets.shape, 0.0, tl.float32)
    for source in tl.static_range(WORLD):
        theirs = receive(
            own.dtype.scalar, table, source, rank, channel, epoch, offsets,
            mask & (source != rank), WORLD, STRIDE, DEPTH, CHUNK,
        )  # fmt: skip
        part = widen(tl.where(source == rank, own, theirs))
        if source == 0:
            total = part
        else:
            total += part
    return total


@device_function
def length_of(count, first, part):
    """How many of `count` elements, counted in int64, a round of `part` takes from `first` on; int32."""
    return tl.maximum(tl.minimum(count - first, part), 0).to(tl.int32)


@device_function
def start_of(rank, small, larger, unit):
    """Where the rows of `rank` start: all ranks have `small` rows, the first `larger` ones `unit` more.

    As Division in comm/layout.py; in elements if its numbers are.
    """
    return rank * small + tl.minimum(rank, larger) * unit
