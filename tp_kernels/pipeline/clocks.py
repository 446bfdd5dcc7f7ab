"""How much the clocks of several hosts differ."""

from __future__ import annotations

import platform
from pathlib import Path
from time import perf_counter

from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.objects import all_gather_object

_ROUNDS = 9


def clock_offsets(group: ParallelGroup) -> list[float]:
    """Seconds by which `time.perf_counter` of every rank is ahead of that of rank 0; all ranks call.

    Ranks that share a kernel share the clock: exactly zero. Else, as NTP does it, every rank notes its time
    before and after an exchange that ends for all at about the same time; of several rounds, the one
    with the shortest exchange of both ranks counts. The error is below the time of that exchange.
    """
    if len(set(all_gather_object(_kernel(), group))) == 1:
        return [0.0] * group.size
    rounds: list[list[tuple[float, float]]] = []
    for _ in range(_ROUNDS):
        all_gather_object(None, group)  # so that all begin together
        before = perf_counter()
        all_gather_object(None, group)
        rounds.append(all_gather_object((before, perf_counter()), group))
    return offsets_of(rounds)


def offsets_of(rounds: list[list[tuple[float, float]]]) -> list[float]:
    """Offsets to rank 0 from (before, after) an exchange of every rank in several rounds."""
    offsets = []
    for rank in range(len(rounds[0])):
        best = min(
            rounds, key=lambda times: max(end - start for start, end in (times[0], times[rank]))
        )
        offsets.append(sum(best[rank]) / 2 - sum(best[0]) / 2)
    return offsets


def _kernel() -> str:
    """Equal on all ranks that read one clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else platform.node()
