"""Which GPU every rank has and whether each reaches those of all others, from facts that all ranks exchange.

A rank alone must not decide, see triton_support.py. Indices and peer access are as a process sees them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from .topology import HostIdentity

MOST_RANKS = 32  # whose flags have room in a line of 128 bytes: kernels/_signals.py
OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@dataclass(frozen=True)
class DeviceIdentity:
    """What a rank tells its peers about its GPU.

    Args:
        index: of the device among those its process sees, by which torch tells devices apart.
        uuid: of the device.
        reachable: UUIDs of the other devices its process sees that it can read and write.
        overlap: whether torch lets it share its device with other ranks.
        missing: why this process has no symmetric memory at all.
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
            "its own with torch.cuda.set_device before it makes the group, or for a test set "
            f"{OVERLAP}=1"
        )
    if device.uuid == other.uuid or other.uuid in device.reachable:
        return None
    return f"no peer access from device {device.uuid} to {other.uuid}"


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
