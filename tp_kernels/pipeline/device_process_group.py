"""Tensors from GPU to GPU through process groups: NCCL, on one host or several.

What is sent on a communicator waits, on the device, for its receive, and everything behind it waits too. Were
several pairs of ranks to share one, ranks could wait for each other in a circle. So every pair with stages
next to each other has two communicators of its own, one for each direction, and each is a queue: sends and
receives come in one order, that of the descriptions. Other pairs, which talk rarely, have none.

They are made of their backend alone and not by `torch.distributed.new_group`, in which all ranks there are
would have to take part, whatever pipelines they are in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tp_kernels.comm.errors import UnsupportedError
from tp_kernels.comm.group import ParallelGroup

from .message import TensorSpec
from .streams import Streams


def backend_for(process_group: dist.ProcessGroup, device: str) -> Any:
    """What serves tensors of a kind of device in a process group; None if nothing does."""
    try:
        return process_group._get_backend(torch.device(device))
    except RuntimeError:
        return None


def new_backend(name: str, store: dist.Store, rank: int, size: int, timeout: float) -> Any:
    """A backend of its own: "gloo" or "nccl"."""
    seconds = timedelta(seconds=timeout)
    if name == "gloo":
        return c10d.ProcessGroupGloo(store, rank, size, timeout=seconds)
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = seconds
    return c10d.ProcessGroupNCCL(store, rank, size, options)


class DeviceProcessGroup:
    """DeviceRoutes through backends of this name. Construction is collective.

    Calls of a backend are made under a stream of their own: what NCCL receives would else wait for everything
    that the program has given its stream before, which may wait for what the peer is to receive.

    Args:
        device: of this rank.
        pairs: of ranks that have stages next to each other; equal on all ranks.
        timeout: seconds after which the watchdog of NCCL ends a process whose call has found no peer.
        make: makes a backend, as `new_backend`.

    Raises:
        UnsupportedError: a communicator cannot be made, on all ranks alike; NCCL has none for ranks that
            share a GPU.
    """

    most = 1 << 62  # bytes of a message

    def __init__(
        self,
        group: ParallelGroup,
        name: str,
        device: torch.device,
        streams: Streams,
        pairs: Iterable[tuple[int, int]],
        timeout: float,
        make: Callable[[str, dist.Store, int, int, float], Any] = new_backend,
    ) -> None:
        assert group.rendezvous is not None
        self._group, self._name, self._device, self._streams = group, name, device, streams
        self._backends: dict[tuple[int, int], Any] = {}  # by (source, destination)
        self._aside = streams.new()
        self._sent: deque[tuple[Any, Tensor]] = deque()  # under way, with its memory
        self._received: deque[tuple[Any, Tensor]] = deque()
        corner = group.rendezvous.corner("device route")
        error = ""
        for pair in sorted({(min(pair), max(pair)) for pair in pairs}):  # the same order everywhere
            for way in (pair, pair[::-1]):
                if group.rank not in way or way[0] == way[1]:
                    continue
                store = corner.store(f"{way[0]} to {way[1]}")
                try:
                    self._backends[way] = make(name, store, way.index(group.rank), 2, timeout)
                    # NCCL makes the communicator in the first call, in which hosts wait for each other.
                    word = torch.zeros(1, device=device)
                    self._call("send" if group.rank == way[0] else "recv", way, word).wait()
                except RuntimeError as failure:
                    error = str(failure).splitlines()[0]
        said = corner.exchange("made", error)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
        if failed:
            raise UnsupportedError(f"no communicators of {name}: {'; '.join(failed)}")

    def cost(self, tensor: Tensor, peer: int) -> int | None:
        connected = (self._group.rank, peer) in self._backends
        return 0 if connected and tensor.device == self._device else None

    def mark(self) -> Any:
        return self._streams.record()

    def has_room(self, peer: int, tensors: Sequence[Tensor]) -> bool:
        return True

    def send(self, peer: int, tensors: Sequence[Tensor], after: Any) -> Callable[[], bool]:
        self._reap()
        way, works = (self._group.rank, peer), []
        with self._streams.on(self._aside):
            self._streams.wait(after)
            for tensor in tensors:
                if tensor.numel():
                    self._sent.append((self._call("send", way, tensor), tensor))
                    works.append(self._sent[-1][0])
        return lambda: all(work.is_completed() for work in works)

    def receive(
        self, peer: int, specs: Sequence[TensorSpec]
    ) -> tuple[list[Tensor], Callable[[], object]]:
        self._reap()
        way, streams, works = (peer, self._group.rank), self._streams, []
        with streams.on(self._aside):
            tensors = [streams.empty(spec.shape, spec.dtype) for spec in specs]
            for tensor in tensors:
                if tensor.numel():
                    self._received.append((self._call("recv", way, tensor), tensor))
                    works.append(self._received[-1][0])

        def ready() -> None:
            for work in works:
                work.wait()  # holds the current stream
            for tensor in tensors:
                streams.keep(tensor)

        return tensors, ready

    def flush(self) -> bool:
        self._reap()
        return not self._sent

    def idle(self) -> bool:
        self._reap()
        return not (self._sent or self._received)

    def failed(self) -> str:
        return ""

    def leave(self) -> None:
        if not self.idle():  # memory that is under way lives as long as the group
            self._group.transport.abandoned.append((self._sent, self._received, self._backends))

    def describe(self) -> str:
        return (
            f"by the process group ({self._name}) between ranks with stages next to each other, else "
            "through host memory"
        )

    def _call(self, name: str, way: tuple[int, int], tensor: Tensor) -> Any:
        # As bytes: of every dtype, also of those that the backend does not know.
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        call = getattr(self._backends[way], name)
        return call([flat], 1 - way.index(self._group.rank), 0)

    def _reap(self) -> None:
        for under_way in (self._sent, self._received):
            while under_way and under_way[0][0].is_completed():
                under_way.popleft()
