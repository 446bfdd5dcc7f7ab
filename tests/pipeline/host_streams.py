"""A device with streams, made of threads: what PutRoutes asks of a GPU, in the memory of the host.

Every stream is a thread that does what it was given, in order, some time later. What is not ordered by an
event, a flag or a stream is therefore seen to be wrong, and often.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import Queue
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor

from tp_kernels.comm.symmetric_region import SymmetricRegion
from tp_kernels.pipeline import PipelineCommunicator
from tp_kernels.pipeline.device_process_group import DeviceProcessGroup, new_backend
from tp_kernels.pipeline.put import PutRoutes, region_bytes

WAYS = ("put", "in order")  # the second: a process group whose calls run as NCCL's do


def signed(count: int) -> int:
    """A counter that wraps, as int32."""
    return (count + 2**31) % 2**32 - 2**31


class Stream:
    def __init__(self, delay: float) -> None:
        self.work: Queue[Callable[[], object]] = Queue()
        self.delay, self.held = delay, threading.Event()
        self.held.set()  # not held
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        own = random.Random(id(self))
        while True:
            call = self.work.get()
            self.held.wait()
            if own.random() < 0.2:
                sleep(own.random() * self.delay)
            call()


class HostStreams:
    """The current stream, unless `on` says otherwise, is the program: what it is given is done at once."""

    def __init__(self, delay: float = 2e-4) -> None:
        self._delay = delay
        self._current: Stream | None = None
        self.streams: list[Stream] = []

    def new(self) -> Stream:
        self.streams.append(Stream(self._delay))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def record(self, stream: Stream | None = None) -> threading.Event:
        event = threading.Event()
        self._give(event.set, stream)
        return event

    def wait(self, event: threading.Event, stream: Stream | None = None) -> None:
        self._give(event.wait, stream)

    def over(self, event: threading.Event) -> bool:
        return event.is_set()

    def keep(self, tensor: Tensor, stream: Stream | None = None) -> None:
        self._give(lambda: tensor, stream)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        made = torch.empty(tuple(shape), dtype=dtype)
        made.untyped_storage().fill_(0xFF)
        return made

    def visible(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32)

    def copy(self, target: Tensor, source: Tensor) -> None:
        raw = (
            target.data
        )  # which counts no versions: a device writes later than its program says so
        self._give(lambda: raw.copy_(source))

    def wait_for(
        self,
        flag: Tensor,
        count: int,
        record: Tensor,
        timeout: float,
        rank: int,
        peer: int,
    ) -> None:
        def wait() -> None:
            give_up = monotonic() + timeout
            while record[0] == 0 and signed((seen := int(flag)) - count) < 0:
                if monotonic() > give_up:
                    record.copy_(torch.tensor([2, rank, 11, 0, 0, peer, count, seen]))
                sleep(1e-5)

        self._give(wait)

    def write_flag(self, flag: Tensor, count: int) -> None:
        self._give(lambda: flag.fill_(signed(count)))

    def _give(self, call: Callable[[], object], stream: Stream | None = None) -> None:
        stream = stream or self._current
        if stream is None:
            call()
        else:
            stream.work.put(call)


class InOrder:
    """A backend as NCCL is one: calls run later, one after the other, a send until its receive.

    Each begins when what the current stream had been given by then is done.
    """

    def __init__(self, streams: HostStreams, *args: Any) -> None:
        self._backend, self._streams = new_backend(*args), streams
        self._stream = Stream(2e-4)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> InOrder.Work:
        def run() -> None:
            self._backend.send(tensors, peer, 1).wait()
            self._backend.recv([torch.zeros(1)], peer, 2).wait()

        return self.Work(self, run)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> InOrder.Work:
        def run() -> None:
            self._backend.recv(tensors, peer, 1).wait()
            self._backend.send([torch.zeros(1)], peer, 2).wait()

        return self.Work(self, run)

    class Work:
        def __init__(self, backend: InOrder, run: Callable[[], object]) -> None:
            self._over, self._streams = threading.Event(), backend._streams
            for call in (backend._streams.record().wait, run, self._over.set):
                backend._stream.work.put(call)

        def wait(self) -> None:
            """Holds the current stream, as that of NCCL does."""
            self._streams.wait(self._over)

        def is_completed(self) -> bool:
            return self._over.is_set()


class OnDevices(PipelineCommunicator):
    """Tensors of the host take the ways of tensors on GPUs.

    Args:
        way: one of WAYS.
        only: the dtype that does; None: all.
    """

    def __init__(
        self, group: Any, way: str, only: torch.dtype | None = None, **options: Any
    ) -> None:
        self._asked, self._only = way, only
        self.streams = HostStreams()
        # A ring like that of the host, so that tests of it are tests of this one.
        options.setdefault("device_bytes", options.get("buffer_bytes", 1 << 20))
        super().__init__(group, **options)

    def _connect_devices(self) -> tuple[Any, str]:
        routes: PutRoutes | DeviceProcessGroup
        pairs, device = self._pairs(), torch.device("cpu")
        if self._asked == "put":
            size = region_bytes(self.group.size, pairs, self.device_bytes)
            region = SymmetricRegion(self.group, size)
            region.settle()
            routes = PutRoutes(
                self.group, region, self.streams, pairs, self.device_bytes, self.timeout
            )
        else:
            make = partial(InOrder, self.streams)
            routes = DeviceProcessGroup(
                self.group, "gloo", device, self.streams, pairs, self.timeout, make
            )
        if self._only is not None:
            cost = routes.cost
            routes.cost = lambda x, peer: cost(x, peer) if x.dtype == self._only else None  # type: ignore[method-assign]
        return routes, routes.describe()
