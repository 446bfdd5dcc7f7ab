"""Bare memory of every rank that every rank can address: what kernels with signals of their own work in."""

from __future__ import annotations

import weakref

import torch

from .collectives import barrier
from .group import ParallelGroup
from .symmetric_memory import SymmetricMemory


class SymmetricRegion:
    """`nbytes` bytes on every rank, all zero when made. Construction is collective over `group`.

    Args:
        group: whose ranks take part; of more than one rank, it needs shared memory (`group.provider`).
        nbytes: of every rank's part, equal on all ranks.

    Attributes:
        local: [nbytes] uint8, this rank's part, aligned to a page (with one rank, to 64 bytes).
        parts: of every rank, as this one sees them.
        addresses: of the part of every rank, in this process.
        multicast: 0; memory of a host has no address that stands for all parts.

    Raises:
        UnsupportedError: the group has no shared memory, or it has no room for the region.
    """

    multicast = 0

    def __init__(self, group: ParallelGroup, nbytes: int) -> None:
        self._group, self.nbytes = weakref.ref(group), nbytes  # a group keeps regions, not they it
        self._memory: SymmetricMemory | None = None
        if group.size == 1:
            self.local = torch.zeros(nbytes, dtype=torch.uint8)
            self.parts, self.addresses = [self.local], [self.local.data_ptr()]
            return
        capacity = max(nbytes, 64 * group.size)  # as small as a window may be
        self._memory = group.new_memory(capacity=capacity, buffers=1)
        slot = self._memory.slots[0]
        self.parts = [slot.view(rank, 0, (nbytes,), torch.uint8) for rank in range(group.size)]
        self.local = self.parts[group.rank]
        self.addresses = [part.data_ptr() for part in self.parts]

    def settle(self) -> None:
        """Return when every rank has come here: what it wrote to its part before is there."""
        group = self._group()
        assert group is not None  # who settles has it
        barrier(group)

    def close(self) -> None:
        """Leave in order. `local` stays valid; the peers' kernels must not run any more."""
        if self._memory is not None:
            self._memory.close()
