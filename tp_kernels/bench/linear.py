"""`tp-kernels bench linear`: the four fused ops against their limits, by shape.

T_gemm is the fastest unsplit product of a rank's shard, T_comm the collective alone as it is timed in
`tp-kernels bench collectives`, T_serial both one after the other, T_fused the op as
`implementation="auto"` runs it.

    E = 1 - (T_fused - T_gemm) / (T_serial - T_gemm)     share of the communication that is hidden
    T_ideal = max(T_gemm, T_comm);  T_ideal / T_fused    how close to the limit

In a backward T_gemm is the bare products; T_serial, and what the overhead is counted from, is the backward of
torch's own layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from . import measure
from .linear_work import BUILDERS, OPS, chosen
from .peers import Peers
from .pool import Case, group_of_rank
from .timing import Budget, Contestant, Progress

PASSES = ("forward", "backward")
HIDDEN = (512, 1024, 2048, 4096)
ROWS = (1, 4, 16, 128, 512, 2048)
GEMMS = ("gemm", "gemm linear", "gemm mv", "gemm few")
PEERS = ("deepspeed", "openmpi")

SERIAL_TARGET = 0.98  # never slower than products and collective one after the other
OVERHEAD_TARGET_US = 15.0


@dataclass(frozen=True)
class Settings(measure.Settings):
    """What to measure."""

    ops: Sequence[str] = tuple(OPS)
    passes: Sequence[str] = PASSES
    hidden: Sequence[int] = HIDDEN
    rows: Sequence[int] = ROWS
    dtype: str = "float32"
    budget: Budget = field(default_factory=lambda: Budget(3, 0.03))


QUICK = Settings(hidden=(512,), rows=(1, 128), budget=Budget(2, 0.01))


def run(settings: Settings, peers: Peers, progress: Progress) -> list[dict[str, Any]]:
    """One row per op, pass, world size, hidden size and number of rows."""
    cases = [
        {
            "op": op,
            "pass": way,
            "dtype": settings.dtype,
            "world": world,
            "hidden": hidden,
            "rows": rows,
        }
        for world in settings.worlds
        for op in settings.ops
        for way in settings.passes
        for hidden in settings.hidden
        for rows in settings.rows
    ]

    def start(stack: ExitStack, world: int) -> tuple[list[Contestant], measure.Derive]:
        pool = measure.start_pool(stack, settings, world)
        contestants: list[Contestant] = [
            pool.contestant(name, build) for name, build in BUILDERS.items()
        ]
        if "linear_all_reduce" in settings.ops and "forward" in settings.passes:
            contestants += peers.start(stack, PEERS, world, settings.threads, settings.bind)
        auto = lambda case: pool.ranks.run(_chosen, case)[0]
        return contestants, lambda case, medians: derived(case, medians, auto(case))

    return measure.measure(cases, start, settings, peers, progress)


def derived(case: Case, medians: Mapping[str, float], auto: str) -> dict[str, Any]:
    """What follows from the medians (seconds) of a case when "auto" runs the contestant `auto`."""
    gemm_name = min((name for name in GEMMS if name in medians), key=lambda name: medians[name])
    gemm, fused = medians[gemm_name], medians[auto]
    comm = medians.get("comm")
    layer = medians.get("gemm autograd", gemm)  # of torch, in a backward
    serial = medians["serial"] if comm is not None else layer
    ideal = max(gemm, comm or 0.0)
    wanted = ideal_target(case["rows"])
    peers = [name for name in PEERS if name in medians]
    best = min(peers, key=lambda name: medians[name], default=None)
    overhead = None
    if case["rows"] == 1:
        overhead = (fused - layer - medians.get("comm raw", 0.0)) * 1e6
    return {
        "fused": auto,
        "best_gemm": gemm_name,
        "communicates": comm is not None,
        "efficiency": efficiency(gemm, serial, fused) if comm is not None else None,
        "ideal_over_fused": ideal / fused,
        "serial_over_fused": serial / fused,
        "overhead_us": overhead,
        "best_peer": best,
        "best_peer_over_fused": medians[best] / fused if best else None,
        "targets": {
            "ideal_over_fused": None if wanted is None else ideal / fused >= wanted,
            "serial_over_fused": serial / fused >= SERIAL_TARGET,
            "overhead": None if overhead is None else overhead <= OVERHEAD_TARGET_US,
        },
    }


def efficiency(gemm: float, serial: float, fused: float) -> float | None:
    """E: 1 when all communication is hidden, 0 when none is; None where there is none to hide."""
    return 1 - (fused - gemm) / (serial - gemm) if serial > gemm else None


def ideal_target(rows: int) -> float | None:
    """The least T_ideal / T_fused that is aimed at, if there is an aim for so many rows."""
    return 0.95 if rows >= 128 else 0.85 if rows <= 16 else None


def _chosen(case: Case) -> str:
    return chosen(group_of_rank(), case)
