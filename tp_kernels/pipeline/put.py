"""Tensors from GPU to GPU of one host: copies into the receiver's memory, and a flag behind them.

Of every rank there is a ring of bytes for each rank that has stages next to its own, in memory that all
address, and two counters for each: of messages that came, and of its own messages that the other has read.

    sender's stream    copies into the peer's ring         | the peer's counter := n
    receiver's stream  wait until its counter is n         | copies out of it | the sender's counter := n

Both ends find the same places in the ring, from the sizes of messages alone. The host of the sender begins a
message when it knows that there is room, and sends its description when it has given the device all of it. So
a stream waits only for what another one has been given before: whatever else a host, a driver or a hardware
queue makes wait, no circle can be closed. The wait is one thread, because it has to end: the driver's own
wait has no deadline. The copies are of the copy engine and the counters are written by the driver where it
can, so that neither takes a multiprocessor from a kernel.

The protocol is that of the host's rings (csrc/include/tpk/signal.h), with streams in place of threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.regions import Region
from tp_kernels.comm.workspace import RECORD

from .message import TensorSpec
from .streams import Streams

_LINE = 128  # bytes; a counter has one to itself, and tensors begin at one


def neighbours(pairs: Collection[tuple[int, int]], rank: int) -> list[int]:
    """The ranks with stages next to those of `rank`."""
    return sorted({b for pair in pairs for a, b in (pair, pair[::-1]) if a == rank != b})


def region_bytes(world: int, pairs: Collection[tuple[int, int]], ring: int) -> int:
    """Memory of every rank: counters, then rings."""
    most = max(len(neighbours(pairs, rank)) for rank in range(world))
    return 2 * world * _LINE + most * _lines(ring)


def _lines(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


class _Places:
    """Where messages are in a ring; both ends count alike."""

    def __init__(self, size: int) -> None:
        self.size, self.next = size, 0
        self.count = 0  # messages

    def find(self, nbytes: int) -> int:
        return self.next if self.next + nbytes <= self.size else 0

    def take(self, nbytes: int) -> int:
        start = self.find(nbytes)
        self.next, self.count = start + nbytes, self.count + 1
        return start


class _Way:
    """Both directions between this rank and a peer."""

    def __init__(
        self,
        parts: Sequence[Tensor],
        pairs: Collection[tuple[int, int]],
        rank: int,
        peer: int,
        size: int,
    ) -> None:
        world = len(parts)

        def counter(owner: int, kind: int, other: int) -> Tensor:
            at = (kind * world + other) * _LINE
            return parts[owner][at : at + 4].view(torch.int32)

        def ring(owner: int, source: int) -> Tensor:
            at = 2 * world * _LINE + neighbours(pairs, owner).index(source) * size
            return parts[owner][at : at + size]

        # Counters are looked at where they are, in the memory of whoever waits.
        self.arrived, self.arrived_there = counter(rank, 0, peer), counter(peer, 0, rank)
        self.read_there = counter(peer, 1, rank)
        self.ring, self.ring_there = ring(rank, peer), ring(peer, rank)
        self.sent, self.received = _Places(size), _Places(size)
        self.in_ring: deque[tuple[int, int, int]] = deque()  # number, start, end of what was sent
        self.sending: Any = None  # streams
        self.receiving: Any = None
        self.left: Any = None  # events: all that was sent has left, all that was received is here
        self.here: Any = None

    def has_room(self, nbytes: int) -> bool:
        start = self.sent.find(nbytes)
        return all(end <= start or start + nbytes <= begin for _, begin, end in self.in_ring)


class PutRoutes:
    """DeviceRoutes by copies between the parts of a region, all of whose bytes are zero.

    Each counter is written by one rank only, so a rank may send before others have made theirs.

    Args:
        region: of at least `region_bytes`, equal on all ranks, on the device of `streams`.
        pairs: of ranks with stages next to each other, equal on all ranks. Others are not connected.
        ring: bytes; what a message may have at most.
        timeout: seconds a stream may wait for a peer.
    """

    def __init__(
        self,
        group: ParallelGroup,
        region: Region,
        streams: Streams,
        pairs: Collection[tuple[int, int]],
        ring: int,
        timeout: float,
    ) -> None:
        self._group, self._region, self._streams = group, region, streams
        self._timeout, self.most = timeout, _lines(ring)
        self._ways = {
            peer: _Way(region.parts, pairs, group.rank, peer, self.most)
            for peer in neighbours(pairs, group.rank)
        }
        self._record = torch.zeros(len(RECORD), dtype=torch.int32, device=region.local.device)
        self._heard = streams.visible(len(RECORD))  # the record as the host knows it
        first, last = group.size * _LINE, 2 * group.size * _LINE
        self._read = region.local[first:last].view(torch.int32)  # counters, a line each
        self._read_heard = streams.visible(self._read.numel())
        self._looking: Any = None  # a stream, and the event of its last copy
        self._looked: Any = None
        # What is loaded by its first use would else be loaded while streams wait.
        scratch = torch.zeros(1, dtype=torch.int32, device=region.local.device)
        self._await(scratch, 0, group.rank)
        for way in self._ways.values():
            streams.write_flag(way.arrived_there, 0)
            streams.write_flag(way.read_there, 0)
        self._made = streams.record()

    def cost(self, tensor: Tensor, peer: int) -> int | None:
        if tensor.device != self._region.local.device or peer not in self._ways:
            return None
        return _lines(tensor.nbytes)

    def mark(self) -> Any:
        return self._streams.record()

    def has_room(self, peer: int, tensors: Sequence[Tensor]) -> bool:
        way, nbytes = self._ways[peer], _bytes_of(tensors)
        if not way.has_room(nbytes):
            self._look()
        return way.has_room(nbytes)

    def send(self, peer: int, tensors: Sequence[Tensor], after: Any) -> Callable[[], bool]:
        way, streams = self._ways[peer], self._streams
        if way.sending is None:
            way.sending = self._new_stream()
        nbytes = _bytes_of(tensors)
        at = way.sent.take(nbytes)
        way.in_ring.append((way.sent.count, at, at + nbytes))
        streams.wait(after, way.sending)
        with streams.on(way.sending):
            for tensor in tensors:
                streams.copy(way.ring_there[at : at + tensor.nbytes], _flat(tensor))
                streams.keep(tensor)
                at += _lines(tensor.nbytes)
            streams.write_flag(way.arrived_there, way.sent.count)
            way.left = left = streams.record()
        return lambda: streams.over(left)

    def receive(
        self, peer: int, specs: Sequence[TensorSpec]
    ) -> tuple[list[Tensor], Callable[[], object]]:
        way, streams = self._ways[peer], self._streams
        if way.receiving is None:
            way.receiving = self._new_stream()
        with streams.on(way.receiving):
            tensors = [streams.empty(spec.shape, spec.dtype) for spec in specs]
            at = way.received.take(_bytes_of(tensors))
            self._await(way.arrived, way.received.count, peer)
            for tensor in tensors:
                streams.copy(_flat(tensor), way.ring[at : at + tensor.nbytes])
                at += _lines(tensor.nbytes)
            streams.write_flag(way.read_there, way.received.count)
            streams.copy(self._heard, self._record)
            way.here = here = streams.record()

        def ready() -> None:
            streams.wait(here)
            for tensor in tensors:
                streams.keep(tensor)

        return tensors, ready

    def flush(self) -> bool:
        for way in self._ways.values():
            if way.left is not None:
                self._streams.wait(way.left)
        return True

    def idle(self) -> bool:
        events = [event for way in self._ways.values() for event in (way.left, way.here)]
        return all(event is None or self._streams.over(event) for event in (*events, self._looked))

    def failed(self) -> str:
        record = dict(zip(RECORD, self._heard.tolist(), strict=True))
        if record["state"] != 2:  # 1 while it is filled
            return ""
        return (
            f"the device of rank {record['rank']} waited {self._timeout:g} s for a tensor from rank "
            f"{record['peer']} (message {record['expected']}, seen {record['seen']})"
        )

    def leave(self) -> None:
        # Streams of this rank may still use it all. What peers address is mapped by them as well.
        if not self.idle():
            kept = self._region, self._record, self._heard, self._read_heard
            self._group.transport.abandoned.append(kept)

    def describe(self) -> str:
        return (
            "by copies from GPU to GPU with flags, between ranks with stages next to each other and up to "
            f"{self.most / (1 << 20):g} MiB a message, else through host memory"
        )

    def _new_stream(self) -> Any:
        stream = self._streams.new()
        self._streams.wait(self._made, stream)
        return stream

    def _look(self) -> None:
        """Learn what peers have read, as far as a look that was begun before has seen it; begin another."""
        streams = self._streams
        if self._looking is None:
            self._looking = self._new_stream()
        elif not streams.over(self._looked):
            return
        else:
            for peer, way in self._ways.items():
                read = int(self._read_heard[peer * _LINE // 4])
                while way.in_ring and _difference(read, way.in_ring[0][0]) >= 0:
                    way.in_ring.popleft()
        with streams.on(self._looking):
            streams.copy(self._read_heard, self._read)
            self._looked = streams.record()

    def _await(self, flag: Tensor, count: int, peer: int) -> None:
        self._streams.wait_for(flag, count, self._record, self._timeout, self._group.rank, peer)


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum([_lines(tensor.nbytes) for tensor in tensors])


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _difference(a: int, b: int) -> int:
    """a - b of counters of 32 bits, which wrap."""
    return (a - b + 2**31) % 2**32 - 2**31
