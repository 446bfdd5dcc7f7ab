"""Everything that `make gpu-check` runs, in order."""

from __future__ import annotations

import torch

from tests.gpu import correctness, local, native, processes, signalled, times
from tests.gpu.runner import Check


def collect() -> list[Check]:
    """All checks; needs no device."""
    parts = (correctness, local, native, processes, signalled, times)
    return [check for part in parts for check in part.checks()]


def probe() -> None:
    """Raises if the device of this process does not work any more."""
    torch.cuda.synchronize()
