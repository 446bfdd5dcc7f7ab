"""Messages of a pipeline through a process group: gloo, on one host or several.

Where the backend for host memory is another one, or there is none, as with NCCL alone, one of the same
ranks is made.

A message is a block of 512 bytes and, behind it, the rest of a long head and the tensors:

    tag 8 bytes | bytes of the head 8 | bytes of the tensors 8 | messages received from the other side so far
    8 | start of the head 472 | 1 in 8 bytes

What is sent is copied, so that it has left its tensors at once, and kept until the peer's next message says
that it has been received: credits bound how much that is. No backend tells whether a receive is complete
without waiting for it; the last word of a block, which is received last, does.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor

from tp_kernels.comm import objects
from tp_kernels.comm.faults import error_from_process_group, is_transport_failure, suspects
from tp_kernels.comm.group import ParallelGroup

from .device_process_group import backend_for, new_backend
from .lanes import CLOSED, FAILED
from .transport import ANNOUNCED, Lost, Span

_BLOCK = 512
_HEADER = struct.Struct("<QQQQ")
_START = _BLOCK - _HEADER.size - 8  # bytes of the head in the block
_ONE = struct.pack("<Q", 1)
_WIRE_TAGS = 0x5450_0000  # far from what others use with the same process group
_LOOK_SECONDS = 0.1  # how often the processes of peers and the store are looked at
_LONGEST_PAUSE = 5e-4


class _Route:
    """Both directions between this rank and a peer."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.in_flight: deque[tuple[int, Any, Tensor]] = deque()  # (message, work, its memory)
        self.sent = 0
        self.received = 0
        self.block: Tensor | None = None  # that a header is received into
        self.arrival: Any = None
        self.closed = False


class ProcessGroupRoutes:
    """The calls of `Transport` through the process group of `group`; construction is collective."""

    memory = None

    def __init__(self, group: ParallelGroup, timeout: float) -> None:
        assert group.process_group is not None and group.rendezvous is not None
        self._group = group
        self._backend = backend_for(group.process_group, "cpu")
        if self._backend is None or self._backend.name() != "gloo":
            store = group.rendezvous.corner("gloo").store("backend")
            self._backend = new_backend("gloo", store, group.rank, group.size, group.timeout)
        self._deadline = timedelta(seconds=timeout)
        self._notices = group.rendezvous.corner("routes")
        self._wire_tag = _WIRE_TAGS + self._notices.next_index()
        self._routes = {r: _Route(r) for r in range(group.size) if r != group.rank}
        self._looked = 0.0
        self._finished = False

    def send(self, peer: int, tag: int, head: bytes, spans: Sequence[Span]) -> bool:
        route = self._routes[peer]
        nbytes = sum([size for _, size in spans])
        header = _HEADER.pack(tag, len(head), nbytes, route.received)
        block = header + head[:_START].ljust(_START, b"\0") + _ONE
        route.sent += 1
        self._post(route, torch.frombuffer(bytearray(block), dtype=torch.uint8))
        rest = head[_START:]
        if rest:
            self._post(route, torch.frombuffer(bytearray(rest), dtype=torch.uint8))
        if nbytes:
            body = torch.empty(nbytes, dtype=torch.uint8)
            at = body.data_ptr()
            for address, size in spans:
                ctypes.memmove(at, address, size)
                at += size
            self._post(route, body)
        return True

    def receive(self, peer: int, spans: Sequence[Span]) -> bool:
        """The sender has posted what is announced, so this waits for the transfer only."""
        route = self._routes[peer]
        if len(spans) == 1:
            ((address, size),) = spans
            memory = (ctypes.c_uint8 * size).from_address(address)
            self._receive(route, torch.frombuffer(memory, dtype=torch.uint8))
        else:
            body = torch.empty(sum([size for _, size in spans]), dtype=torch.uint8)
            self._receive(route, body)
            at = body.data_ptr()
            for address, size in spans:
                ctypes.memmove(address, at, size)
                at += size
        route.received += 1
        return True

    def step(self, operation: str, seconds: float, awaited: int) -> Any:
        give_up = perf_counter() + seconds
        pause = 0.0
        while True:
            for route in self._routes.values():
                event = self._look(route)
                if event is not None:
                    return event
            now = perf_counter()
            if now >= give_up:
                return None
            if now > self._looked + _LOOK_SECONDS:
                self._looked = now
                self._look_after(operation, awaited)
            sleep(pause)
            pause = min(_LONGEST_PAUSE, pause + 1e-5)

    def fail(self, reason: str) -> None:
        """By messages, which are quick, and by the store, where the notice outlives this rank's group."""
        head = objects.encode(reason[:180])
        with suppress(RuntimeError, Lost):
            if not self._notices.has("failed"):
                self._notices.put("failed", f"rank {self._group.rank} failed: {reason[:180]}")
            for peer in self._routes:
                self.send(peer, FAILED << 56, head, [])

    def finish(self) -> bool:
        """A process group delivers nothing once a process has ended: all ranks have to finish."""
        if not self._finished:
            self._finished = True
            for peer in self._routes:
                self.send(peer, CLOSED << 56, b"", [])
        if not all(route.closed for route in self._routes.values()):
            return False
        for route in self._routes.values():
            self._reap(route, route.sent)
        return True

    def leave(self) -> None:
        """Memory that the process group may still read or write lives as long as the group does."""
        kept = self._group.transport.abandoned
        for route in self._routes.values():
            kept += [(work, memory) for _, work, memory in route.in_flight]
            route.in_flight.clear()
            if route.block is not None:
                kept.append((route.arrival, route.block))

    def describe(self) -> str:
        return "process group (gloo)"

    def _post(self, route: _Route, memory: Tensor) -> None:
        work = self._guard(route, lambda: self._backend.send([memory], route.rank, self._wire_tag))
        route.in_flight.append((route.sent, work, memory))

    def _receive(self, route: _Route, memory: Tensor) -> None:
        self._guard(route, lambda: self._irecv(route, memory).wait(self._deadline))

    def _irecv(self, route: _Route, memory: Tensor) -> Any:
        return self._backend.recv([memory], route.rank, self._wire_tag)

    def _look(self, route: _Route) -> tuple[int, int, int, bytes, int] | None:
        """The message that has arrived, if one has."""
        if route.closed:
            return None
        if route.block is None:
            route.block = block = torch.zeros(_BLOCK, dtype=torch.uint8)
            route.arrival = self._guard(route, lambda: self._irecv(route, block))
        if not route.block[-8:].any():
            return None
        self._guard(route, lambda: route.arrival.wait(self._deadline))
        data = route.block.numpy().tobytes()
        route.block = route.arrival = None
        tag, length, nbytes, taken = _HEADER.unpack_from(data)
        head = data[_HEADER.size :][: min(length, _START)]
        if length > _START:
            rest = torch.empty(length - _START, dtype=torch.uint8)
            self._receive(route, rest)
            head += rest.numpy().tobytes()
        self._reap(route, taken)
        if nbytes == 0:
            route.received += 1
        if tag >> 56 == CLOSED:
            route.closed = True
            return None
        if tag >> 56 == FAILED:
            raise Lost(f"rank {route.rank} failed: {objects.decode(head)}")
        return ANNOUNCED, route.rank, tag, head, nbytes

    def _reap(self, route: _Route, taken: int) -> None:
        """Forget the memory of the first `taken` messages, which the peer has received."""
        while route.in_flight and route.in_flight[0][0] <= taken:
            work = route.in_flight[0][1]
            self._guard(route, partial(work.wait, self._deadline))
            route.in_flight.popleft()

    def _look_after(self, operation: str, awaited: int) -> None:
        dead, _ = suspects(self._group.identities, self._group.rank)
        for rank, route in self._routes.items():
            if rank in dead and not route.closed:
                raise Lost(f"rank {rank} is gone: its process has ended")
        if awaited in self._routes and self._routes[awaited].closed:
            raise Lost(f"rank {awaited} closed the pipeline")
        with suppress(RuntimeError):  # the store goes with the process that keeps it
            if self._notices.has("failed"):
                raise Lost(self._notices.get("failed", self._group.rank))

    def _guard(self, route: _Route, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as failure:
            if not is_transport_failure(failure):
                raise
            error = error_from_process_group(failure, self._group, "pipeline", route.rank)
            # Without the text of the backend, which says nothing of ranks.
            raise Lost(str(error).split(": [")[0]) from None
