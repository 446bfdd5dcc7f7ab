"""What rings do, through the send and receive of a process group.

A message is 24 bytes of header and, unless it is empty, its payload. Sends are kept in flight up to what a
ring would hold, so that ranks which send before they receive do not wait for each other here either.
"""

from __future__ import annotations

import struct
from collections import deque
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .errors import PeerLostError
from .faults import LAST_BREATH_SECONDS, suspects, tag_mismatch

if TYPE_CHECKING:
    from .group import ParallelGroup

_HEADER = struct.Struct("<QQQ")  # tag, bytes of the payload, 1


class ProcessGroupPair:
    """Both directions between this rank and a peer. One thread at a time may use a direction."""

    def __init__(
        self, group: ParallelGroup, peer: int, wire_tag: int, cells: int, cell_bytes: int
    ) -> None:
        self._group = group
        self._transport = group.transport
        self._peer = peer
        self._process_group = group.process_group
        self._wire_tag = wire_tag
        self._deadline = timedelta(seconds=group.timeout)
        self._cells = cells
        self._cell_bytes = cell_bytes
        self._in_flight: deque[tuple[Any, Tensor, int]] = deque()  # work, its memory, cells
        self._used = 0  # cells in flight
        self._header: Tensor | None = None  # being received
        self._arrival: Any = None
        self._message: tuple[int, int] | None = None  # tag, bytes left; arrived and not over
        self._payload: Tensor | None = None  # of a message that is received in parts
        self._died = 0.0  # when the peer was seen to have ended

    def send(self, parts: list[Tensor | np.ndarray], tag: int) -> None:
        total = sum(part.nbytes for part in parts)
        cells = max(1, -(-total // self._cell_bytes))
        while self._in_flight and self._used + cells > self._cells:
            self._wait_for_oldest()
        header = torch.frombuffer(bytearray(_HEADER.pack(tag, total, 1)), dtype=torch.uint8)
        self._post(header, cells)
        if total == 0:
            return
        waits = cells > self._cells
        if waits and len(parts) == 1 and isinstance(parts[0], Tensor):
            self._post(_as_bytes(parts[0]), 0)
        else:
            self._post(_joined(parts, total), 0)
        while waits and self._in_flight:
            self._wait_for_oldest()

    def poll(self) -> bool:
        if self._message is not None:
            return True
        # No backend tells reliably whether a receive has completed, but the last word of the header
        # changes when it does.
        if self._expect_header()[16:].any():
            return True
        dead, _ = suspects(self._group.identities, self._group.rank, self._peer)
        if not dead:
            return False
        # What it sent before may still be on its way.
        self._died = self._died or monotonic()
        if monotonic() < self._died + LAST_BREATH_SECONDS:
            return False
        raise PeerLostError(
            f"poll: rank {self._group.rank} of group '{self._group.name}' lost rank {self._peer} "
            "(process ended)"
        )

    def peek(self, tag: int | None) -> tuple[int, int]:
        if self._message is None:
            header = self._expect_header()
            self._arrival.wait(self._deadline)
            self._header = self._arrival = None
            self._message = _HEADER.unpack(header.numpy().tobytes())[:2]
        if tag is not None and tag != self._message[0]:
            raise tag_mismatch(
                self._group,
                "recv",
                f"rank {self._peer} sent a message with tag {self._message[0]} where tag {tag} was "
                "expected",
            )
        return self._message

    def read(self, out: list[Tensor], tag: int | None, whole: bool) -> int:
        got, left = self.peek(tag)
        wanted = sum(place.nbytes for place in out)
        if wanted > left or (whole and wanted != left):
            return left
        if wanted == left and self._payload is None and len(out) == 1:
            self._receive(_as_bytes(out[0]))
        elif wanted:
            if self._payload is None:
                self._payload = torch.empty(left, dtype=torch.uint8)
                self._receive(self._payload)
            at = self._payload.numel() - left
            for place in out:
                _as_bytes(place).copy_(self._payload[at : at + place.nbytes])
                at += place.nbytes
        self._message = (got, left - wanted)
        if wanted == left:
            self._message = self._payload = None
        return left

    def flush(self) -> None:
        """Wait until the peer has received what was sent."""
        while self._in_flight:
            self._wait_for_oldest()

    def leave(self) -> None:
        """Memory that the process group may still read or write lives as long as the group does."""
        self._transport.abandoned += self._in_flight
        self._in_flight.clear()
        if self._header is not None:
            self._transport.abandoned.append((self._arrival, self._header))

    def _post(self, memory: Tensor, cells: int) -> None:
        group, tag = self._process_group, self._wire_tag
        work = dist.isend(memory, None, group, tag, group_dst=self._peer)
        self._in_flight.append((work, memory, cells))
        self._used += cells

    def _wait_for_oldest(self) -> None:
        work, _, cells = self._in_flight[0]
        work.wait(self._deadline)
        self._in_flight.popleft()
        self._used -= cells

    def _expect_header(self) -> Tensor:
        if self._header is None:
            self._header = torch.zeros(_HEADER.size, dtype=torch.uint8)
            self._arrival = self._irecv(self._header)
        return self._header

    def _receive(self, memory: Tensor) -> None:
        if memory.numel():
            self._irecv(memory).wait(self._deadline)

    def _irecv(self, memory: Tensor) -> Any:
        group, tag = self._process_group, self._wire_tag
        return dist.irecv(memory, None, group, tag, group_src=self._peer)


def _joined(parts: list[Tensor | np.ndarray], total: int) -> Tensor:
    memory = torch.empty(total, dtype=torch.uint8)
    at = 0
    for part in parts:
        place = memory[at : at + part.nbytes]
        if isinstance(part, Tensor):
            place.copy_(_as_bytes(part))
        else:
            place.numpy()[:] = part
        at += part.nbytes
    return memory


def _as_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor, of which no dimension need have a stride of 1."""
    return x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)
