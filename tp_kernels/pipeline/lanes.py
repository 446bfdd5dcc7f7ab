"""Lanes: the messages of one direction into one stage, counted so that what is under way stays bounded.

A lane has credits: so many of its messages may be sent and not yet be taken by the receiver's program.
Further ones wait with the sender, until the program asks for one of them. So a rank can always take in
whatever arrives, for every lane, before it is asked for it, and the lanes that share a ring never wait for
each other. Credits travel with messages the other way, or alone.

The tag of a message:

    bits  0..31   micro-batch; of CREDIT the number of credits
    bits 32..47   lane: twice the stage it leads into, and 1 if backward; a number of the sender's for NAMED
    bits 48..55   credits for the lane between the same stages in the other direction
    bits 56..63   kind: STAGE 0, NAMED 1, CREDIT 2, NAMED_CREDIT 3; of a process group also
                   FAILED 4, CLOSED 5
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

STAGE, NAMED, CREDIT, NAMED_CREDIT, FAILED, CLOSED = range(6)
MOST_LANES, MOST_MICRO_BATCHES, MOST_CREDITS = 1 << 16, 1 << 32, 255
MOST_BUFFER_BYTES = 1 << 50
FORWARD, BACKWARD = 0, 1
DIRECTIONS = ("forward", "backward")


class Outgoing(NamedTuple):
    """A message that has not left this rank's memory, with what keeps it alive."""

    lane: Lane
    micro_batch: int
    head: bytes
    tensors: list[Tensor]
    apart: list[Tensor]  # whose elements go from device to device
    versions: list[int]  # of all of them, to notice that one was changed
    after: Any = None  # what the elements of `apart` come after, on their device

    @staticmethod
    def of(
        lane: Lane,
        micro_batch: int,
        head: bytes,
        tensors: list[Tensor],
        apart: list[Tensor],
        after: Any = None,
    ) -> Outgoing:
        versions = _versions(tensors + apart)
        return Outgoing(lane, micro_batch, head, tensors, apart, versions, after)

    def changed(self) -> bool:
        """Whether a tensor was written to after it had been given away."""
        return _versions(self.tensors + self.apart) != self.versions

    def __str__(self) -> str:
        return self.lane.message(self.micro_batch)


def _versions(tensors: list[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


class Lane:
    """What is sent, or received, in one direction between two stages, or under one name between two ranks."""

    def __init__(
        self, kind: int, number: int, peer: int, name: str, sender: str, receiver: str
    ) -> None:
        self.kind, self.number, self.peer = kind, number, peer
        self.name = name  # "forward", "backward" or a tag of send_to
        self.sender, self.receiver = sender, receiver  # "stage 0 on rank 0"
        self.bits = kind << 56 | number << 32
        self.waiting: deque[Outgoing] = deque()  # for credit or for the ring
        self.in_flight = 0  # sent, not known to have been taken
        self.owed = 0  # taken, not told
        self.held = 0  # arrived, not taken
        self.extra = 0  # of those, beyond the credits: the program waits for one behind them
        self.back: Lane | None = None  # that the receiver's messages to the sender are in
        self.last: int | None = None  # micro-batch that arrived last
        self.messages = 0
        self.nbytes = 0
        self.seconds = 0.0  # that the program waited

    def message(self, micro_batch: int) -> str:
        if self.kind == NAMED:
            return f"'{self.name}' from {self.sender} to {self.receiver}"
        return f"{self.name} of micro-batch {micro_batch} from {self.sender} to {self.receiver}"


class Peer:
    """What is under way between this rank and another one."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.queue: deque[Lane] = deque()  # lanes with waiting messages, once for each
        self.leaving: Outgoing | None = None  # partly in the ring
        self.busy = False  # the ring has not all of the last message
        self.owing: dict[Lane, None] = {}  # lanes whose credits go alone, in this order
        # Whose elements a device may still have to read, and a call that says whether it has.
        self.on_device: deque[tuple[Outgoing, Callable[[], bool]]] = deque()
        # (lane, micro-batch, description, memory, call before its tensors are used) of a message in part
        self.arriving: Any = None
        self.moved = 0  # messages that began to leave, or left
