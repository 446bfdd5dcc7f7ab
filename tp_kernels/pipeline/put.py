"""Tensors from GPU to GPU of one host: copies into the receiver's memory, and a flag behind each.

Of every rank there is a ring of cells for each other rank, in memory that all address, and two counters for
each: of cells that it was sent, and of its own cells that the other has read.

    sender's stream    wait until cell n - CELLS was read | copy into cell n of the peer | its flag := n
    receiver's stream  wait until its flag is n           | copy out of cell n | the sender's flag := n

The copies are of the copy engine and the flags are written by the driver where it can, so that neither takes
a multiprocessor from a kernel. A wait is one thread, because it has to end: the driver's own wait has no
deadline. The first CELLS cells wait for nothing. Every peer has a stream for each direction, and programs
run on streams of their own: whoever takes a value makes its stream wait for the copies of that value only.

The protocol is that of the host's rings (csrc/include/tpk/signal.h), with streams in place of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from tp_kernels import native
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.regions import Region
from tp_kernels.comm.workspace import RECORD

from .message import TensorSpec

CELLS = 4  # of a ring: a copy in, a copy out, and one to spare for each
_LINE = 128  # bytes; a flag has one to itself
_OPERATION = "pipeline"
_ELEMENTS, _ROOM = 0, 1  # what a wait is for, in its record


def cell_bytes(buffer_bytes: int) -> int:
    """Of a ring of `buffer_bytes`, a multiple of what copy engines move at a time."""
    return max(_LINE, buffer_bytes // CELLS // _LINE * _LINE)


def region_bytes(world: int, buffer_bytes: int) -> int:
    """Memory of every rank: flags, then a ring for each rank."""
    return world * (2 * _LINE + CELLS * cell_bytes(buffer_bytes))


class Streams(Protocol):
    """What PutRoutes asks of a kind of device. A stream of None is the current one."""

    def new(self) -> Any:
        """A stream."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Where `stream` is the current one, for the calls below without a stream."""

    def record(self, stream: Any = None) -> Any:
        """An event: all that `stream` has been given so far."""

    def wait(self, event: Any, stream: Any = None) -> None:
        """Let `stream` go on when the event is over."""

    def over(self, event: Any) -> bool:
        """Whether an event is over."""

    def keep(self, tensor: Tensor, stream: Any = None) -> None:
        """The memory of a tensor is in use until what `stream` has been given so far is done."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor for what the current stream writes."""

    def visible(self, count: int) -> Tensor:
        """int32 [count], zero, that the host reads while streams write it."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """In the current stream."""

    def wait_for(
        self,
        flag: Tensor,
        count: int,
        record: Tensor,
        timeout: float,
        rank: int,
        peer: int,
        what: int,
    ) -> None:
        """As native.wait_for, in the current stream."""

    def write_flag(self, flag: Tensor, count: int) -> None:
        """As native.write_flag, in the current stream."""


class _Way:
    """Both directions between this rank and a peer."""

    def __init__(self, parts: Sequence[Tensor], rank: int, peer: int, cell: int) -> None:
        world = len(parts)

        def flag(owner: int, kind: int, other: int) -> Tensor:
            at = (kind * world + other) * _LINE
            return parts[owner][at : at + 4].view(torch.int32)

        def ring(owner: int, source: int) -> list[Tensor]:
            at = 2 * world * _LINE + source * CELLS * cell
            return list(parts[owner][at : at + CELLS * cell].split(cell))

        self.peer = peer
        # Flags are polled where they are, in the memory of whoever waits.
        self.has_arrived, self.has_room = flag(rank, 0, peer), flag(rank, 1, peer)
        self.arrived_there, self.room_there = flag(peer, 0, rank), flag(peer, 1, rank)
        self.cells, self.cells_there = ring(rank, peer), ring(peer, rank)
        self.sent = self.received = 0  # cells
        self.sending: Any = None  # streams
        self.receiving: Any = None
        self.left: Any = None  # event: all that was sent has left


class PutRoutes:
    """DeviceRoutes by copies between the parts of a region, all of whose bytes are zero.

    Args:
        region: of at least `region_bytes`, equal on all ranks, on the device of `streams`.
        timeout: seconds a stream may wait for a peer.
    """

    def __init__(
        self,
        group: ParallelGroup,
        region: Region,
        streams: Streams,
        buffer_bytes: int,
        timeout: float,
    ) -> None:
        self._group, self._region, self._streams = group, region, streams
        self._timeout, self._bytes = timeout, buffer_bytes
        self._cell = cell_bytes(buffer_bytes)
        self._ways = {
            peer: _Way(region.parts, group.rank, peer, self._cell)
            for peer in range(group.size)
            if peer != group.rank
        }
        self._record = torch.zeros(len(RECORD), dtype=torch.int32, device=region.local.device)
        self._heard = streams.visible(len(RECORD))  # the record as the host knows it
        # A kernel that is loaded later, by its first launch, would wait for those that wait for a peer.
        scratch = torch.zeros(1, dtype=torch.int32, device=region.local.device)
        self._await(scratch, 0, group.rank, _ROOM)
        streams.write_flag(scratch, 0)

    def carries(self, tensor: Tensor, peer: int) -> bool:
        return tensor.device == self._region.local.device

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        way, streams = self._ways[peer], self._streams
        if way.sending is None:
            way.sending = streams.new()
        streams.wait(streams.record(), way.sending)
        with streams.on(way.sending):
            for tensor in tensors:
                for piece in self._pieces(tensor):
                    way.sent += 1
                    if way.sent > CELLS:
                        self._await(way.has_room, way.sent - CELLS, peer, _ROOM)
                    cell = way.cells_there[(way.sent - 1) % CELLS]
                    streams.copy(cell[: piece.numel()], piece)
                    streams.write_flag(way.arrived_there, way.sent)
                streams.keep(tensor)
            streams.copy(self._heard, self._record)
            way.left = streams.record()

    def receive(
        self, peer: int, specs: Sequence[TensorSpec]
    ) -> tuple[list[Tensor], Callable[[], object]]:
        way, streams = self._ways[peer], self._streams
        if way.receiving is None:
            way.receiving = streams.new()
        with streams.on(way.receiving):
            tensors = [streams.empty(spec.shape, spec.dtype) for spec in specs]
            for tensor in tensors:
                for piece in self._pieces(tensor):
                    way.received += 1
                    self._await(way.has_arrived, way.received, peer, _ELEMENTS)
                    streams.copy(piece, way.cells[(way.received - 1) % CELLS][: piece.numel()])
                    streams.write_flag(way.room_there, way.received)
            streams.copy(self._heard, self._record)
            arrived = streams.record()

        def ready() -> None:
            streams.wait(arrived)
            for tensor in tensors:
                streams.keep(tensor)

        return tensors, ready

    def flush(self) -> None:
        for way in self._ways.values():
            if way.left is not None:
                self._streams.wait(way.left)

    def sent(self) -> bool:
        return all(way.left is None or self._streams.over(way.left) for way in self._ways.values())

    def failed(self) -> str:
        record = dict(zip(RECORD, self._heard.tolist(), strict=True))
        if record["state"] != 2:  # 1 while it is filled
            return ""
        what = "a tensor from" if record["channel"] == _ELEMENTS else "room for a tensor on"
        return (
            f"the device of rank {record['rank']} waited {self._timeout:g} s for {what} rank "
            f"{record['peer']} (cell {record['expected']}, seen {record['seen']})"
        )

    def leave(self) -> None:
        # Streams of this rank may still use the region; what the peers address is mapped by them as well.
        self._group.transport.abandoned.append(self._region)

    def describe(self) -> str:
        return (
            f"by copies from GPU to GPU with flags (rings of {self._bytes / (1 << 20):g} MiB for each rank, "
            f"cells of {self._cell} bytes)"
        )

    def _await(self, flag: Tensor, count: int, peer: int, what: int) -> None:
        self._streams.wait_for(
            flag, count, self._record, self._timeout, self._group.rank, peer, what
        )

    def _pieces(self, tensor: Tensor) -> Sequence[Tensor]:
        if tensor.numel() == 0:
            return ()
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        return flat.split(self._cell)


class CudaStreams:
    """Streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream or self._current())
        return event

    def wait(self, event: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> None:
        (stream or self._current()).wait_event(event)

    def over(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def keep(self, tensor: Tensor, stream: torch.cuda.Stream | None = None) -> None:
        tensor.record_stream(stream or self._current())

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def visible(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def wait_for(
        self,
        flag: Tensor,
        count: int,
        record: Tensor,
        timeout: float,
        rank: int,
        peer: int,
        what: int,
    ) -> None:
        native.wait_for(
            flag,
            count,
            record,
            timeout=timeout,
            operation=_OPERATION,
            rank=rank,
            group=what,
            peer=peer,
        )

    def write_flag(self, flag: Tensor, count: int) -> None:
        native.write_flag(flag, count)

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)
