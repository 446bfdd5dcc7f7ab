"""PipelineCommunicator: values from stage to stage, several micro-batches, chunks and directions at once."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tp_kernels.comm.errors import GroupMismatchError, PeerLostError, ShapeError, UnsupportedError
from tp_kernels.comm.group import ParallelGroup

from . import message
from .device_routes import DeviceRoutes, device_routes
from .exchange import Exchange
from .lanes import (
    BACKWARD,
    DIRECTIONS,
    FORWARD,
    MOST_BUFFER_BYTES,
    MOST_CREDITS,
    MOST_LANES,
    MOST_MICRO_BATCHES,
    STAGE,
    Lane,
)
from .transport import RingRoutes, Transport

if TYPE_CHECKING:
    from .timeline import Recorder


class PipelineCommunicator:
    """Sends and receives between the stages of a pipeline. Construction is collective over the group.

    A value is any nesting of tensors and plain values (see `message.encode`); it describes itself, so shapes,
    dtypes and structure may change from one micro-batch to the next. What two stages send each other may be
    received in any order of micro-batches and directions. Tensors arrive as fresh leaves that require grad if
    they did where they were sent. Stages on the same rank hand values over without a copy, detached.

    A send returns at once if there is credit and room in the ring, or with the value queued; it waits only
    while `credits` messages of its lane are queued. Whatever moves does so inside calls of this object: any
    that waits, and `progress()`, sends and receives for all lanes. There is no thread. A tensor that was sent
    must not be changed before `flush()`, which is noticed.

    Args:
        group: the ranks of the pipeline. On one host messages go through rings of shared memory, else through
            its process group (`ParallelGroup(provider="none")` insists on that).
        stage_to_rank: the rank of every stage, equal on all ranks; default: stage s on rank s. Stages next to
            each other are fastest on ranks next to each other.
        credits: messages of a lane (one direction into one stage) that may have been sent and not been
            received by the program, 1 to 255. The receiver keeps at most so many in its memory, and more
            only while it waits for one behind them.
        ring: the last stage's `send_forward` goes to stage 0, whose `send_backward` goes to the last.
        buffer_bytes: shared memory of each direction between ranks with stages next to each other. What fits
            is sent while the receiver computes; longer messages move as it receives.
        device_route: of the elements of CUDA tensors: "put" (copies into memory of the receiving GPU, with
            flags), "nccl" (the process group), "host" (through host memory), or "auto", the first of these
            that is possible. The host does not wait for what a GPU still computes; that a peer was late is
            raised by the first call after a GPU has found out.
        device_bytes: memory of a GPU for puts of each rank with stages next to its own. What does not fit
            into it in one message goes through host memory.
        timeout: seconds a wait may last; default: that of the group.
        recorder: its `record(kind, stage, micro_batch, start, end, nbytes)` is called with "SEND_F",
            "SEND_B", "RECV_F", "RECV_B" for each message, and with "WAIT_F", "WAIT_B" for the time that a
            receive waited.

    Raises, here and in every call:
        GroupMismatchError: the ranks disagree about the arguments, or messages were left at the end.
        PeerLostError: a rank died, failed or left. CollectiveTimeoutError: a rank did not come in time. Both
            name the stages, ranks, direction and micro-batch; the pipeline is then broken on this rank, and
            all others are told.
        UnsupportedError, ShapeError: the call makes no sense; nothing was sent.
    """

    def __init__(
        self,
        group: ParallelGroup,
        *,
        stage_to_rank: Sequence[int] | None = None,
        credits: int = 4,
        ring: bool = False,
        buffer_bytes: int = 4 << 20,
        device_route: str = "auto",
        device_bytes: int = 64 << 20,
        timeout: float | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.group = group
        self.rank = group.rank
        self.stage_to_rank = tuple(range(group.size) if stage_to_rank is None else stage_to_rank)
        self.stages = len(self.stage_to_rank)
        self.credits, self.ring, self.recorder = credits, ring, recorder
        self.buffer_bytes = buffer_bytes
        self.device_route, self.device_bytes = device_route, device_bytes
        self.timeout = group.timeout if timeout is None else float(timeout)
        self._agree(buffer_bytes)
        self.my_stages = tuple(s for s, r in enumerate(self.stage_to_rank) if r == self.rank)
        self._closed = False
        self._lanes: dict[tuple[bool, int, int], Lane] = {}  # by (sends, direction, this stage)
        self._make_lanes()
        self._transport = self._connect(buffer_bytes) if group.size > 1 else None
        self.memory = self._transport.memory if isinstance(self._transport, RingRoutes) else None
        self._devices, self._devices_reason = self._connect_devices()
        self._exchange = Exchange(
            group,
            self._transport,
            self._devices,
            credits,
            self.timeout,
            arrivals={
                lane.number: lane for (sends, _, _), lane in self._lanes.items() if not sends
            },
            departures={lane.number: lane for (sends, _, _), lane in self._lanes.items() if sends},
        )
        group.channels.add(self)  # fails and closes with the group

    # What a program calls.

    def send_forward(self, value: Any, *, micro_batch: int, stage: int | None = None) -> None:
        """Send the output of `stage` (of this rank; may be left out if it has one) to the next stage."""
        self._send(FORWARD, value, micro_batch, stage)

    def recv_forward(self, *, micro_batch: int, stage: int | None = None) -> Any:
        """Wait for the input of `stage` from the previous stage."""
        return self._recv(FORWARD, micro_batch, stage)

    def send_backward(self, value: Any, *, micro_batch: int, stage: int | None = None) -> None:
        """Send a gradient from `stage` to the previous stage."""
        self._send(BACKWARD, value, micro_batch, stage)

    def recv_backward(self, *, micro_batch: int, stage: int | None = None) -> Any:
        """Wait for the gradient of the output of `stage` from the next stage."""
        return self._recv(BACKWARD, micro_batch, stage)

    def send_forward_recv_backward(
        self, value: Any, *, send_micro_batch: int, recv_micro_batch: int, stage: int | None = None
    ) -> Any:
        """One after the other; the send never waits for the receive of the peer."""
        self._send(FORWARD, value, send_micro_batch, stage)
        return self._recv(BACKWARD, recv_micro_batch, stage)

    def send_backward_recv_forward(
        self, value: Any, *, send_micro_batch: int, recv_micro_batch: int, stage: int | None = None
    ) -> Any:
        """As `send_forward_recv_backward`."""
        self._send(BACKWARD, value, send_micro_batch, stage)
        return self._recv(FORWARD, recv_micro_batch, stage)

    def send_forward_recv_forward(
        self, value: Any, *, send_micro_batch: int, recv_micro_batch: int, stage: int | None = None
    ) -> Any:
        """As `send_forward_recv_backward`."""
        self._send(FORWARD, value, send_micro_batch, stage)
        return self._recv(FORWARD, recv_micro_batch, stage)

    def send_backward_recv_backward(
        self, value: Any, *, send_micro_batch: int, recv_micro_batch: int, stage: int | None = None
    ) -> Any:
        """As `send_forward_recv_backward`."""
        self._send(BACKWARD, value, send_micro_batch, stage)
        return self._recv(BACKWARD, recv_micro_batch, stage)

    def post_forward(self, *, micro_batch: int, stage: int | None = None) -> None:
        """Say that `recv_forward` will follow: what can move does so now.

        What arrives is taken in, posted or not; this only makes a good moment for it.
        """
        self._key(self._lane(False, FORWARD, stage), micro_batch)
        self.progress()

    def post_backward(self, *, micro_batch: int, stage: int | None = None) -> None:
        """As `post_forward`."""
        self._key(self._lane(False, BACKWARD, stage), micro_batch)
        self.progress()

    def progress(self) -> None:
        """Move whatever can move now; never waits."""
        self._check_open("progress")
        self._exchange.progress("progress")

    def flush(self) -> None:
        """Wait until everything that was sent has left this rank's memory, so that it may be changed.

        What a GPU still has to read may be changed by what the current stream is given from now on.
        """
        self._check_open("flush")
        self._exchange.flush()

    def send_to(self, value: Any, rank: int, *, tag: str) -> None:
        """Send to any rank, such as gradients of tied weights, or tokens back to the first stage.

        Messages of one tag arrive in their order; each tag is a lane of its own.
        """
        self._check_rank("send_to", rank)
        self._check_open("send_to")
        if rank == self.rank:
            self._exchange.deliver((rank, tag), message.detached(value))
        else:
            lane = self._exchange.named(rank, tag)
            self._exchange.put(lane, 0, [tag, value])

    def recv_from(self, rank: int, *, tag: str) -> Any:
        """Wait for what `rank` sent with this tag. Messages of one tag arrive in their order."""
        self._check_rank("recv_from", rank)
        self._check_open("recv_from")
        exchange, key = self._exchange, (rank, tag)
        if key not in exchange.mailbox:
            what = lambda: f"rank {self.rank} waits for '{tag}' from rank {rank}"
            exchange.wait("recv_from", None, lambda: key in exchange.mailbox, what, rank)
        return exchange.take(key)[0]

    def fail(self, reason: str) -> None:
        """Tell the other ranks that this one cannot go on: whoever waits raises PeerLostError at once."""
        if not self._closed:
            self._exchange.broken = self._exchange.broken or reason
            self._exchange.fail(reason)

    def close(self) -> None:
        """Send what is queued and leave; may be called twice.

        In shared memory it waits for nobody that makes room. A process group delivers nothing once a process
        has ended, so there it waits until all ranks close.

        Raises GroupMismatchError if messages arrived that were never received: a peer then ran more
        micro-batches than this rank.
        """
        if self._closed:
            return
        try:
            if not self._exchange.broken:
                self._exchange.close()
                left = self._exchange.left_over()
                if left:
                    raise GroupMismatchError(
                        f"rank {self.rank} closes its pipeline with {len(left)} messages that arrived and "
                        f"were not received: {', '.join(left[:4])}{', ...' if len(left) > 4 else ''}"
                    )
        finally:
            self.leave()

    def leave(self) -> None:
        """Leave and wait for nobody; the end of the group does this to its channels."""
        if not self._closed and self._transport is not None:
            self._transport.leave()
            if self._devices is not None:
                self._devices.leave()
        self._closed = True

    def bytes_in_ring(self, tensor: Tensor, rank: int) -> int:
        """Of a tensor that is sent to `rank`: none if its elements go from GPU to GPU."""
        devices = self._devices
        beside = devices is not None and devices.cost(tensor, rank) is not None
        return 0 if beside else tensor.nbytes

    @property
    def seconds(self) -> float:
        """Waited for anything, in all."""
        return self._exchange.seconds

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._exchange.seconds = value

    @property
    def statistics(self) -> dict[str, dict[str, float]]:
        """What moved and was waited for, by lane.

        "recv forward from stage 0 on rank 0 to stage 1 on rank 1": {messages, bytes (of tensors), wait (s)}
        """
        found = {
            f"{'send' if sends else 'recv'} {lane.name} from {lane.sender} to {lane.receiver}": lane
            for (sends, _, _), lane in self._lanes.items()
        }
        return {
            name: {"messages": lane.messages, "bytes": lane.nbytes, "wait": lane.seconds}
            for name, lane in found.items()
            if lane.messages
        }

    def explain(self) -> str:
        """What carries the messages, and why."""
        how = "local" if self._transport is None else self._transport.describe()
        return (
            f"stages {list(self.my_stages)} of {self.stages} on rank {self.rank} of {self.group.size}: "
            f"{how}, because {self.group.provider_reason}; CUDA tensors {self._devices_reason}"
        )

    def __repr__(self) -> str:
        return f"PipelineCommunicator({self.explain()})"

    def __enter__(self) -> PipelineCommunicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        if not self._exchange.broken:
            self.fail(f"{kind.__name__}: {error}")
        self.leave()

    # Construction.

    def _agree(self, buffer_bytes: int) -> None:
        """Either all ranks go on with the same arguments or all raise."""
        mine: dict[str, Any] = {
            "stage_to_rank": [_whole(rank) for rank in self.stage_to_rank],
            "credits": _whole(self.credits),
            "ring": bool(self.ring),
            "buffer_bytes": _whole(buffer_bytes),
            "device_route": str(self.device_route),
            "device_bytes": _whole(self.device_bytes),
        }
        if self.group.rendezvous is not None:
            corner = self.group.rendezvous.corner("pipeline")
            for rank, text in enumerate(corner.exchange("arguments", json.dumps(mine))):
                other = json.loads(text)
                parts = [
                    f"{name}={mine[name]} and {other[name]}"
                    for name in mine
                    if mine[name] != other[name]
                ]
                if parts:
                    raise GroupMismatchError(
                        f"ranks {self.rank} and {rank} of '{self.group.name}' make different pipelines: "
                        f"{', '.join(parts)}; the arguments must be equal on every rank"
                    )
        size = self.group.size
        ranks = mine["stage_to_rank"]
        if not ranks or any(type(rank) is not int or rank not in range(size) for rank in ranks):
            raise ShapeError(f"stage_to_rank={self.stage_to_rank}: use ranks from 0 to {size - 1}")
        counts = mine["credits"], mine["buffer_bytes"], mine["device_bytes"]
        whole = all(type(number) is int for number in counts)
        if (
            2 * self.stages > MOST_LANES
            or not whole
            or not 1 <= self.credits <= MOST_CREDITS
            or not 4096 <= buffer_bytes <= MOST_BUFFER_BYTES
            or not 4096 <= self.device_bytes <= MOST_BUFFER_BYTES
            or not self.timeout > 0
        ):
            raise UnsupportedError(
                f"{self.stages} stages, credits={self.credits}, buffer_bytes={buffer_bytes}, "
                f"device_bytes={self.device_bytes}, "
                f"timeout={self.timeout}: use up to {MOST_LANES // 2} stages, 1 to {MOST_CREDITS} credits, "
                f"4096 to {MOST_BUFFER_BYTES} bytes, in whole numbers, and a positive number of seconds"
            )

    def _neighbour(self, direction: int, stage: int, sends: bool) -> int | None:
        other = stage + (1 if (direction == FORWARD) == sends else -1)
        if self.ring:
            return other % self.stages
        return other if 0 <= other < self.stages else None

    def _make_lanes(self) -> None:
        def place(stage: int) -> str:
            return f"stage {stage} on rank {self.stage_to_rank[stage]}"

        for stage in self.my_stages:
            for direction in (FORWARD, BACKWARD):
                for sends in (True, False):
                    other = self._neighbour(direction, stage, sends)
                    if other is None:
                        continue
                    source, to = (stage, other) if sends else (other, stage)
                    number, peer = 2 * to + direction, self.stage_to_rank[other]
                    name = DIRECTIONS[direction]
                    lane = Lane(STAGE, number, peer, name, place(source), place(to))
                    self._lanes[sends, direction, stage] = lane
        for (sends, direction, stage), lane in self._lanes.items():
            # Between the same two stages: forward out of this one and backward into it, and the reverse.
            lane.back = self._lanes.get((not sends, 1 - direction, stage))

    def _connect(self, buffer_bytes: int) -> Transport:
        if self.group.memory is None:
            from .process_group import ProcessGroupRoutes

            return ProcessGroupRoutes(self.group, self.timeout)
        size, reach = self.group.size, 1
        for a, b in self._pairs():
            reach = max(reach, min((a - b) % size, (b - a) % size))
        return RingRoutes(self.group, reach, buffer_bytes)

    def _connect_devices(self) -> tuple[DeviceRoutes | None, str]:
        return device_routes(
            self.group, self.device_route, self.device_bytes, self.timeout, self._pairs()
        )

    def _pairs(self) -> list[tuple[int, int]]:
        """Ranks of stages that are next to each other."""
        ranks = self.stage_to_rank
        return list(zip(ranks, ranks[1:] + ranks[:1] * self.ring, strict=False))

    # Lanes.

    def _lane(self, sends: bool, direction: int, stage: int | None) -> Lane:
        if stage is None and len(self.my_stages) == 1:
            stage = self.my_stages[0]
        lane = self._lanes.get((sends, direction, stage))  # type: ignore[arg-type]
        if lane is not None:
            return lane
        call = f"{'send' if sends else 'recv'}_{DIRECTIONS[direction]}"
        if stage in self.my_stages:
            end = "next" if (direction == FORWARD) == sends else "previous"
            raise UnsupportedError(
                f"{call}: stage {stage} of {self.stages} has no {end} stage (ring=False)"
            )
        raise UnsupportedError(
            f"{call}: stage={stage} on rank {self.rank}, which has stages {list(self.my_stages)}: "
            "name one of them"
        )

    def _key(self, lane: Lane, micro_batch: int) -> int:
        if not 0 <= micro_batch < MOST_MICRO_BATCHES:
            raise UnsupportedError(f"micro_batch={micro_batch}: use a number from 0 to 2^32 - 1")
        return lane.bits | micro_batch

    def _check_rank(self, call: str, rank: int) -> None:
        if rank not in range(self.group.size):
            raise UnsupportedError(f"{call}: rank {rank} is not in the group of {self.group.size}")

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise UnsupportedError(f"{call}: this pipeline of '{self.group.name}' is closed")
        if self._exchange.broken:
            raise PeerLostError(f"{call}: this pipeline is broken since: {self._exchange.broken}")

    # Messages.

    def _send(self, direction: int, value: Any, micro_batch: int, stage: int | None) -> None:
        lane = self._lane(True, direction, stage)
        key = self._key(lane, micro_batch)
        if self._closed or self._exchange.broken:
            self._check_open("send")
        start = perf_counter()
        if lane.peer == self.rank:
            self._exchange.deliver(key, message.detached(value), lane)
            nbytes = 0
        else:
            nbytes = self._exchange.put(lane, micro_batch, value)
        lane.messages += 1
        lane.nbytes += nbytes
        if self.recorder is not None:
            kind = "SEND_B" if direction else "SEND_F"
            here = (lane.number // 2 + (1 if direction else -1)) % self.stages
            self.recorder.record(kind, here, micro_batch, start, perf_counter(), nbytes)

    def _recv(self, direction: int, micro_batch: int, stage: int | None) -> Any:
        lane = self._lane(False, direction, stage)
        key = self._key(lane, micro_batch)
        if self._closed or self._exchange.broken:
            self._check_open("recv")
        if self.recorder is None:
            value, nbytes = self._exchange.receive(lane, micro_batch, key)
        else:
            value, nbytes = self._recorded(self.recorder, lane, direction, micro_batch, key)
        lane.messages += 1
        lane.nbytes += nbytes
        return value

    def _recorded(
        self, recorder: Recorder, lane: Lane, direction: int, micro_batch: int, key: int
    ) -> tuple[Any, int]:
        suffix = "B" if direction else "F"
        stage, start = lane.number // 2, perf_counter()
        waits = key not in self._exchange.mailbox
        value, nbytes = self._exchange.receive(lane, micro_batch, key)
        end = perf_counter()
        if waits:
            recorder.record(f"WAIT_{suffix}", stage, micro_batch, start, end)
            start = end
        recorder.record(f"RECV_{suffix}", stage, micro_batch, start, end, nbytes)
        return value, nbytes


def _whole(value: Any) -> int | str:
    """A whole number as an int; anything else as a text, which other ranks can be shown."""
    try:
        return operator.index(value)
    except TypeError:
        return repr(value)
