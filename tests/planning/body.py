"""What ranks do in the tests of the tuner and its table. Every function runs in each rank of a world."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.oracle import digest
from tp_kernels import ParallelGroup, PeerLostError, TpKernelsError
from tp_kernels.kernels._gemm import INTERPRETER, Tiling
from tp_kernels.planning import (
    Entry,
    Hardware,
    Limits,
    Product,
    ShapeClass,
    Tuned,
    cache,
    candidates,
    load,
    products,
    save,
    tune,
    tune_product,
    tuner,
)

CHOICES = tuple(replace(INTERPRETER, group=group) for group in (1, 2, 3, 4))
OTHER_STEPS = (INTERPRETER, replace(INTERPRETER, block_k=32))  # along K
QUICK = Limits(rounds=3, turn=1e-9)  # one call a turn
STEADY = [[4.0, 3.0, 2.0, 1.0]] * 2  # the last candidate is the fastest


class Leaves(BaseException):
    """What no tuner may handle."""


@dataclass
class Fake:
    """A subject whose times and faults are given, by rank and candidate.

    Args:
        times: [rank][candidate] seconds of each call in turn.
        faults: (what, rank, candidate), what of "prepare", "digest", "bits", "seconds", "fourth" (of
            the calls for seconds), "leaves" (in the second one); or ("ready", rank, number of the call).
    """

    rank: int
    times: Any
    faults: tuple[tuple[str, int, int], ...] = ()
    log: list[tuple[str, int]] = field(default_factory=list)
    calls: dict[int, int] = field(default_factory=dict)
    last: int = -1
    met: int = -1

    def _note(self, what: str, tiling: Tiling) -> int:
        index = CHOICES.index(tiling)
        self.log.append((what, index))
        self.last = index
        if (what, self.rank, index) in self.faults:
            raise RuntimeError(f"no {what} of {index}")
        return index

    def prepare(self, tiling: Tiling) -> None:
        self._note("prepare", tiling)

    def digest(self, tiling: Tiling) -> str:
        index = self._note("digest", tiling)
        return "other" if ("bits", self.rank, index) in self.faults else f"of rank {self.rank}"

    def ready(self) -> None:
        self.met += 1
        if ("ready", self.rank, self.met) in self.faults:
            raise RuntimeError("not ready")

    def seconds(self, tiling: Tiling) -> float:
        index = self._note("seconds", tiling)
        given = self.times[self.rank][index]
        call = self.calls[index] = self.calls.get(index, -1) + 1
        if call == 1 and ("leaves", self.rank, index) in self.faults:
            raise Leaves
        if call == 3 and ("fourth", self.rank, index) in self.faults:
            raise RuntimeError("no fourth call")
        return given[call % len(given)] if isinstance(given, list) else given

    def recover(self) -> None:
        self.log.append(("recover", self.last))


def fake_tune(
    times: Any,
    faults: tuple[tuple[str, int, int], ...] = (),
    limits: Limits = QUICK,
    choices: Any = CHOICES,
    clock: Callable[[int], list[float]] | None = None,
) -> dict[str, Any]:
    """What a rank found, or the error, and what it ran. choices may be given by rank."""
    with ParallelGroup(timeout=20) as group:
        fake = Fake(group.rank, times, faults)
        steps: list[tuple[str, int, int]] = []
        mine = choices[group.rank] if isinstance(choices, list) else choices
        ticks = iter(clock(group.rank)) if clock is not None else None
        try:
            with mock.patch.object(
                tuner, "perf_counter", ticks.__next__ if ticks is not None else tuner.perf_counter
            ):
                tuned = tune(group, mine, fake, limits, lambda *step: steps.append(step))
        except TpKernelsError as error:
            if not isinstance(error, PeerLostError):  # the ranks are still together
                assert load(group, torch.device("cpu"), Path("/nonexistent")).tilings == {}
            return {"error": type(error).__name__, "message": str(error), "log": fake.log}
        counts = {timing.calls for timing in tuned.timings.values()}
        return {"tuned": plain(tuned), "log": fake.log, "steps": steps, "calls": counts}


class Punctual(Fake):
    """Notes whether all ranks were ready when a call began; rank 1 never hurries."""

    def __init__(self, group: ParallelGroup) -> None:
        super().__init__(group.rank, STEADY)
        assert group.rendezvous is not None
        self.corner, self.size = group.rendezvous.corner("punctual"), group.size
        self.punctual: list[bool] = []

    def ready(self) -> None:
        super().ready()
        time.sleep(0.01 * self.rank)
        self.corner.put(f"{self.met}/{self.rank}", "")

    def seconds(self, tiling: Tiling) -> float:
        self.punctual.append(all(self.corner.has(f"{self.met}/{r}") for r in range(self.size)))
        return super().seconds(tiling)


def meetings() -> list[bool]:
    with ParallelGroup(timeout=20) as group:
        fake = Punctual(group)
        tune(group, CHOICES, fake, QUICK)
        return fake.punctual


def plain(tuned: Tuned) -> tuple[int, dict[int, float], dict[int, str]]:
    """Candidates by number: the winner, medians, reasons."""
    return (
        CHOICES.index(tuned.winner),
        {CHOICES.index(tiling): timing.median for tiling, timing in tuned.timings.items()},
        {CHOICES.index(tiling): why for tiling, why in tuned.dropped.items()},
    )


def fast_clock(rank: int) -> list[float]:
    """Of a rank 1 whose time flies."""
    return [0.01 * rank * step for step in range(1000)]


def loaded(
    paths: list[Path], devices: list[Hardware] | None = None
) -> tuple[dict[ShapeClass, Tiling], tuple[str, ...]]:
    """Tilings and notes of a rank that looks for them at a path of its own, on a device of its own."""
    with ParallelGroup(timeout=20) as group:
        hardware = devices[group.rank] if devices else Hardware.of(torch.device("cpu"))
        with mock.patch.object(Hardware, "of", staticmethod(lambda device: hardware)):
            table = load(group, torch.device("cpu"), paths[group.rank])
        return dict(table.tilings), table.notes


def saved(paths: list[Path], entries: dict[ShapeClass, Entry]) -> str:
    """What `save` says, or its error."""
    with ParallelGroup(timeout=20) as group:
        try:
            return save(group, Hardware.of(torch.device("cpu")), entries, paths[group.rank])
        except TpKernelsError as error:
            return str(error)


def write_many(path: Path, hardware: Hardware, entry: Entry, count: int) -> list[str]:
    """Rank r adds `count` entries, one by one, and reads after each; what went wrong."""
    rank = torch.distributed.get_rank()
    problems = []
    for index in range(count):
        torch.distributed.barrier()
        shape = ShapeClass("linear_all_reduce", 1, 2, 2 + rank, 1 << index, 1, 1)
        problems.append(cache.add(path, hardware, {shape: entry}))
        tables, problem = cache.read(path)
        problems += [problem, "" if shape in tables[hardware] else f"{shape} is lost"]
    return [problem for problem in problems if problem]


# In the interpreter.


def digests(product: Product, choices: tuple[Tiling, ...]) -> list[str]:
    """Of the result of this rank with every one of `choices`."""
    with ParallelGroup(timeout=30) as group:
        subject = products.ProductSubject(group, product, torch.device("cpu"), choices)
        try:
            return [subject.digest(tiling) for tiling in choices]
        finally:
            subject.close()


def end_to_end(product: Product, path: Path) -> tuple[Tiling, Tiling | None, int]:
    """Tune, store, load, and compute with the tiling of the table: the bits of the built-in choice."""
    from tp_kernels.comm.symmetric_region import SymmetricRegion
    from tp_kernels.kernels import linear_all_reduce
    from tp_kernels.kernels.workspace import Workspace

    device = torch.device("cpu")
    with ParallelGroup(timeout=30) as group:
        shape = product.shape_class(group.size)
        hardware = Hardware.of(device)
        choices = candidates(hardware, shape)
        tuned = tune_product(group, product, device, Limits(rounds=1, turn=1e-9))
        assert not tuned.dropped, tuned.dropped
        save(group, hardware, {shape: products.entry(product, tuned, choices[0])}, path)
        table = load(group, device, path)
        tiling = table.tiling(
            product.operation, product.rows, product.n, product.k, product.dtype, group.size
        )
        workspace_shape = products.workspace_shape(choices, product.dtype, group.size)
        region = SymmetricRegion(group, workspace_shape.nbytes)
        workspace = Workspace(workspace_shape, group.rank, region.local, region.addresses)
        region.settle()
        (x, w), _, _ = products.arguments(product, group.rank, group.size, device)
        results = {digest(linear_all_reduce(x, w, workspace, tiling=one)) for one in (tiling, None)}
        region.settle()
        region.close()
        return tuned.winner, tiling, len(results)


def broken_call(product: Product) -> tuple[list[str], bool]:
    """Rank 1 misses one call: both ranks drop that candidate and go on with a new workspace."""
    with ParallelGroup(timeout=30) as group:
        choices = candidates(Hardware.of(torch.device("cpu")), product.shape_class(group.size))
        subject = products.ProductSubject(group, product, torch.device("cpu"), choices, timeout=0.5)
        real = subject.digest

        def digest(tiling: Tiling) -> str:
            if group.rank == 1 and tiling == choices[1]:
                raise RuntimeError("out of luck")
            return real(tiling)

        with mock.patch.object(subject, "digest", digest):
            try:
                tuned = tune(group, choices, subject, Limits(rounds=1, turn=1e-9))
            finally:
                subject.close()
        return list(tuned.dropped.values()), choices[1] in tuned.timings
