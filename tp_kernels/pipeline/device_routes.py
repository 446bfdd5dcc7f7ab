"""How the elements of tensors on GPUs get from rank to rank, beside the messages that describe them.

A description goes through the transport of the host (transport.py) and says which tensors come this way. Both
ends take them in the order of the descriptions, so nothing else has to be agreed, and the host never waits
for a device: it runs ahead, and streams wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tp_kernels.comm.cuda_support import native_obstacle
from tp_kernels.comm.errors import UnsupportedError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.regions import new_region, region_obstacle

from .device_process_group import DeviceProcessGroup, backend_for
from .message import TensorSpec
from .put import PutRoutes, region_bytes
from .streams import CudaStreams

CHOICES = ("auto", "put", "nccl", "host")


class DeviceRoutes(Protocol):
    """What the exchange asks of them."""

    most: int  # that the tensors of a message may cost together

    def cost(self, tensor: Tensor, peer: int) -> int | None:
        """Bytes that a tensor takes at `peer`; None if it does not go this way."""

    def mark(self) -> Any:
        """All that the current stream has been given so far: what `send` is to come after."""

    def has_room(self, peer: int, tensors: Sequence[Tensor]) -> bool:
        """Whether these may be sent now; ask again later."""

    def send(self, peer: int, tensors: Sequence[Tensor], after: Any) -> Callable[[], bool]:
        """Send contiguous tensors after this mark; a call that says whether they have left."""

    def receive(
        self, peer: int, specs: Sequence[TensorSpec]
    ) -> tuple[list[Tensor], Callable[[], object]]:
        """New tensors for what was sent, and a call that makes the current stream wait for their elements."""

    def flush(self) -> bool:
        """Whether what was sent may be changed by the current stream; else peers have to take some of it."""

    def idle(self) -> bool:
        """Whether everything that was sent has left, and everything that was received is here."""

    def failed(self) -> str:
        """What a device has waited for in vain, as far as the host has heard; "" for nothing."""

    def leave(self) -> None:
        """Let go of everything, and wait for nobody."""

    def describe(self) -> str:
        """What carries the elements, for people."""


class Choice:
    """Which tensors of a message go to `peer` by `routes`: called with each once, in their order."""

    def __init__(self, routes: DeviceRoutes, peer: int) -> None:
        self._routes, self._peer, self._left = routes, peer, routes.most
        self.chosen: set[int] = set()

    def __call__(self, tensor: Tensor) -> bool:
        cost = self._routes.cost(tensor, self._peer)
        if cost is None or cost > self._left:
            return False
        self._left -= cost
        self.chosen.add(id(tensor))
        return True


def device_routes(
    group: ParallelGroup,
    choice: str,
    device_bytes: int,
    timeout: float,
    pairs: Collection[tuple[int, int]],
) -> tuple[DeviceRoutes | None, str]:
    """The routes, or None where device tensors travel through host memory; what carries them, and why.

    Collective; every rank finds the same.

    Args:
        choice: "put", copies into memory of the receiving GPU and flags behind them; "nccl", the process
            group; "host", through the memory of the host; "auto", the first of these that is possible.
        device_bytes: memory of a rank's GPU for what each rank with stages next to its own sends it by puts.
        pairs: of ranks with stages next to each other.

    Raises:
        UnsupportedError: what was chosen is impossible.
    """
    if choice not in CHOICES:
        raise UnsupportedError(f"device_route={choice!r}: use one of {', '.join(CHOICES)}")
    if group.size == 1:
        return None, "not at all: there is one rank"
    if choice == "host":
        return None, "through host memory, because device_route='host' was asked for"
    why_not = {}
    for name, make in (("put", _put), ("nccl", _nccl)):
        if choice not in ("auto", name):
            continue
        try:  # all ranks find the same obstacle
            routes = make(group, device_bytes, timeout, pairs)
            return routes, routes.describe()
        except UnsupportedError as error:
            why_not[name] = str(error)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in why_not.items())
    if choice != "auto":
        raise UnsupportedError(
            f"device_route='{choice}' is impossible ({reasons}): 'auto' takes what is possible"
        )
    return None, f"through host memory ({reasons})"


def _put(
    group: ParallelGroup, device_bytes: int, timeout: float, pairs: Collection[tuple[int, int]]
) -> DeviceRoutes:
    obstacle = region_obstacle(group, "cuda") or native_obstacle(group.cuda_support, "simt")
    if obstacle is not None:
        raise UnsupportedError(obstacle)
    region = new_region(group, "cuda", region_bytes(group.size, pairs, device_bytes))
    region.settle()
    assert group.rendezvous is not None
    error = ""
    try:
        streams = CudaStreams(region.local.device)
        routes = PutRoutes(group, region, streams, pairs, device_bytes, timeout)
    except RuntimeError as failure:
        error = str(failure).splitlines()[0]
    said = group.rendezvous.corner("device route").exchange("made", error)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
    if failed:
        raise UnsupportedError("; ".join(failed))
    return routes


def _nccl(
    group: ParallelGroup, device_bytes: int, timeout: float, pairs: Collection[tuple[int, int]]
) -> DeviceRoutes:
    assert group.process_group is not None
    backend = backend_for(group.process_group, "cuda")
    if backend is None or backend.name() != "nccl":
        have = "none" if backend is None else f"'{backend.name()}'"
        raise UnsupportedError(f"the backend of this process group for CUDA tensors is {have}")
    device = torch.device("cuda", torch.cuda.current_device())
    return DeviceProcessGroup(group, "nccl", device, CudaStreams(device), pairs, timeout)
