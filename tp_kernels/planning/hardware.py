"""What a measured time belongs to: the device, and the software that made the kernel."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
import triton

from tp_kernels import __version__
from tp_kernels.comm.errors import GroupMismatchError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.objects import all_gather_object
from tp_kernels.kernels._gemm import TILINGS

INTERPRETED = 0  # in place of a compute capability


@dataclass(frozen=True, order=True)
class Hardware:
    """Times of one are nothing to another.

    Args:
        device: as its driver names it.
        capability: of compute, 89 for 8.9; `INTERPRETED` for the Triton interpreter, whose times say
            nothing about a GPU.
        triton, package: versions of Triton and of tp_kernels.
    """

    device: str
    capability: int
    triton: str = triton.__version__
    package: str = __version__

    @staticmethod
    def of(device: torch.device) -> Hardware:
        """Of a CUDA device, or of the interpreter for "cpu"."""
        if device.type == "cpu":
            return Hardware("Triton interpreter", INTERPRETED)
        major, minor = torch.cuda.get_device_capability(device)
        return Hardware(torch.cuda.get_device_name(device), 10 * major + minor)

    @property
    def architecture(self) -> str:
        """ "sm_90", or "interpreter"."""
        return f"sm_{self.capability}" if self.capability else "interpreter"

    @property
    def family(self) -> int:
        """Whose tilings it takes, as `choose` in kernels/_gemm.py; INTERPRETED is a family of its own."""
        major = self.capability // 10 * 10
        known = {architecture for architecture, _, _ in TILINGS}
        return major if major in known or self.capability == INTERPRETED else 80

    def __str__(self) -> str:
        return (
            f"{self.device} ({self.architecture}), Triton {self.triton}, tp_kernels {self.package}"
        )


def agreed(hardware: Hardware, group: ParallelGroup) -> Hardware:
    """`hardware`, after every rank of `group` has shown the same. Collective.

    Raises:
        GroupMismatchError: ranks differ, on every rank.
    """
    found = all_gather_object(list(astuple(hardware)), group)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise GroupMismatchError(
                f"rank {group.rank}: one table of tilings serves ranks with equal devices and "
                f"versions; rank 0 has {Hardware(*found[0])}, rank {rank} {Hardware(*other)}"
            )
    return hardware
