"""As symmetric_region.py, in the memory of GPUs, by torch's symmetric memory.

Limits: CUDA, one host, at most MOST_RANKS ranks; every rank's device reaches those of all others. Where that
does not hold, `cuda_obstacle` says why (devices.py).

Two ranks on one device are refused, as by torch, unless TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 is set.
This is for tests: their kernels take turns, so a wait lasts a time slice, and torch maps no multicast.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .collectives import barrier
from .devices import DeviceIdentity, cuda_obstacle
from .errors import ShapeError, UnsupportedError
from .group import ParallelGroup


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
        parts: of every rank, as this one reaches them.
        addresses: of the part of every rank, as this rank's kernels reach them.
        multicast: an address that stands for the parts of all ranks at once, or 0.

    Raises:
        ShapeError: the ranks ask for different sizes.
        UnsupportedError: `cuda_obstacle` has found one, a rank has no room for the region, or torch cannot
            map it. What breaks inside torch on one rank, the others notice when torch's store gives up.
    """

    def __init__(self, group: ParallelGroup, nbytes: int, device: torch.device | str) -> None:
        self._group = weakref.ref(group)  # a group keeps regions, not they it
        self.nbytes, self.multicast = nbytes, 0
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
            self._share(group)
            return
        self.local = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        self.parts, self.addresses = [self.local], [self.local.data_ptr()]

    def _share(self, group: ParallelGroup) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

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
        self._raise_alike(group, corner.exchange("allocated", error))
        try:
            handle = symmetric_memory.rendezvous(self.local, group.process_group.group_name)
            # Where torch takes the part from a larger allocation, every rank's is at the same place in it.
            offset = self.local.data_ptr() - handle.buffer_ptrs[group.rank]
            self.addresses = [address + offset for address in handle.buffer_ptrs]
            self.multicast = handle.multicast_ptr
            self._handle = handle
            if 0 in handle.buffer_ptrs:
                error = f"the device of rank {handle.buffer_ptrs.index(0)} cannot be addressed"
            else:
                self.parts = [
                    handle.get_buffer(rank, (self.nbytes,), torch.uint8, offset)
                    for rank in range(group.size)
                ]
        except RuntimeError as failure:
            error = str(failure).splitlines()[0]
        self._raise_alike(group, corner.exchange("mapped", error))

    def _raise_alike(self, group: ParallelGroup, errors: Sequence[str]) -> None:
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
        if failed:
            raise UnsupportedError(
                f"CUDA region of {self.nbytes} bytes on rank {group.rank}: {'; '.join(failed)}"
            )

    def settle(self) -> None:
        """Return when every rank has come here and what it had given its device to do is done."""
        torch.cuda.synchronize(self.device)
        group = self._group()
        assert group is not None  # who settles has it
        barrier(group)

    def close(self) -> None:
        """Let go of the peers' parts; they are unmapped with `local`. No kernel of any rank may still run."""
        self.parts, self.addresses, self.multicast, self._handle = [], [], 0, None
