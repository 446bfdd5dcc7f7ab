"""Whether ranks have cores to spare for communication, decided from affinity masks."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cores:
    """The cores a rank may run on, and the threads its products use."""

    cpus: frozenset[int]
    threads: int

    @classmethod
    def current(cls) -> Cores:
        return cls(frozenset(os.sched_getaffinity(0)), torch.get_num_threads())

    def to_json(self) -> str:
        return json.dumps({"cpus": sorted(self.cpus), "threads": self.threads})

    @classmethod
    def from_json(cls, text: str | bytes) -> Cores:
        fields = json.loads(text)
        return cls(frozenset(fields["cpus"]), fields["threads"])


def spare_cores(ranks: Sequence[Cores]) -> tuple[bool, str]:
    """Is there a core left for a communication thread of every rank of a host? And why (not).

    Ranks whose masks touch share their cores; each of them wants one more than its threads.
    """
    for rank, mine in enumerate(ranks):
        sharing = [other for other in ranks if other.cpus & mine.cpus]
        cores = len(frozenset[int]().union(*(other.cpus for other in sharing)))
        busy = sum(other.threads for other in sharing)
        reason = f"{cores} cores for {busy} compute threads of {_these(sharing, ranks, rank)}"
        if cores < busy + len(sharing) or len(mine.cpus) <= mine.threads:
            return False, reason
    return True, reason


def _these(sharing: Sequence[Cores], ranks: Sequence[Cores], rank: int) -> str:
    if len(sharing) == len(ranks):
        return "all ranks"
    return f"rank {rank}" if len(sharing) == 1 else f"{len(sharing)} ranks, rank {rank} among them"
