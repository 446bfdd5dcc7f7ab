"""Checks of every kernel on virtual ranks: several ranks on the one device, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.gpu.runner import Check
from tests.gpu.table import DTYPES, KERNELS, Kernel, Operands, draw, faults, on_device
from tp_kernels import CollectiveTimeoutError
from tp_kernels.kernels import Workspace
from tp_kernels.kernels._signals import RECORD, SIGNAL_BYTES
from tp_kernels.kernels.virtual_ranks import VirtualRanks

DEVICE = "cuda"
WORLDS = (2, 4, 8)
# Of a captured graph: how often it is replayed, on how many different inputs, and how often looked at.
REPLAYS, INPUTS, EVERY = 1000, 4, 50
# Cycles that a late rank sleeps, about half a millisecond.
LATE = 1_000_000


def checks() -> Iterator[Check]:
    for world in WORLDS:
        for name in KERNELS:
            for dtype in DTYPES:
                run = partial(virtual, name, world, dtype)
                yield Check(f"virtual {name} W={world} {dtype}", run, 60)
    single = [name for name, kernel in KERNELS.items() if not kernel.repeats]
    for name in single:
        for world in (2, 4):
            yield Check(f"graph {name} W={world}", partial(graph, name, world), 60)
    for name in single:
        yield Check(f"absent rank {name}", partial(absent, name), 30)
    yield Check("epochs wrap", wrap, 30)


def new_ranks(kernel: Kernel, world: int, **options: Any) -> VirtualRanks:
    """Ranks whose buffers are full of NaN; signals stay zero."""
    ranks = VirtualRanks(world, DEVICE, chunk=kernel.chunk, **options)
    poison(ranks.workspaces)
    return ranks


def poison(workspaces: list[Workspace]) -> None:
    for workspace in workspaces:
        shape = workspace.shape
        memory = workspace.local[: shape.nbytes].view(shape.channels, shape.stride)
        memory[:, SIGNAL_BYTES.value :] = 0xFF


def virtual(name: str, world: int, dtype: str) -> None:
    """All shapes in a row without a host between them, first in few channels, then in many."""
    kernel = KERNELS[name]
    for channels in (2, None):
        ranks = new_ranks(kernel, world, channels=channels)
        row_of_calls(kernel, ranks, DTYPES[dtype])


def row_of_calls(kernel: Kernel, ranks: VirtualRanks, dtype: torch.dtype) -> None:
    world = ranks.shape.world
    given = [draw(kernel, world, shape, dtype, seed) for seed, shape in enumerate(kernel.shapes)]
    calls = [[on_device(one, ranks.device) for one in operands] for operands in given]
    torch.cuda.synchronize()
    held = [ranks.rehearse(lambda rank, ws, c=c: kernel.call(ws, c[rank])) for c in calls]
    del held  # memory for all results, until they are wanted at the same time

    def call(late: int, operands: list[SimpleNamespace], rank: int, ws: Workspace) -> Any:
        if rank == late:
            torch.cuda._sleep(LATE)
        return kernel.call(ws, operands[rank])

    results = [
        ranks.launch(partial(call, seed % world, operands)) for seed, operands in enumerate(calls)
    ]
    ranks.check()
    found = [
        f"{shape}: {fault}"
        for shape, operands, result in zip(kernel.shapes, given, results, strict=True)
        for fault in faults(kernel, dict(enumerate(result)), operands)
    ]
    assert not found, "\n".join(found)


def graph(name: str, world: int) -> dict[str, int]:
    """A captured call of every rank, replayed on changing inputs."""
    kernel, dtype = KERNELS[name], DTYPES["bf16"]
    shape = kernel.small[-1]
    given = [varied(draw(kernel, world, shape, dtype, 1), turn) for turn in range(INPUTS)]
    sources = [[on_device(one, DEVICE) for one in operands] for operands in given]
    ranks = new_ranks(kernel, world)
    static = [on_device(one, ranks.device) for one in given[0]]
    torch.cuda.synchronize()
    ranks.rehearse(lambda rank, ws: kernel.call(ws, static[rank]))
    graphs, results = [], []
    for rank, (workspace, stream) in enumerate(zip(ranks.workspaces, ranks.streams, strict=True)):
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            results.append(kernel.call(workspace, static[rank]))
        graphs.append(captured)
    compared = 0
    for replay in range(REPLAYS):
        turn = replay % INPUTS
        for rank, stream in enumerate(ranks.streams):
            with torch.cuda.stream(stream):
                copy_into(static[rank], sources[turn][rank])
                graphs[rank].replay()
        if replay % EVERY == 0 or replay >= REPLAYS - INPUTS:
            ranks.check()
            found = faults(kernel, dict(enumerate(results)), given[turn])
            assert not found, f"replay {replay}: " + "\n".join(found)
            compared += 1
    return {"replays": REPLAYS, "compared": compared}


def varied(operands: list[Operands], turn: int) -> list[Operands]:
    """As `operands`, with x of every rank scaled, which is exact."""
    factor = (1.0, -1.0, 2.0, 0.5)[turn % INPUTS]
    return [one | {"x": one["x"] * factor} for one in operands]


def copy_into(static: SimpleNamespace, source: SimpleNamespace) -> None:
    for name, value in vars(source).items():
        if isinstance(value, Tensor) and name != "out":
            getattr(static, name).copy_(value)


def absent(name: str) -> dict[str, Any]:
    """Only rank 0 calls: its kernel gives up in time, and says for whom it waited."""
    kernel = KERNELS[name]
    ranks = new_ranks(kernel, 2, timeout=0.5)
    operands = draw(kernel, 2, kernel.small[0], torch.float32, 1)
    mine = on_device(operands[0], ranks.device)
    torch.cuda.synchronize()
    ranks.rehearse(lambda rank, ws: kernel.call(ws, mine) if rank == 0 else ())
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(ranks.streams[0]):
        begin.record()
        kernel.call(ranks.workspaces[0], mine)
        end.record()
    torch.cuda.synchronize()
    waited = begin.elapsed_time(end) / 1e3
    record = dict(zip(RECORD, ranks.workspaces[0].record.tolist(), strict=True))
    assert record["state"] == 2 and (record["rank"], record["peer"]) == (0, 1), record
    assert 0.4 < waited < 2.0, f"gave up after {waited:.3f} s instead of 0.5 s"
    try:
        ranks.check()
    except CollectiveTimeoutError as error:
        return {"seconds": round(waited, 3), "message": str(error)}
    raise AssertionError("check() has not raised")


def wrap() -> None:
    """Counters that pass the largest int32."""
    for name in ("all_reduce_2", "all_gather"):
        ranks = new_ranks(KERNELS[name], 2, channels=2, epoch=2**31 - 3)
        row_of_calls(KERNELS[name], ranks, torch.float32)
