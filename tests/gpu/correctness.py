"""Checks of every kernel on virtual ranks: several ranks on the one device, in one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.gpu.entry import Kernel, Operands, draw, each, faults, on_device, tensors
from tests.gpu.runner import Check
from tests.gpu.table import ALL_KERNELS, DTYPES
from tp_kernels import CollectiveTimeoutError
from tp_kernels.kernels import Workspace
from tp_kernels.kernels._signals import RECORD, SIGNAL_BYTES
from tp_kernels.kernels.virtual_ranks import VirtualRanks

DEVICE = "cuda"
WORLDS = (2, 4, 8)
# Channels: so few that a call takes many rounds of each, and as many as there can be.
FEW_AND_MANY = (2, None)
# Of a captured graph: how often it is replayed, on how many different inputs, and how often looked at.
REPLAYS, INPUTS, EVERY = 1000, 4, 49
# Cycles that a late rank sleeps, about half a millisecond.
LATE = 1_000_000


def checks() -> Iterator[Check]:
    for world in WORLDS:
        for name, kernel in ALL_KERNELS.items():
            if kernel.repeats and world > WORLDS[0]:
                continue
            for dtype in DTYPES:
                if dtype == "fp16" and world > WORLDS[0]:
                    continue  # only its conversions differ from bf16, and all would take too long to compile
                what = (name, world, dtype)
                yield Check(
                    f"virtual {name} W={world} {dtype}",
                    partial(virtual, *what),
                    prepare=partial(compile_virtual, *what),
                )
    single = [name for name, kernel in ALL_KERNELS.items() if not kernel.repeats]
    for name in single:
        for world in (2, 4):
            yield Check(f"graph {name} W={world}", partial(graph, name, world))
    for name in single:
        yield Check(f"absent rank {name}", partial(absent, name), 30)
    yield Check("epochs wrap", wrap, 30)


def new_ranks(kernel: Kernel, world: int, **options: Any) -> VirtualRanks:
    """Ranks whose buffers are full of NaN; signals stay zero."""
    ranks = VirtualRanks(world, DEVICE, chunk=kernel.chunk, depth=kernel.depth, **options)
    poison(ranks.workspaces)
    return ranks


def poison(workspaces: list[Workspace]) -> None:
    for workspace in workspaces:
        shape = workspace.shape
        memory = workspace.local[: shape.nbytes].view(shape.channels, shape.stride)
        memory[:, SIGNAL_BYTES.value :] = 0xFF


def virtual(name: str, world: int, dtype: str) -> None:
    """All shapes in a row without a host between them, first in few channels, then in many."""
    row = Row.of(name, world, dtype)
    for channels in FEW_AND_MANY:
        row.check(new_ranks(row.kernel, world, channels=channels))


def compile_virtual(name: str, world: int, dtype: str) -> None:
    """What `virtual` needs, without an effect."""
    row = Row.of(name, world, dtype)
    for channels in FEW_AND_MANY:
        row.rehearse(new_ranks(row.kernel, world, channels=channels))


@dataclass
class Row:
    """Calls of a kernel, one for each of its shapes: operands of all ranks, here and on the device."""

    kernel: Kernel
    given: list[list[Operands]]
    moved: list[list[SimpleNamespace]]

    @classmethod
    def of(cls, name: str, world: int, dtype: str) -> Row:
        kernel = ALL_KERNELS[name]
        given = [
            draw(kernel, world, shape, DTYPES[dtype], seed)
            for seed, shape in enumerate(kernel.shapes)
        ]
        return cls(kernel, given, [[on_device(one, DEVICE) for one in row] for row in given])

    def rehearse(self, ranks: VirtualRanks) -> None:
        for one in itertools.chain(*self.moved):
            if one.out is not None:
                one.out.fill_(torch.nan)  # what the row before has left would pass for results
        held = [ranks.rehearse(partial(self.call, operands, -1)) for operands in self.moved]
        del held  # memory for all results, until they are wanted at the same time

    def check(self, ranks: VirtualRanks) -> None:
        """Call in turn; another rank is late for each."""
        self.rehearse(ranks)
        results = [
            ranks.launch(partial(self.call, operands, seed % ranks.shape.world))
            for seed, operands in enumerate(self.moved)
        ]
        ranks.check()
        found = [
            f"{shape}: {fault}"
            for shape, operands, result in zip(self.kernel.shapes, self.given, results, strict=True)
            for fault in faults(self.kernel, dict(enumerate(result)), self.kernel.answers(operands))
        ]
        assert not found, "\n".join(found)

    def call(
        self, operands: list[SimpleNamespace], late: int, rank: int, workspace: Workspace
    ) -> tuple[Tensor, ...]:
        if rank == late:
            torch.cuda._sleep(LATE)
        return self.kernel.call(workspace, operands[rank])


def graph(name: str, world: int) -> dict[str, int]:
    """A captured call of every rank, replayed on changing inputs."""
    kernel, dtype = ALL_KERNELS[name], DTYPES["bf16"]
    shape = kernel.small[-1]
    given = [varied(draw(kernel, world, shape, dtype, 1), turn) for turn in range(INPUTS)]
    answers = [kernel.answers(operands) for operands in given]
    sources = [[on_device(one, DEVICE) for one in operands] for operands in given]
    ranks = new_ranks(kernel, world)
    static = [on_device(one, ranks.device) for one in given[0]]
    results = ranks.run(lambda rank, ws: kernel.call(ws, static[rank]))
    found = faults(kernel, dict(enumerate(results)), answers[0])
    assert not found, "before any graph: " + "\n".join(found)
    graphs, results = [], []
    for rank, (workspace, stream) in enumerate(zip(ranks.workspaces, ranks.streams, strict=True)):
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            results.append(kernel.call(workspace, static[rank]))
        graphs.append(captured)
    with ranks.muted():  # the first launch of a graph may allocate
        replay_all(ranks, graphs)
    compared = 0
    for replay in range(REPLAYS):
        turn = replay % INPUTS
        for rank, stream in enumerate(ranks.streams):
            with torch.cuda.stream(stream):
                copy_into(static[rank], sources[turn][rank])
                graphs[rank].replay()
        if replay % EVERY == 0 or replay >= REPLAYS - INPUTS:
            ranks.check()
            found = faults(kernel, dict(enumerate(results)), answers[turn])
            assert not found, f"replay {replay}: " + "\n".join(found)
            compared += 1
    return {"replays": REPLAYS, "compared": compared}


def replay_all(ranks: VirtualRanks, graphs: list[torch.cuda.CUDAGraph]) -> None:
    for stream, captured in zip(ranks.streams, graphs, strict=True):
        with torch.cuda.stream(stream):
            captured.replay()


def varied(operands: list[Operands], turn: int) -> list[Operands]:
    """As `operands`, with x of every rank scaled, which is exact."""
    factor = (1.0, -1.0, 2.0, 0.5)[turn % INPUTS]
    return [one | {"x": each(lambda x: x * factor, one["x"])} for one in operands]


def copy_into(static: SimpleNamespace, source: SimpleNamespace) -> None:
    for name, value in vars(source).items():
        if name != "out":
            for own, new in zip(tensors(getattr(static, name)), tensors(value), strict=True):
                own.copy_(new)


def absent(name: str) -> dict[str, Any]:
    """Only rank 0 calls: its kernel gives up in time, and says for whom it waited."""
    kernel = ALL_KERNELS[name]
    ranks = new_ranks(kernel, 2, timeout=0.5)
    operands = draw(kernel, 2, kernel.small[0], torch.float32, 1)
    mine = on_device(operands[0], ranks.device)
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
        ranks = new_ranks(ALL_KERNELS[name], 2, channels=2, epoch=2**31 - 3)
        Row.of(name, 2, "fp32").check(ranks)
