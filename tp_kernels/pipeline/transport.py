"""How messages of a pipeline get from rank to rank: the rings of shared memory.

A transport moves messages of a 64-bit tag, a head and tensors, in order between two ranks. Its calls do not
wait, but `step`, and that for anything: see `RingSet` in csrc/host/ring_set.h. `ProcessGroupRoutes` has the
same calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from tp_kernels.comm.errors import UnsupportedError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.symmetric_memory import SymmetricMemory

# Kinds of `Event`. TENSOR, where a transport makes tensors: a message of one, complete, which is `head` then.
ANNOUNCED, RECEIVED, SENT, TENSOR = range(4)

Span: TypeAlias = tuple[int, int]  # address and bytes of contiguous host memory

_CELL_BYTES = 32 << 10
_MOST_CELLS = 1 << 16
_FAR_CELLS = 2  # between ranks that have no stages next to each other, messages are rare


class Lost(Exception):
    """A peer is gone, and how: `detail`."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class Event(NamedTuple):
    """What `step` has to say."""

    kind: int
    peer: int
    tag: int
    head: bytes
    nbytes: int  # of the tensors


class Transport(Protocol):
    """What the communicator asks of shared memory or a process group."""

    def send(self, peer: int, tag: int, head: bytes, spans: Sequence[Span]) -> bool:
        """Begin a message. False: some of it is still in the caller's memory, until `step` says SENT."""

    def receive(self, peer: int, spans: Sequence[Span]) -> bool:
        """Memory for the tensors that were ANNOUNCED. False: they are complete when `step` says RECEIVED."""

    def step(self, operation: str, seconds: float, awaited: int) -> Any:
        """Move what can move, wait up to `seconds` for an Event (as a tuple); None if there was none.

        awaited: the rank without which waiting has no point; -1: none.
        """

    def fail(self, reason: str) -> None:
        """Tell the peers that this rank cannot go on."""

    def finish(self) -> bool:
        """Nothing more will be sent: whether this rank may leave, and all that was sent can be received."""

    def leave(self) -> None:
        """Leave and wait for nobody."""

    def describe(self) -> str:
        """What carries the messages, for people."""


class RingRoutes:
    """Rings of shared memory. Construction is collective over the group.

    Args:
        reach: ranks at most so far apart, the last being next to the first, have rings of `buffer_bytes`.
    """

    def __init__(self, group: ParallelGroup, reach: int, buffer_bytes: int) -> None:
        assert group.rendezvous is not None
        self._group = group
        self._bytes = buffer_bytes
        cell_bytes = max(min(_CELL_BYTES, buffer_bytes), buffer_bytes // _MOST_CELLS)
        cells = buffer_bytes // cell_bytes
        try:
            self.memory = SymmetricMemory(
                group.rendezvous.corner("pipeline rings"),
                slots=0,
                ring_cells=cells,
                ring_cell_bytes=cell_bytes,
                ring_reach=min(reach, group.size - 1),
                ring_far_cells=_FAR_CELLS,
                timeout=group.timeout,
            )
        except UnsupportedError as error:  # raised on all ranks or on none
            raise UnsupportedError(f"{error}; {self._way_out(reach)}") from error
        rings = self.memory.ring_set([r for r in range(group.size) if r != group.rank])
        self.send, self.receive, self.step = rings.send, rings.receive, rings.step
        # The short way of messages of one tensor.
        self.send_tensor: Callable[[int, int, Any], tuple[int, bool] | None] = rings.send_tensor

    def fail(self, reason: str) -> None:
        self.memory.fail(reason[:180])

    def finish(self) -> bool:
        return True  # the segment lives as long as a peer has mapped it

    def leave(self) -> None:
        self.memory.close()

    def describe(self) -> str:
        return f"host (rings of {self._bytes / (1 << 20):g} MiB in shared memory)"

    def _way_out(self, reach: int) -> str:
        info = os.statvfs("/dev/shm")
        size = self._group.size
        near = size * min(2 * reach, size - 1)
        far = (size * (size - 1) - near) * _FAR_CELLS * (_CELL_BYTES + 64)
        fits = (
            (info.f_bavail * info.f_frsize - far) // near // 2
        )  # half of it: others need some too
        fits = fits // _CELL_BYTES * _CELL_BYTES
        if fits >= _CELL_BYTES:
            return f"pass buffer_bytes={fits}, or make /dev/shm larger (docker run --shm-size)"
        return "make /dev/shm larger (docker run --shm-size), or use ParallelGroup(provider='none')"
