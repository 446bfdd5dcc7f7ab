"""Everything that `make gpu-check` runs, in order."""

from __future__ import annotations

import torch

from tests.gpu import correctness, processes, times
from tests.gpu.runner import Check


def collect() -> list[Check]:
    """All checks; needs no device."""
    return [*correctness.checks(), *processes.checks(), *times.checks()]


def healthy() -> bool:
    """Whether the device of this process still works."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
