"""Bare memory that all ranks address, by the kind of device it is on: where providers are chosen."""

from __future__ import annotations

from .errors import UnsupportedError
from .group import ParallelGroup
from .symmetric_region import SymmetricRegion


def region_obstacle(group: ParallelGroup, device: str) -> str | None:
    """Why the ranks have no such memory on this kind of device ("cpu", "cuda"), or None when they have.

    Equal on all ranks.
    """
    if device == "cpu":
        return None if group.memory is not None else group.provider_reason
    return f"no memory of {device} devices that all ranks address"


def new_region(group: ParallelGroup, device: str, nbytes: int) -> SymmetricRegion:
    """`nbytes` zero bytes on every rank, on its current device of this kind. Collective."""
    obstacle = region_obstacle(group, device)
    if obstacle:
        raise UnsupportedError(f"rank {group.rank}: {obstacle}")
    return SymmetricRegion(group, nbytes)
