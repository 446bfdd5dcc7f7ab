"""Whether a rank has a core to spare for communication, decided from affinity masks."""

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


def spare_core(ranks: Sequence[Cores], rank: int) -> tuple[bool, str]:
    """Is a core left for a communication thread of `rank`, all ranks being on one host? And why.

    Ranks whose masks touch share their cores; each of them may want a communication thread.
    """
    mine = ranks[rank]
    sharing = [other for other in ranks if other.cpus & mine.cpus]
    cores = len(frozenset().union(*(other.cpus for other in sharing)))
    busy = sum(other.threads for other in sharing)
    needed = busy + len(sharing)
    reason = f"{cores} cores for {len(sharing)} ranks with {busy} compute threads"
    return cores >= needed and len(mine.cpus) > mine.threads, reason
