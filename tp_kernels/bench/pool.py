"""Contestants that run in ranks of this package: `Ranks` pools, and the side that runs in a rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from tp_kernels.comm import ParallelGroup, Ranks, barrier

from .slices import Work, timed_calls
from .timing import RankSlice

Case = Mapping[str, Any]

# build(group, case) -> Work, or why there is none; a function at the top of a module.
Builder = Callable[[ParallelGroup, Case], "Work | str"]


class Pool:
    """Rank processes with one ParallelGroup, shared by the contestants that run in them."""

    def __init__(self, ranks: Ranks, *, bind: bool = True) -> None:
        self.ranks = ranks
        ranks.run(set_up, bind, ranks.threads)

    def contestant(self, name: str, build: Builder, *, ours: bool = True) -> PoolContestant:
        return PoolContestant(self, name, build, ours)


class PoolContestant:
    """One way to do the work, in the ranks of a pool."""

    def __init__(self, pool: Pool, name: str, build: Builder, ours: bool) -> None:
        self.name = name
        self.ours = ours
        self._ranks = pool.ranks
        self._build = build

    def prepare(self, case: Case) -> str | None:
        return self._ranks.run(prepare, self.name, self._build, dict(case))[0]

    def slice(self, calls: int, warm: int, check: bool) -> list[RankSlice]:
        return self._ranks.run(run_slice, self.name, calls, warm, check)

    def finish(self) -> None:
        self._ranks.run(finish, self.name)


def cores_of(rank: int, threads: int, usable: list[int]) -> set[int]:
    """Cores of a rank: its own as long as there are enough, then shared evenly."""
    return {usable[(rank * threads + thread) % len(usable)] for thread in range(threads)}


# In a rank. It was started for one measurement and keeps that until it ends.
_group: ParallelGroup | None = None
_works: dict[str, Work] = {}


def set_up(bind: bool, threads: int) -> None:
    global _group
    if bind:
        # Threads that torch starts later inherit this.
        rank = int(os.environ["RANK"])
        os.sched_setaffinity(0, cores_of(rank, threads, sorted(os.sched_getaffinity(0))))
    torch.manual_seed(0)
    _group = ParallelGroup()


def group_of_rank() -> ParallelGroup:
    """The group of the pool, in one of its ranks."""
    assert _group is not None
    return _group


def prepare(name: str, build: Builder, case: Case) -> str | None:
    work = build(group_of_rank(), case)
    if isinstance(work, str):
        return work
    _works[name] = work
    return None


def run_slice(name: str, calls: int, warm: int, check: bool) -> RankSlice:
    work = _works[name]
    seconds = timed_calls(work, calls, warm, partial(barrier, group_of_rank()))
    return RankSlice(seconds, work.check() if check else None)


def finish(name: str) -> None:
    _works.pop(name, None)
