"""Everything that `make gpu-check` runs, in order."""

from __future__ import annotations

import torch

from tests.gpu import correctness, local, processes, times
from tests.gpu.runner import Check


def collect() -> list[Check]:
    """All checks; needs no device."""
    return [*correctness.checks(), *local.checks(), *processes.checks(), *times.checks()]


def probe() -> None:
    """Raises if the device of this process does not work any more."""
    torch.cuda.synchronize()
