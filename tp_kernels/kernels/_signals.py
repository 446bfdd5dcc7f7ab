"""How kernels of different ranks tell each other about data: publish, observe, credit.

A *channel* is what one program of a kernel exchanges with the program of the same index on every peer. It
has buffers, signals and an epoch of its own, so programs of one launch never wait for each other, and a
launch may use as many channels as its size needs: those it does not use simply fall behind.

A *round* of a channel, on each rank, with `epoch` counting rounds for ever (csrc/include/tpk/signal.h):

    epoch += 1
    observe(CREDIT, epoch - DEPTH)  every peer has read what this rank sent it DEPTH rounds ago
    plain stores into buffer `epoch % DEPTH` of the peers
    publish(READY, epoch)
    observe(READY, epoch)           every peer's data is here
    plain loads from the own buffers
    publish(CREDIT, epoch)          the peers may overwrite them

Every flag has one writer, the peer, and is polled where it is, in this rank's memory. The epoch is in device
memory and advanced by the kernel, so replays of a captured CUDA graph go on counting.

Epochs are int32 and wrap: differences are compared, which holds for 2^31 rounds, and DEPTH is a power of two.

A wait lasts `timeout` nanoseconds at most. Then the program fills the record (see RECORD) and goes on without
effect: `alive` is false from there on, which masks its stores and signals, so that no peer takes for
data what was never complete. Programs that start later see the record and do the same.
"""

from __future__ import annotations

import triton.language as tl

from tp_kernels.comm import workspace
from tp_kernels.comm.devices import MOST_RANKS as MOST_RANKS  # a word of READY and CREDIT for each
from tp_kernels.comm.workspace import RECORD as RECORD

from ._device import device_function, largest, load_acquire, nanoseconds, rest, store_release

# Byte offsets in a channel.
READY = tl.constexpr(workspace.READY)
CREDIT = tl.constexpr(workspace.CREDIT)
EPOCH = tl.constexpr(workspace.EPOCH)
DONE = tl.constexpr(workspace.DONE)
FINISHED = tl.constexpr(workspace.FINISHED)
SIGNAL_BYTES = tl.constexpr(workspace.SIGNAL_BYTES)  # the buffers come after it
# Not in a channel: the counter of a group of rows, see linear_signalled.py.
TILES = tl.constexpr(1)


@device_function
def enter(table, record, rank, channel, STRIDE: tl.constexpr, LANES: tl.constexpr):
    """(rounds this channel has made, whether the workspace is intact); before anything else."""
    epoch = tl.load(
        (tl.load(table + rank) + channel * STRIDE + EPOCH).to(tl.pointer_type(tl.int32))
    )
    # Another program may fail right now: one load per thread, and the block agrees about them.
    failed = tl.load(record + tl.full([LANES], 0, tl.int32))
    return epoch, largest(failed) == 0


@device_function
def leave(table, rank, channel, epoch, alive, STRIDE: tl.constexpr):
    """Keep the epoch for the next launch; after everything else."""
    word = (tl.load(table + rank) + channel * STRIDE + EPOCH).to(tl.pointer_type(tl.int32))
    tl.debug_barrier()
    tl.store(word, epoch, mask=alive)


@device_function
def buffer(
    TYPE: tl.constexpr,
    table,
    owner,
    channel,
    epoch,
    source,
    WORLD: tl.constexpr,
    STRIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Pointer to what rank `source` sends rank `owner` in this round: CHUNK bytes of TYPE."""
    place = (epoch & (DEPTH - 1)) * WORLD + source
    offset = channel * STRIDE + SIGNAL_BYTES + place.to(tl.int64) * CHUNK
    pointer = (tl.load(table + owner) + offset).to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 16)  # from a table, so the compiler cannot know


@device_function
def publish(
    table,
    rank,
    channel,
    SIGNAL: tl.constexpr,
    epoch,
    alive,
    WORLD: tl.constexpr,
    STRIDE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Tell every peer that all threads of this program have finished reading or writing round `epoch`."""
    tl.debug_barrier()  # one thread releases for the whole block
    peers = tl.arange(0, LANES)
    used = (peers < WORLD) & (peers != rank) & alive
    base = tl.load(table + peers, mask=used, other=0)
    store_release(base + channel * STRIDE + SIGNAL + rank * 4, epoch + peers * 0, used)


@device_function
def observe(
    table,
    record,
    rank,
    channel,
    SIGNAL: tl.constexpr,
    expected,
    alive,
    timeout,
    OPERATION: tl.constexpr,
    WORLD: tl.constexpr,
    STRIDE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Wait until every peer has published `expected` or later; returns whether `alive` still holds."""
    peers = tl.arange(0, LANES)
    used = (peers < WORLD) & (peers != rank)
    words = tl.load(table + rank) + channel * STRIDE + SIGNAL + peers.to(tl.int64) * 4
    return wait(
        words, expected + peers * 0, used, record, rank, channel, SIGNAL, alive, timeout,
        OPERATION, LANES,
    )  # fmt: skip


@device_function
def wait(
    words,
    reached,
    used,
    record,
    rank,
    channel,
    SIGNAL: tl.constexpr,
    alive,
    timeout,
    OPERATION: tl.constexpr,
    LANES: tl.constexpr,
):
    """Wait until each flag at `words` [lanes] that is `used` is at least `reached`; see `observe`."""
    lanes = tl.arange(0, LANES)
    seen = reached
    begin = nanoseconds(lanes)
    verdict = alive.to(tl.int32)  # 0: go on, 1: wait, 2: expired
    while verdict == 1:
        seen = load_acquire(words, used, reached)
        late = 1 + (nanoseconds(lanes) - begin > timeout).to(tl.int32)
        verdict = largest(tl.where(seen - reached < 0, late, 0))
        if verdict == 1:
            rest()
    tl.debug_barrier()  # what one thread has observed holds for the block
    if verdict == 2:
        lane = -largest(tl.where(seen - reached < 0, -lanes, -LANES))
        if tl.atomic_cas(record, 0, 1, sem="relaxed", scope="sys") == 0:  # the first one counts
            tl.store(record + 1, rank)
            tl.store(record + 2, OPERATION)
            tl.store(record + 3, channel)
            tl.store(record + 4, SIGNAL)
            tl.store(record + 5, lane)
            tl.store(record + 6, largest(tl.where(lanes == lane, reached, -2147483648)))
            tl.store(record + 7, largest(tl.where(lanes == lane, seen, -2147483648)))
            tl.debug_barrier()
            tl.atomic_xchg(record, 2, sem="release", scope="sys")
    return alive & (verdict != 2)
