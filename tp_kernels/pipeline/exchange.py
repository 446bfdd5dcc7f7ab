"""The messages of a rank's lanes: what is queued, under way and arrived, and the credits that bound it.

Everything happens inside calls. Each that waits moves the messages of all lanes meanwhile: what arrives goes
into the mailbox, what was queued leaves as credits and room come.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NoReturn, TypeAlias

from torch import Tensor

from tp_kernels.comm.errors import (
    CollectiveTimeoutError,
    GroupMismatchError,
    PeerLostError,
    TpKernelsError,
    UnsupportedError,
)
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.p2p import _is_plain
from tp_kernels.comm.symmetric_memory import _host

from . import message
from .device_routes import Choice, DeviceRoutes
from .lanes import CREDIT, NAMED, NAMED_CREDIT, STAGE, Lane, Outgoing, Peer
from .transport import ANNOUNCED, RECEIVED, TENSOR, Lost, Transport

# Descriptions that may come again. Long ones hold values themselves, and are read again.
_KEPT_DESCRIPTIONS, _LONGEST_KEPT = 512, 1024
_PAUSE = 1e-3  # seconds between looks at what is no event of the transport
Ready: TypeAlias = Callable[[], object] | None
_FAULTS: tuple[type[Exception], ...] = (Lost,) if _host is None else (Lost, _host.Fault)
_RELAYED = re.compile(r"^(rank \d+ failed: )+(?=rank \d+ (failed|is gone|closed))")


class Exchange:
    """Sends and receives messages of lanes.

    Args:
        transport: None for one rank.
        devices: what carries the elements of tensors on devices, if it is not the transport.
        arrivals, departures: lanes between stages into and out of this rank, by number.
    """

    def __init__(
        self,
        group: ParallelGroup,
        transport: Transport | None,
        devices: DeviceRoutes | None,
        credits: int,
        timeout: float,
        arrivals: dict[int, Lane],
        departures: dict[int, Lane],
    ) -> None:
        self.group, self.transport, self._devices = group, transport, devices
        self.credits, self.timeout = credits, timeout
        self.broken = ""  # why nothing more is possible
        self.seconds = 0.0  # waited
        # By tag without credits, or (rank, name), what arrived and was not taken: its lane, value, bytes, and
        # what has to be called before its tensors are used.
        self.mailbox: dict[Any, deque[tuple[Lane | None, Any, int, Ready]]] = {}
        self._arrivals, self._departures = arrivals, departures
        self._crowded: set[Peer] = set()  # whose device has no room for what is queued
        self._peers = {r: Peer(r) for r in range(group.size) if r != group.rank}
        self._send_tensor = getattr(transport, "send_tensor", None)
        self._descriptions: dict[bytes, message.Description] = {}
        # Lanes of send_to: out by (rank, name) and by number, in by (rank, number).
        self._named: dict[tuple[int, str], Lane] = {}
        self._named_out: dict[int, Lane] = {}
        self._named_in: dict[tuple[int, int], Lane] = {}

    # Sending.

    def put(self, lane: Lane, micro_batch: int, value: Any) -> int:
        """Send or queue a value; waits while `credits` are queued. Returns the bytes of its tensors."""
        peer = self._peers[lane.peer]
        free = lane.in_flight < self.credits and not (lane.waiting or peer.busy or peer.owing)
        devices = self._devices
        if devices is not None:
            self._check_devices()
        if (
            free
            and type(value) is Tensor
            and (devices is None or devices.cost(value, lane.peer) is None)
        ):
            nbytes = self._start_tensor(peer, lane, micro_batch, value)
            if nbytes is not None:
                return nbytes
        choice = None if devices is None else Choice(devices, lane.peer)
        head, tensors = message.encode(value, choice)
        here, apart = [], []
        for tensor in tensors:
            if choice is not None and id(tensor) in choice.chosen:
                apart.append(_plain(tensor))
            else:
                here.append(tensor if _is_plain(tensor) else _plain(tensor.cpu()))
        after = devices.mark() if devices is not None and apart else None
        free = free and self._has_room(peer, apart)
        outgoing = Outgoing.of(lane, micro_batch, head, here, apart, after)
        if free:
            self._start(peer, outgoing)
        else:
            lane.waiting.append(outgoing)
            peer.queue.append(lane)
            self.progress("send")
            if len(lane.waiting) > self.credits:
                self.wait(
                    "send",
                    lane,
                    lambda: len(lane.waiting) <= self.credits,
                    lambda: f"{lane.sender} cannot send {outgoing}",
                )
        return sum([tensor.nbytes for tensor in here + apart])

    def named(self, rank: int, name: str) -> Lane:
        """The lane of messages to `rank` under this name. One without messages under way may be forgotten."""
        lane = self._named.get((rank, name))
        if lane is None:
            number = next(n for n in range(len(self._named) + 1) if n not in self._named_out)
            here = self.group.rank
            lane = Lane(NAMED, number, rank, name, f"rank {here}", f"rank {rank}")
            self._named[rank, name] = self._named_out[number] = lane
        return lane

    def _start_tensor(self, peer: Peer, lane: Lane, micro_batch: int, tensor: Tensor) -> int | None:
        """The short way of a message of one tensor: bytes, or None if it has to go the long one."""
        assert self.transport is not None
        if self._send_tensor is None:
            return None
        back = lane.back if lane.back is not None and lane.back.peer == lane.peer else None
        tag = lane.bits | micro_batch
        if back is not None:
            tag |= back.owed << 48
        try:
            sent = self._send_tensor(peer.rank, tag, tensor)
        except _FAULTS as fault:
            self._lost(f"rank {self.group.rank} cannot send to rank {peer.rank}", fault)
        if sent is None:
            return None
        if back is not None:
            back.owed = 0
        lane.in_flight += 1
        nbytes, left = sent
        if not left:
            peer.busy, peer.leaving = True, Outgoing.of(lane, micro_batch, b"", [tensor], [])
        return nbytes

    def _start(self, peer: Peer, outgoing: Outgoing) -> None:
        lane, head = outgoing.lane, outgoing.head
        tag = lane.bits | outgoing.micro_batch
        back = lane.back
        if back is not None and back.peer == lane.peer:
            tag |= back.owed << 48
            back.owed = 0
        lane.in_flight += 1
        spans = [(tensor.data_ptr(), tensor.nbytes) for tensor in outgoing.tensors]
        try:
            if outgoing.apart:
                self._send_apart(peer, outgoing)
            self._leave(peer, tag, head, spans)
        except BaseException as error:
            self._break(error)
            raise
        if peer.busy:
            peer.leaving = outgoing

    def _send_apart(self, peer: Peer, outgoing: Outgoing) -> None:
        """To the device first: whoever has the description makes a stream wait for the elements."""
        assert self._devices is not None
        self._check_on_device(peer)
        left = self._devices.send(peer.rank, outgoing.apart, outgoing.after)
        peer.on_device.append((outgoing, left))

    def _has_room(self, peer: Peer, apart: list[Tensor]) -> bool:
        """Whether a device may take these now; if not, they are tried again while anything moves."""
        if not apart or self._devices is None or self._devices.has_room(peer.rank, apart):
            return True
        self._crowded.add(peer)
        return False

    def _check_on_device(self, peer: Peer) -> None:
        for outgoing, _ in peer.on_device:
            self._check_unchanged(outgoing)
        while peer.on_device and peer.on_device[0][1]():
            peer.on_device.popleft()

    def _leave(self, peer: Peer, tag: int, head: bytes, spans: list[tuple[int, int]]) -> None:
        assert self.transport is not None
        try:
            peer.busy = not self.transport.send(peer.rank, tag, head, spans)
        except _FAULTS as fault:
            self._lost(f"rank {self.group.rank} cannot send to rank {peer.rank}", fault)
        peer.moved += 1

    def _advance(self, peer: Peer) -> None:
        """Give the transport what it may take now."""
        while not peer.busy:
            if peer.owing:
                lane = next(iter(peer.owing))
                del peer.owing[lane]
                if lane.owed:  # else it went along with a message
                    kind = CREDIT if lane.kind == STAGE else NAMED_CREDIT
                    tag = kind << 56 | lane.number << 32 | lane.owed
                    lane.owed = 0
                    self._leave(peer, tag, b"", [])
                continue
            ready = [lane for lane in peer.queue if lane.in_flight < self.credits]
            if not ready:
                return
            lane = ready[0]
            if not self._has_room(peer, lane.waiting[0].apart):
                return
            peer.queue.remove(lane)
            outgoing = lane.waiting.popleft()
            self._check_unchanged(outgoing)
            self._start(peer, outgoing)

    def flush(self) -> None:
        """Wait until nothing that was sent is in this rank's memory.

        Credits may be left: who has taken all messages of a peer owes it nothing that it waits for.
        """
        for peer in self._peers.values():
            while peer.leaving is not None or peer.queue:
                self._await_move(peer)
        if self._devices is not None:
            self._flush_devices()

    def _flush_devices(self) -> None:
        assert self._devices is not None
        for peer in self._peers.values():
            self._check_on_device(peer)
        give_up = perf_counter() + self.timeout
        while not self._devices.flush():
            if not self._step("flush", _PAUSE, -1, None) and perf_counter() > give_up:
                first, *_ = (out for peer in self._peers.values() for out, _ in peer.on_device)
                self._give_up(
                    CollectiveTimeoutError,
                    f"flush: {first.lane.receiver} does not take {first}; not within {self.timeout:g} s",
                )
        for peer in self._peers.values():
            peer.on_device.clear()
        self._check_devices()

    def _await_move(self, peer: Peer) -> None:
        before = peer.moved

        def what() -> str:
            first = peer.leaving or peer.queue[0].waiting[0]
            return f"{first.lane.sender} cannot send {first}"

        self.wait("flush", None, lambda: peer.moved != before, what, peer.rank)

    def _check_unchanged(self, outgoing: Outgoing) -> None:
        if outgoing.changed():
            self._give_up(
                UnsupportedError,
                f"a tensor of {outgoing} was changed in place before it had left: call flush() first, or "
                "send a clone",
            )

    # Receiving.

    def deliver(
        self, key: Any, value: Any, lane: Lane | None = None, nbytes: int = 0, ready: Ready = None
    ) -> None:
        """Put a value where `take` finds it."""
        if lane is not None:
            lane.held += 1
        box = self.mailbox.get(key)
        if box is None:
            self.mailbox[key] = deque(((lane, value, nbytes, ready),))
        else:
            box.append((lane, value, nbytes, ready))

    def take(self, key: Any) -> tuple[Any, int]:
        """The first value under `key`, which is in the mailbox, and its bytes; its sender gets a credit."""
        if self._devices is not None:
            self._check_devices()
        box = self.mailbox[key]
        lane, value, nbytes, ready = box.popleft()
        if not box:
            del self.mailbox[key]
        if lane is not None and lane.peer != self.group.rank:
            lane.held -= 1
            if lane.extra:
                lane.extra -= 1
            else:
                lane.owed += 1
                if lane.owed >= (max(1, self.credits // 2) if lane.kind == STAGE else 1):
                    self._repay(lane)
        if ready is not None:
            ready()
        return value, nbytes

    def receive(self, lane: Lane, micro_batch: int, key: int) -> tuple[Any, int]:
        """Wait for a message of `lane`, whose key in the mailbox is `key`: value, bytes."""
        if key not in self.mailbox:
            what = partial(self.missing, lane, micro_batch)
            self.wait("recv", lane, partial(self._there, key, lane), what)
        return self.take(key)

    def _there(self, key: int, lane: Lane) -> bool:
        if key in self.mailbox:
            return True
        if lane.held + lane.owed >= self.credits + lane.extra:
            # The sender has no credit, perhaps for the very message that is asked for.
            if not lane.owed:
                lane.owed = 1
                lane.extra += 1
            self._repay(lane)
        return False

    def _repay_all(self) -> None:
        """Before a wait: what it is for may depend on a rank that has no credit left."""
        for lane in self._arrivals.values():
            if lane.owed:
                self._repay(lane)

    def _repay(self, lane: Lane) -> None:
        peer = self._peers[lane.peer]
        peer.owing[lane] = None
        self._advance(peer)

    def _arrived_tensor(self, tag: int, tensor: Tensor, nbytes: int) -> None:
        """Only messages between stages are of one tensor: those of a name are of the name too."""
        lane = self._arrivals[tag >> 32 & 0xFFFF]
        lane.last = tag & 0xFFFFFFFF
        credits = tag >> 48 & 0xFF
        if credits and lane.back is not None:
            self._credited(lane.back, credits)
        self.deliver(lane.bits | lane.last, tensor, lane, nbytes)

    def _arrived(self, peer: Peer, tag: int, head: bytes, nbytes: int) -> None:
        assert self.transport is not None
        kind, number, low = tag >> 56, tag >> 32 & 0xFFFF, tag & 0xFFFFFFFF
        if kind == STAGE:
            lane = self._arrivals[number]
            lane.last = low
            credits = tag >> 48 & 0xFF
            if credits and lane.back is not None:
                self._credited(lane.back, credits)
        elif kind == NAMED:
            lane = self._named_in.get((peer.rank, number), None) or self._named_from(
                peer, number, head
            )
        elif kind == CREDIT:
            return self._credited(self._departures[number], low)
        elif kind == NAMED_CREDIT:
            lane = self._named_out[number]
            self._credited(lane, low)
            if not (lane.in_flight or lane.waiting):
                del self._named_out[number], self._named[lane.peer, lane.name]
            return None
        else:
            raise GroupMismatchError(f"a message of kind {kind} from rank {peer.rank}")
        description = self._descriptions.get(head)
        if description is None:
            description = message.decode(head)
            if len(head) <= _LONGEST_KEPT:
                if len(self._descriptions) == _KEPT_DESCRIPTIONS:
                    self._descriptions.clear()
                self._descriptions[head] = description
        if description.here != nbytes:
            raise GroupMismatchError(
                f"{lane.message(low)} has {nbytes} bytes, its description {description.here}"
            )
        here = [spec.empty() for spec in description.tensors if not spec.apart]
        memory, ready = here, None
        if len(here) != len(description.tensors):
            memory, ready = self._arrive_apart(peer, description, here)
        peer.arriving = lane, low, description, memory, ready
        if nbytes == 0 or self.transport.receive(
            peer.rank, [(t.data_ptr(), t.nbytes) for t in here]
        ):
            self._complete(peer)
        return None

    def _arrive_apart(
        self, peer: Peer, description: message.Description, here: list[Tensor]
    ) -> tuple[list[Tensor], Ready]:
        """Memory of all tensors of a message, of which some do not come with it."""
        apart = [spec for spec in description.tensors if spec.apart]
        assert self._devices is not None  # all ranks have the same routes
        memory, ready = self._devices.receive(peer.rank, apart)
        with_it, beside = iter(here), iter(memory)
        return [next(beside if spec.apart else with_it) for spec in description.tensors], ready

    def _check_devices(self) -> None:
        late = self._devices.failed() if self._devices is not None else ""
        if late:
            self._give_up(CollectiveTimeoutError, late)

    def _complete(self, peer: Peer) -> None:
        lane, low, description, memory, ready = peer.arriving
        peer.arriving = None
        tensors = [
            spec.finish(part) for spec, part in zip(description.tensors, memory, strict=True)
        ]
        value = description.value(tensors)
        if lane.kind == STAGE:
            self.deliver(lane.bits | low, value, lane, description.nbytes, ready)
        else:
            self.deliver((peer.rank, value[0]), value[1], lane, description.nbytes, ready)

    def _named_from(self, peer: Peer, number: int, head: bytes) -> Lane:
        lane = Lane(NAMED, number, peer.rank, "", f"rank {peer.rank}", f"rank {self.group.rank}")
        self._named_in[peer.rank, number] = lane
        return lane

    def _credited(self, lane: Lane, credits: int) -> None:
        lane.in_flight -= credits
        peer = self._peers[lane.peer]
        if peer.queue:
            self._advance(peer)

    # Waiting.

    def progress(self, operation: str) -> None:
        """Move what can move now."""
        while self.transport is not None and self._step(operation, 0.0, -1, None):
            pass

    def wait(
        self,
        operation: str,
        lane: Lane | None,
        done: Callable[[], bool],
        what: Callable[[], str],
        rank: int | None = None,
    ) -> None:
        """Move messages until `done()`.

        Args:
            lane: whose time it is; its peer is waited for, or `rank`.
            what: says what is missing, for an error.
        """
        peer = rank if lane is None or rank is not None else lane.peer
        assert peer is not None
        start = perf_counter()
        left = self.timeout
        if self.transport is None or peer == self.group.rank:
            self._give_up(
                GroupMismatchError, f"{what()}, which has not sent it and runs on this rank"
            )
        try:
            self._repay_all()
            while not done():
                # That a device has room again is no event of the transport.
                seconds = min(left, _PAUSE) if self._crowded else left
                if not self._step(operation, seconds, peer, what) and seconds == left:
                    late = f"not within {self.timeout:g} s"
                    self._give_up(CollectiveTimeoutError, f"{operation}: {what()}; {late}")
                left = max(0.0, start + self.timeout - perf_counter())
        finally:
            seconds = perf_counter() - start
            self.seconds += seconds
            if lane is not None:
                lane.seconds += seconds

    def _step(
        self, operation: str, seconds: float, awaited: int, what: Callable[[], str] | None
    ) -> bool:
        """Move messages up to the next event; False if there was none in `seconds`."""
        assert self.transport is not None
        if self._crowded:
            crowded, self._crowded = self._crowded, set()
            for peer in crowded:
                self._advance(peer)
        if self._devices is not None:
            self._check_devices()
        try:
            event = self.transport.step(operation, seconds, awaited)
            if event is None:
                return False
            kind, rank, tag, head, nbytes = event
            peer = self._peers[rank]
            if kind == TENSOR:
                self._arrived_tensor(tag, head, nbytes)
            elif kind == ANNOUNCED:
                self._arrived(peer, tag, head, nbytes)
            elif kind == RECEIVED:
                self._complete(peer)
            else:
                peer.busy, outgoing, peer.leaving = False, peer.leaving, None
                peer.moved += 1
                if outgoing is not None:
                    self._check_unchanged(outgoing)
                self._advance(peer)
            return True
        except _FAULTS as fault:
            self._lost(f"{operation}: {what()}" if what is not None else operation, fault)
        except BaseException as error:
            self._break(error)
            raise

    def _break(self, error: BaseException) -> None:
        """What was begun cannot be completed; the others are told."""
        if not self.broken:
            self.broken = f"{type(error).__name__}: {error}"
            self.fail(self.broken)

    def _lost(self, text: str, fault: Exception) -> NoReturn:
        """What the engine says becomes an error; the others are told what this rank was told."""
        detail = _RELAYED.sub("", fault.detail)  # type: ignore[attr-defined]
        self._give_up(PeerLostError, f"{text}; {detail}", detail)

    def _give_up(self, kind: type[TpKernelsError], text: str, reason: str = "") -> NoReturn:
        """Raise an error, after telling the others."""
        self.broken = text
        self.fail(reason or text)
        raise kind(text) from None

    def missing(self, lane: Lane, micro_batch: int) -> str:
        """Who waits for what, and what came instead."""
        text = (
            f"{lane.receiver} waits for {lane.name} of micro-batch {micro_batch} from {lane.sender}"
        )
        if lane.last is None:
            return f"{text}, from which nothing has arrived"
        kept = sorted(
            key & 0xFFFFFFFF
            for key in self.mailbox
            if type(key) is int and key ^ (key & 0xFFFFFFFF) == lane.bits
        )
        not_taken = f" (not yet received: micro-batches {kept})" if kept else ""
        return f"{text}; last arrived: micro-batch {lane.last}{not_taken}"

    def left_over(self) -> list[str]:
        """Messages that arrived and were never taken."""
        found = []
        for key, box in self.mailbox.items():
            for lane, *_ in box:
                if type(key) is int and lane is not None:
                    found.append(lane.message(key & 0xFFFFFFFF))
                else:
                    found.append(f"'{key[1]}' from rank {key[0]}")
        return found

    def close(self) -> None:
        """Everything leaves; through a process group, everybody has to come here."""
        self.flush()
        self._repay_all()
        self.progress("close")
        give_up = perf_counter() + self.timeout
        while self.transport is not None and not (
            (self._devices is None or self._devices.idle()) and self.transport.finish()
        ):
            if not self._step("close", _PAUSE, -1, None) and perf_counter() > give_up:
                self._give_up(
                    CollectiveTimeoutError,
                    f"close: rank {self.group.rank} has closed its pipeline, and not all others have within "
                    f"{self.timeout:g} s",
                )
        self._check_devices()

    def fail(self, reason: str) -> None:
        self.group.fail(reason)
        if self.transport is not None:
            self.transport.fail(reason)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().resolve_conj().resolve_neg()
