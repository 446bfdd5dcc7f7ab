"""Bare memory that all ranks address, by the kind of device it is on: where providers are chosen."""

from __future__ import annotations

from typing import TypeAlias

from .cuda_region import CudaRegion
from .devices import cuda_obstacle
from .errors import UnsupportedError
from .group import ParallelGroup
from .symmetric_region import SymmetricRegion

Region: TypeAlias = SymmetricRegion | CudaRegion


def region_obstacle(group: ParallelGroup, device: str) -> str | None:
    """Why the ranks have no such memory on this kind of device ("cpu", "cuda"), or None when they have.

    Equal on all ranks. Of GPUs, the answer is for those that were current when the group was made.
    """
    if device == "cpu":
        return None if group.memory is not None else group.provider_reason
    if device == "cuda":
        return cuda_obstacle(group.identities, group.devices)
    return f"no memory of {device} devices that all ranks address"


def new_region(group: ParallelGroup, device: str, nbytes: int) -> Region:
    """`nbytes` zero bytes on every rank, on its current device of this kind. Collective.

    Raises:
        UnsupportedError: `region_obstacle`, or as SymmetricRegion and CudaRegion.
    """
    obstacle = region_obstacle(group, device)
    if obstacle:
        raise UnsupportedError(f"rank {group.rank}: {obstacle}")
    return CudaRegion(group, nbytes, device) if device == "cuda" else SymmetricRegion(group, nbytes)
