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

    Args:
        device: kind of device, "cuda".
        pairs: of ranks that have stages next to each other; equal on all ranks.
        make: makes a backend, as `new_backend`.

    Raises:
        UnsupportedError: a communicator cannot be made, on all ranks alike; NCCL has none for ranks that
            share a GPU.
    """

    def __init__(
        self,
        group: ParallelGroup,
        name: str,
        device: str,
        pairs: Iterable[tuple[int, int]],
        make: Callable[[str, dist.Store, int, int, float], Any] = new_backend,
    ) -> None:
        assert group.rendezvous is not None
        self._group, self._name, self._device = group, name, torch.device(device)
        self._backends: dict[tuple[int, int], Any] = {}  # by (source, destination)
        corner = group.rendezvous.corner("device route")
        error = ""
        for pair in sorted(
            {(min(pair), max(pair)) for pair in pairs}
        ):  # on all ranks in this order
            for way in (pair, pair[::-1]):
                if group.rank not in way or way[0] == way[1]:
                    continue
                store = corner.store(f"{way[0]} to {way[1]}")
                try:
                    self._backends[way] = made = make(
                        name, store, way.index(group.rank), 2, group.timeout
                    )
                    # NCCL makes the communicator in the first call, in which the host waits for the peer.
                    word = torch.zeros(1, device=self._device)
                    first = made.send if group.rank == way[0] else made.recv
                    first([word], 1 - way.index(group.rank), 0).wait()
                except RuntimeError as failure:
                    error = str(failure).splitlines()[0]
        said = corner.exchange("made", error)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
        if failed:
            raise UnsupportedError(f"no communicators of {name}: {'; '.join(failed)}")
        self._in_flight: deque[tuple[Any, Tensor]] = deque()

    def carries(self, tensor: Tensor, peer: int) -> bool:
        return (
            tensor.device.type == self._device.type and (self._group.rank, peer) in self._backends
        )

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        self._reap()
        way = self._group.rank, peer
        for tensor in tensors:
            if tensor.numel():
                self._in_flight.append((self._call("send", way, tensor), tensor))

    def receive(
        self, peer: int, specs: Sequence[TensorSpec]
    ) -> tuple[list[Tensor], Callable[[], object]]:
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs]
        way = peer, self._group.rank
        works = [self._call("recv", way, tensor) for tensor in tensors if tensor.numel()]
        return tensors, lambda: [work.wait() for work in works]

    def flush(self) -> None:
        while self._in_flight:
            self._in_flight.popleft()[0].wait()

    def sent(self) -> bool:
        self._reap()
        return not self._in_flight

    def failed(self) -> str:
        return ""  # NCCL's watchdog ends a process whose communicator is stuck

    def leave(self) -> None:
        # Memory that is under way lives as long as the group.
        self._group.transport.abandoned.append((self._in_flight, self._backends))

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
        while self._in_flight and self._in_flight[0][0].is_completed():
            self._in_flight.popleft()
