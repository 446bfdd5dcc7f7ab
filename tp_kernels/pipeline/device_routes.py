"""How the elements of tensors on GPUs get from rank to rank, beside the messages that describe them.

A description goes through the transport of the host (transport.py) and says which tensors come this way. Both
ends take them in the order of the descriptions, so nothing else has to be agreed, and the host never waits
for a device: it runs ahead, and streams wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from torch import Tensor

from tp_kernels.comm.cuda_support import native_obstacle
from tp_kernels.comm.errors import UnsupportedError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.regions import new_region, region_obstacle

from .device_process_group import DeviceProcessGroup, backend_for
from .message import TensorSpec
from .put import CudaStreams, PutRoutes, region_bytes

CHOICES = ("auto", "put", "nccl", "host")


class DeviceRoutes(Protocol):
    """What the exchange asks of them."""

    def carries(self, tensor: Tensor, peer: int) -> bool:
        """Whether the elements of this tensor go this way to `peer`."""

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        """Send contiguous tensors when what the current stream does to them is done."""

    def receive(
        self, peer: int, specs: Sequence[TensorSpec]
    ) -> tuple[list[Tensor], Callable[[], object]]:
        """New tensors for what was sent, and a call that makes the current stream wait for their elements."""

    def flush(self) -> None:
        """Make the current stream wait until what was sent may be changed."""

    def sent(self) -> bool:
        """Whether everything that was sent has left this rank."""

    def failed(self) -> str:
        """What the device has waited for in vain, as far as the host has heard; "" for nothing."""

    def leave(self) -> None:
        """Let go of everything, and wait for nobody."""

    def describe(self) -> str:
        """What carries the elements, for people."""


def device_routes(
    group: ParallelGroup,
    choice: str,
    buffer_bytes: int,
    timeout: float,
    pairs: Collection[tuple[int, int]],
) -> tuple[DeviceRoutes | None, str]:
    """The routes, or None where device tensors travel through host memory; what carries them, and why.

    Collective; every rank finds the same.

    Args:
        choice: "put", copies into memory of the receiving GPU and flags behind them; "nccl", the process
            group; "host", through the memory of the host; "auto", the first of these that is possible.
        buffer_bytes: memory of a rank's GPU for what each other rank sends it.
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
    if choice in ("auto", "put"):
        obstacle = region_obstacle(group, "cuda") or native_obstacle(group.cuda_support, "simt")
        if obstacle is None:
            region = new_region(group, "cuda", region_bytes(group.size, buffer_bytes))
            region.settle()
            streams = CudaStreams(region.local.device)
            put = PutRoutes(group, region, streams, buffer_bytes, timeout)
            return put, put.describe()
        why_not["put"] = obstacle
    if choice in ("auto", "nccl"):
        assert group.process_group is not None
        backend = backend_for(group.process_group, "cuda")
        if backend is not None and backend.name() == "nccl":
            try:
                routes = DeviceProcessGroup(group, "nccl", "cuda", pairs)
                return routes, routes.describe()
            except UnsupportedError as error:  # raised on all ranks or on none
                why_not["nccl"] = str(error)
        else:
            have = "none" if backend is None else f"'{backend.name()}'"
            why_not["nccl"] = f"the backend of this process group for CUDA tensors is {have}"
    reasons = "; ".join(f"{name}: {reason}" for name, reason in why_not.items())
    if choice != "auto":
        raise UnsupportedError(
            f"device_route='{choice}' is impossible ({reasons}): 'auto' takes what is possible"
        )
    return None, f"through host memory ({reasons})"
