"""PipelineCommunicator: values from stage to stage, several micro-batches, chunks and directions at once."""

from __future__ import annotations

import json
import queue
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from time import perf_counter
from types import TracebackType
from typing import Any

import torch

from tp_kernels.comm.errors import GroupMismatchError, ShapeError, UnsupportedError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.p2p import P2PChannel

from . import message

_FORWARD, _BACKWARD = 0, 1
_NAMES = ("forward", "backward")
_HEAD = struct.Struct("<I")


class PipelineCommunicator:
    """Sends and receives between the stages of a pipeline. Construction is collective over the group.

    Args:
        group: the ranks of the pipeline.
        stage_to_rank: the rank of every stage, equal on all ranks; default: stage s on rank s.
        credits: messages of a lane (a direction into a stage) that may be under way and not received.
        ring: the last stage's `send_forward` goes to stage 0, whose `send_backward` goes to the last.
        buffer_bytes: shared memory from one rank to another.
        timeout: seconds a wait may last; default: that of the group.
        recorder: its `record(kind, stage, micro_batch, start, end, nbytes)` is called for every message.
    """

    def __init__(
        self,
        group: ParallelGroup,
        *,
        stage_to_rank: Sequence[int] | None = None,
        credits: int = 4,
        ring: bool = False,
        buffer_bytes: int = 4 << 20,
        timeout: float | None = None,
        recorder: Any = None,
    ) -> None:
        self.group = group
        self.rank = group.rank
        self.stage_to_rank = tuple(range(group.size) if stage_to_rank is None else stage_to_rank)
        self.stages = len(self.stage_to_rank)
        self.credits, self.ring, self.recorder = credits, ring, recorder
        self.timeout = group.timeout if timeout is None else timeout
        if group.rendezvous is not None:
            mine = json.dumps([self.stage_to_rank, credits, ring, buffer_bytes])
            for rank, other in enumerate(
                group.rendezvous.corner("pipeline").exchange("made", mine)
            ):
                if other != mine:
                    raise GroupMismatchError(
                        f"rank {self.rank} makes a pipeline of stage_to_rank, credits, ring, buffer_bytes: "
                        f"{mine}, rank {rank} of {other}; they must be equal on every rank"
                    )
        if not self.stages or any(not 0 <= rank < group.size for rank in self.stage_to_rank):
            raise ShapeError(
                f"stage_to_rank={self.stage_to_rank}: use ranks from 0 to {group.size - 1}"
            )
        self.my_stages = tuple(s for s, r in enumerate(self.stage_to_rank) if r == self.rank)
        self.statistics: dict[tuple[str, int], dict[str, float]] = defaultdict(
            lambda: {"messages": 0, "bytes": 0, "wait": 0.0}
        )
        self._channel = P2PChannel(group, cells=16, cell_bytes=max(1, buffer_bytes // 16))
        self._mailbox: dict[Any, deque[Any]] = defaultdict(deque)
        self._outbox: queue.Queue[Any] = queue.Queue()
        self._error: BaseException | None = None
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._sender.start()

    def send_forward(self, value: Any, *, micro_batch: int, stage: int | None = None) -> None:
        """Send to the next stage."""
        self._send(_FORWARD, value, micro_batch, stage)

    def send_backward(self, value: Any, *, micro_batch: int, stage: int | None = None) -> None:
        """Send to the previous stage."""
        self._send(_BACKWARD, value, micro_batch, stage)

    def recv_forward(self, *, micro_batch: int, stage: int | None = None) -> Any:
        """Receive what the previous stage sent forward."""
        return self._recv(_FORWARD, micro_batch, stage)

    def recv_backward(self, *, micro_batch: int, stage: int | None = None) -> Any:
        """Receive what the next stage sent backward."""
        return self._recv(_BACKWARD, micro_batch, stage)

    def send_forward_recv_backward(
        self, value: Any, *, send_micro_batch: int, recv_micro_batch: int, stage: int | None = None
    ) -> Any:
        self.send_forward(value, micro_batch=send_micro_batch, stage=stage)
        return self.recv_backward(micro_batch=recv_micro_batch, stage=stage)

    def send_backward_recv_forward(
        self, value: Any, *, send_micro_batch: int, recv_micro_batch: int, stage: int | None = None
    ) -> Any:
        self.send_backward(value, micro_batch=send_micro_batch, stage=stage)
        return self.recv_forward(micro_batch=recv_micro_batch, stage=stage)

    def send_forward_recv_forward(
        self, value: Any, *, send_micro_batch: int, recv_micro_batch: int, stage: int | None = None
    ) -> Any:
        self.send_forward(value, micro_batch=send_micro_batch, stage=stage)
        return self.recv_forward(micro_batch=recv_micro_batch, stage=stage)

    def send_backward_recv_backward(
        self, value: Any, *, send_micro_batch: int, recv_micro_batch: int, stage: int | None = None
    ) -> Any:
        self.send_backward(value, micro_batch=send_micro_batch, stage=stage)
        return self.recv_backward(micro_batch=recv_micro_batch, stage=stage)

    def post_forward(self, *, micro_batch: int, stage: int | None = None) -> None:
        self._check(_FORWARD, self._stage(stage), arrives=True)

    def post_backward(self, *, micro_batch: int, stage: int | None = None) -> None:
        self._check(_BACKWARD, self._stage(stage), arrives=True)

    def progress(self) -> None:
        """Move whatever can move now; never waits."""

    def flush(self) -> None:
        """Wait until what was sent has left this rank's memory."""
        self._outbox.join()
        if self._error is not None:
            raise self._error

    def send_to(self, value: Any, rank: int, *, tag: str) -> None:
        """Send to any rank of the group."""
        self._put((2, 0, tag), rank, value)

    def recv_from(self, rank: int, *, tag: str) -> Any:
        """Receive what `rank` sent with this tag."""
        return self._take((2, 0, tag), rank)

    def fail(self, reason: str) -> None:
        """Tell the peers that this rank cannot go on; those who wait for it raise at once."""
        self._channel.fail(reason)

    def close(self) -> None:
        """Leave in order."""
        try:
            self.flush()
            self._outbox.put(None)
            self._sender.join()
            self._channel.close()
        finally:
            self._channel.leave()

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
        else:
            self.fail(f"{kind.__name__}: {error}")
            self._channel.leave()

    def _stage(self, stage: int | None) -> int:
        if stage is None and len(self.my_stages) == 1:
            return self.my_stages[0]
        if stage not in self.my_stages:
            raise UnsupportedError(
                f"stage={stage} on rank {self.rank}, which has stages {self.my_stages}: name one of them"
            )
        return stage

    def _check(self, direction: int, stage: int, arrives: bool) -> int:
        """The stage at the other end."""
        step = 1 if (direction == _FORWARD) != arrives else -1
        other = stage + step
        if self.ring:
            return other % self.stages
        if not 0 <= other < self.stages:
            raise UnsupportedError(
                f"stage {stage} of {self.stages} has no {'previous' if step < 0 else 'next'} stage"
            )
        return other

    def _send(self, direction: int, value: Any, micro_batch: int, stage: int | None) -> None:
        here = self._stage(stage)
        to = self._check(direction, here, arrives=False)
        start = perf_counter()
        nbytes = self._put((direction, to, micro_batch), self.stage_to_rank[to], value)
        if self.recorder is not None:
            kind = "SEND_B" if direction else "SEND_F"
            self.recorder.record(kind, here, micro_batch, start, perf_counter(), nbytes)

    def _put(self, key: Any, rank: int, value: Any) -> int:
        if rank == self.rank:
            self._mailbox[key, rank].append(message.detached(value))
            return 0
        head, tensors = message.encode([*key, value])
        self._outbox.put((rank, [_HEAD.pack(len(head)), head, *tensors]))
        return sum(tensor.nbytes for tensor in tensors)

    def _recv(self, direction: int, micro_batch: int, stage: int | None) -> Any:
        here = self._stage(stage)
        source = self._check(direction, here, arrives=True)
        start = perf_counter()
        value = self._take((direction, here, micro_batch), self.stage_to_rank[source])
        if self.recorder is not None:
            kind = "RECV_B" if direction else "RECV_F"
            self.recorder.record(kind, here, micro_batch, start, perf_counter(), 0)
        return value

    def _take(self, key: Any, rank: int) -> Any:
        while not self._mailbox[key, rank]:
            if self._error is not None:
                raise self._error
            self._channel.peek(rank)
            size = self._channel.recv_part(rank, torch.empty(4, dtype=torch.uint8))
            head = torch.empty(_HEAD.unpack(size.numpy().tobytes())[0], dtype=torch.uint8)
            described = message.decode(self._channel.recv_part(rank, head).numpy().tobytes())
            memory = [spec.empty() for spec in described.tensors]
            if memory:
                self._channel.recv(rank, memory)
            made = [spec.finish(x) for spec, x in zip(described.tensors, memory, strict=True)]
            *got, value = described.value(made)
            self._mailbox[tuple(got), rank].append(value)
        return self._mailbox[key, rank].popleft()

    def _send_all(self) -> None:
        while (item := self._outbox.get()) is not None:
            try:
                if self._error is None:
                    self._channel.send(item[1], item[0])
            except BaseException as error:
                self._error = error
            finally:
                self._outbox.task_done()
