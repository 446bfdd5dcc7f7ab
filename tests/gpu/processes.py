"""Kernels between processes that share one device, through the package's CUDA region.

Their contexts take turns on the device, so every wait lasts a time slice: few calls, small shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from tests.gpu.runner import Check
from tests.gpu.table import DTYPES, KERNELS, draw, faults, on_device
from tp_kernels import ParallelGroup, Ranks, UnsupportedError
from tp_kernels.comm.cuda_region import CudaRegion
from tp_kernels.comm.devices import OVERLAP
from tp_kernels.comm.symmetric_region import SymmetricRegion
from tp_kernels.kernels import Workspace, WorkspaceShape
from tp_kernels.kernels._signals import SIGNAL_BYTES

WORLD = 2
DEVICE = "cuda:0"


def checks() -> Iterator[Check]:
    names = [name for name, kernel in KERNELS.items() if not kernel.repeats]
    yield Check("processes, all kernels", partial(between_processes, names), 120)
    yield Check("processes without leave to share a device", refused, 60)


def between_processes(names: list[str]) -> dict[str, Any]:
    with Ranks(WORLD, timeout=100.0, env={OVERLAP: "1"}) as ranks:
        by_rank = ranks.run(exchange, names, list(DTYPES), DEVICE)
    found = [f"rank {rank}: {line}" for rank, lines in enumerate(by_rank) for line in lines]
    assert not found, "\n".join(found)
    return {"world": WORLD, "kernels": names}


def refused() -> dict[str, str]:
    with Ranks(WORLD, env={OVERLAP: "0"}) as ranks:
        messages = ranks.run(refusal)
    assert all(OVERLAP in message for message in messages), messages
    return {"message": messages[0]}


def refusal() -> str:
    """What a rank is told that must not share its device."""
    with ParallelGroup(timeout=60, provider="none") as group:
        try:
            CudaRegion(group, 4096, DEVICE)
        except UnsupportedError as error:
            return str(error)
    return "not refused"


def exchange(
    names: list[str], dtypes: list[str], device: str, shapes: int | None = None, channels: int = 4
) -> list[str]:
    """Body of a rank: every kernel in every dtype on its first `shapes` small shapes; what was wrong."""
    found = []
    with ParallelGroup(timeout=60) as group:
        for name in names:
            for dtype in dtypes:
                given = KERNELS[name].small[:shapes]
                for seed, shape in enumerate(given):
                    call = one_call(group, name, shape, dtype, seed, device, channels)
                    found += [f"{name} {dtype} {shape}: {fault}" for fault in call]
    return found


def one_call(
    group: ParallelGroup, name: str, shape: Any, dtype: str, seed: int, device: str, channels: int
) -> list[str]:
    """A kernel three times in a workspace of its own; what was wrong on this rank."""
    kernel, size = KERNELS[name], WorkspaceShape(group.size, channels, KERNELS[name].chunk)
    gpu = device != "cpu"
    region = CudaRegion(group, size.nbytes, device) if gpu else SymmetricRegion(group, size.nbytes)
    try:
        region.local.view(channels, size.stride)[:, SIGNAL_BYTES.value :] = 0xFF
        operands = draw(kernel, group.size, shape, DTYPES[dtype], seed)
        mine = on_device(operands[group.rank], device)
        if gpu:  # compile and load before anybody waits: this workspace has failed already
            idle = Workspace(size, group.rank, region.local, region.addresses)
            idle.record.fill_(2)
            kernel.call(idle, mine)
        workspace = Workspace(size, group.rank, region.local, region.addresses, timeout=30)
        region.settle()
        for _ in range(3):
            results = kernel.call(workspace, mine)
        workspace.check()
        found = faults(kernel, {group.rank: results}, kernel.answers(operands))
        region.settle()  # nobody lets go of what a peer's kernel uses
        return found
    finally:
        region.close()
