"""As symmetric_region.py, in the memory of GPUs, by torch's symmetric memory.

Limits: CUDA, one host, at most MOST_RANKS ranks; every rank's device reaches those of all others. Where that
does not hold, `cuda_obstacle` says why, from facts that all ranks exchange, so they never part ways.

Two ranks on one device are refused, as by torch, unless TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 is set.
This is for tests: their kernels take turns, so a wait lasts a time slice, and torch maps no multicast.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from .collectives import barrier
from .errors import ShapeError, UnsupportedError
from .group import ParallelGroup
from .topology import HostIdentity

MOST_RANKS = 32  # as many flags as a channel has: kernels/_signals.py
OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@dataclass(frozen=True)
class DeviceIdentity:
    """What a rank tells its peers about its GPU.

    Args:
        index: of the device among those its process sees, by which torch tells devices apart.
        uuid: of the device.
        reachable: UUIDs of the other devices its process sees that it can read and write.
        overlap: whether torch lets it share its device with other ranks.
        missing: why this process cannot have symmetric memory at all.
    """

    index: int = -1
    uuid: str = ""
    reachable: tuple[str, ...] = ()
    overlap: bool = False
    missing: str | None = None

    @classmethod
    def current(cls, device: torch.device) -> DeviceIdentity:
        """Of `device` in this process; never raises for what a machine or a torch lacks."""
        missing = _missing(device)
        if missing:
            return cls(missing=missing)
        index = torch.cuda.current_device() if device.index is None else device.index
        reachable = [
            _uuid(other)
            for other in range(torch.cuda.device_count())
            if other != index and torch.cuda.can_device_access_peer(index, other)
        ]
        overlap = os.environ.get(OVERLAP) == "1"  # the value that torch compares with
        return cls(index, _uuid(index), tuple(reachable), overlap)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DeviceIdentity:
        identity = cls(**json.loads(text))
        return replace(identity, reachable=tuple(identity.reachable))


def cuda_obstacle(
    identities: Sequence[HostIdentity], devices: Sequence[DeviceIdentity]
) -> str | None:
    """Why ranks with these hosts and devices cannot use a CUDA region, or None when they can."""
    if len(devices) > MOST_RANKS:
        return f"{len(devices)} ranks; kernels have flags for {MOST_RANKS}"
    for rank, device in enumerate(devices):
        if device.missing:
            return f"rank {rank}: {device.missing}"
    for rank, identity in enumerate(identities[1:], start=1):
        obstacle = identities[0].obstacle(identity)
        if obstacle:
            return f"ranks 0 and {rank}: {obstacle}"
    for rank, device in enumerate(devices):
        for peer, other in enumerate(devices[:rank]):
            obstacle = _between(device, other) or _between(other, device)
            if obstacle:
                return f"ranks {peer} and {rank}: {obstacle}"
    return None


def exchange_devices(group: ParallelGroup, device: torch.device) -> list[DeviceIdentity]:
    """What every rank has to say about its device, in rank order. Collective."""
    mine = DeviceIdentity.current(device)
    if group.rendezvous is None:
        return [mine]
    texts = group.rendezvous.corner("device").exchange("identity", mine.to_json())
    return [DeviceIdentity.from_json(text) for text in texts]


class CudaRegion:
    """`nbytes` bytes on every rank's GPU, all zero when made. Construction is collective over `group`.

    Every rank's part is memory of its own, never of a pool: in one, ranks that free at different times would
    be given blocks that do not correspond.

    Args:
        group: whose ranks take part; its backend does not matter.
        nbytes: of every rank's part, equal on all ranks.
        device: of this rank, "cuda" for the current one.

    Attributes:
        local: [nbytes] uint8, this rank's part, aligned to 16 bytes at least.
        addresses: of the part of every rank, as this rank's kernels reach them.
        multicast: an address that stands for the parts of all ranks at once, or 0.

    Raises:
        ShapeError: the ranks ask for different sizes.
        UnsupportedError: `cuda_obstacle` has found one, a rank has no room for the region, or torch cannot
            map it. What breaks inside torch on one rank, the others notice when torch's store gives up.
    """

    def __init__(self, group: ParallelGroup, nbytes: int, device: torch.device | str) -> None:
        self.group, self.nbytes, self.multicast = group, nbytes, 0
        self.device = torch.device(device)
        self._handle: Any = None  # keeps the parts of the peers mapped
        if group.size > 1:
            devices = exchange_devices(group, self.device)
            obstacle = cuda_obstacle(group.identities, devices)
            if obstacle:
                raise UnsupportedError(
                    f"CUDA region on rank {group.rank} of {group.size}: {obstacle}"
                )
            self.device = torch.device("cuda", devices[group.rank].index)
            self._share()
            return
        self.local = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        self.addresses = [self.local.data_ptr()]

    def _share(self) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        group = self.group
        assert group.rendezvous is not None and group.process_group is not None
        corner = group.rendezvous.corner("region")
        sizes = corner.exchange("nbytes", str(self.nbytes))
        if len(set(sizes)) > 1:
            raise ShapeError(
                f"CUDA region on rank {group.rank}: nbytes={self.nbytes}, but the ranks ask for {sizes}"
            )
        error = ""
        try:
            self.local = symmetric_memory._SymmetricMemory.empty_strided_p2p(
                (self.nbytes,), (1,), torch.uint8, self.device
            )
            self.local.zero_()
            torch.cuda.synchronize(self.device)  # before any peer has the address
        except RuntimeError as failure:  # out of memory is one as well
            error = str(failure).splitlines()[0]
        self._raise_alike(corner.exchange("allocated", error))
        try:
            handle = symmetric_memory.rendezvous(self.local, group.process_group.group_name)
            # Where torch takes the part from a larger allocation, every rank's is at the same place in it.
            offset = self.local.data_ptr() - handle.buffer_ptrs[group.rank]
            self.addresses = [address + offset for address in handle.buffer_ptrs]
            self.multicast = handle.multicast_ptr
            if 0 in handle.buffer_ptrs:
                error = f"the device of rank {handle.buffer_ptrs.index(0)} cannot be addressed"
            self._handle = handle
        except RuntimeError as failure:
            error = str(failure).splitlines()[0]
        self._raise_alike(corner.exchange("mapped", error))

    def _raise_alike(self, errors: Sequence[str]) -> None:
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
        if failed:
            raise UnsupportedError(
                f"CUDA region of {self.nbytes} bytes on rank {self.group.rank}: {'; '.join(failed)}"
            )

    def settle(self) -> None:
        """Return when every rank has come here and what it had given its device to do is done."""
        torch.cuda.synchronize(self.device)
        barrier(self.group)

    def close(self) -> None:
        """Let go of the peers' parts; they are unmapped with `local`. No kernel of any rank may still run."""
        self.addresses, self.multicast, self._handle = [], 0, None


def _missing(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"{device} is no CUDA device"
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        from torch._C._distributed_c10d import _SymmetricMemory

        if _SymmetricMemory.get_backend(device) is None:
            return f"torch {torch.__version__} has no symmetric memory for CUDA"
    except (ImportError, AttributeError):
        return f"torch {torch.__version__} has no symmetric memory"
    return None


def _between(device: DeviceIdentity, other: DeviceIdentity) -> str | None:
    """What keeps `device` from the memory of `other`."""
    if device.index == other.index and not (device.overlap and other.overlap):
        return (
            f"both on cuda:{device.index}, which torch refuses; let every rank see all devices and choose "
            f"its own with torch.cuda.set_device, or set {OVERLAP}=1 for a test"
        )
    if device.uuid == other.uuid or other.uuid in device.reachable:
        return None
    return f"no peer access from device {device.uuid} to {other.uuid}"


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
