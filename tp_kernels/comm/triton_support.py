"""Whether all ranks of a group can run Triton kernels, from what they told each other when it was made.

A rank alone must not decide: environments and devices may differ, and ranks that go different ways wait
for each other until the deadline.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec

import torch

# Of CUDA devices: the first with bfloat16 matrix units, as 10 * major + minor.
OLDEST_CAPABILITY = 80


@dataclass(frozen=True)
class TritonSupport:
    """What a rank tells its peers.

    missing: why Triton cannot be imported; None if it can.
    interpreted: kernels run in Triton's interpreter, on CPU tensors and no others (TRITON_INTERPRET).
    capability: of the current CUDA device, 10 * major + minor; None without one.
    """

    missing: str | None
    interpreted: bool
    capability: int | None

    @classmethod
    def current(cls) -> TritonSupport:
        if find_spec("triton") is None:
            return cls("not installed", False, None)
        capability = None
        if torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability()
            capability = 10 * major + minor
        if capability is None and "TRITON_INTERPRET" not in os.environ:
            return cls(None, False, None)  # no kernel can run: the import would only cost time
        try:
            knobs = importlib.import_module("triton.knobs")
        except ImportError as error:
            return cls(f"not importable ({error})", False, capability)
        return cls(None, bool(knobs.runtime.interpret), capability)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TritonSupport:
        return cls(**json.loads(text))

    def obstacle(self, device: str) -> str | None:
        """Why this rank cannot run kernels on tensors of this kind of device, or None when it can."""
        if self.missing:
            return f"triton is {self.missing}; pip install 'tp_kernels[triton]'"
        if device == "cpu":
            if self.interpreted:
                return None
            return (
                "CPU tensors need Triton's interpreter: set TRITON_INTERPRET=1 before Python starts"
            )
        if device != "cuda":
            return f"kernels run on CUDA devices, not {device}"
        if self.interpreted:
            return "TRITON_INTERPRET is set: kernels run on CPU tensors"
        if self.capability is None:
            return "no CUDA device"
        if self.capability < OLDEST_CAPABILITY:
            have, need = self.capability / 10, OLDEST_CAPABILITY / 10
            return f"compute capability {have}; kernels need {need} or higher"
        return None


def first_obstacle(ranks: Sequence[TritonSupport], device: str) -> str | None:
    """Why one of these ranks cannot run kernels on tensors of this kind of device, or None."""
    for rank, support in enumerate(ranks):
        obstacle = support.obstacle(device)
        if obstacle:
            return f"rank {rank}: {obstacle}"
    return None


def triton_obstacle(ranks: Sequence[TritonSupport], device: str) -> str | None:
    """As first_obstacle, of kernels that they run together."""
    obstacle = first_obstacle(ranks, device)
    if obstacle:
        return obstacle
    if device == "cuda":  # tiles, which the ranks exchange, are chosen by architecture
        architectures = [(support.capability or 0) // 10 for support in ranks]
        for rank, architecture in enumerate(architectures):
            if architecture != architectures[0]:
                return (
                    f"ranks 0 and {rank}: compute capabilities {architectures[0]}.x and {architecture}.x; "
                    "kernels need devices of one architecture"
                )
    return None
