"""`tp-kernels bench collectives`: all-reduce, reduce-scatter and all-gather, by size.

`bytes` are those of the whole: the tensor of an all-reduce, the input of a reduce-scatter, the output of an
all-gather. Tensors are made once; `all_reduce` runs in place, as in torch.distributed and DeepSpeed. Before
every call each rank writes its input anew, in all contestants, and the ranks meet at a barrier; neither is
timed. A call takes as long as on the rank where it took longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tp_kernels.comm import ParallelGroup, Ranks, ShapeError, UnsupportedError
from tp_kernels.comm.collectives import all_gather, all_reduce, reduce_scatter
from tp_kernels.comm.host_slot import OPERATIONS, REDUCIBLE

from .peers import Peers
from .pool import Case, Pool, check_worlds
from .slices import Buffers, Work
from .timing import Budget, Contestant, Measurement, Progress, Sample

OPS = ("all_reduce", "reduce_scatter", "all_gather")
DTYPES = ("float32", "bfloat16")
ALL_DTYPES = (*DTYPES, "float16")
SIZES = tuple(1 << exponent for exponent in range(10, 27, 2))
PEERS = ("gloo", "deepspeed", "openmpi")


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    ops: Sequence[str] = OPS
    dtypes: Sequence[str] = DTYPES
    worlds: Sequence[int] = (2,)
    sizes: Sequence[int] = SIZES
    threads: int = 1
    bind: bool = True
    budget: Budget = field(default_factory=Budget)


def run(settings: Settings, peers: Peers, progress: Progress) -> list[dict[str, Any]]:
    """One row per op, dtype, world size and number of bytes; `peers` records who did not run."""
    check_worlds(settings.worlds)
    for size in settings.sizes:
        for dtype in settings.dtypes:
            if size < 1 or size % getattr(torch, dtype).itemsize:
                raise ShapeError(f"{size} bytes are not a number of {dtype} elements")
    cases = [
        {"op": op, "dtype": dtype, "world": world, "bytes": size}
        for world in settings.worlds
        for op in settings.ops
        for dtype in settings.dtypes
        for size in settings.sizes
    ]
    rows: list[dict[str, Any]] = []
    for world in settings.worlds:
        with ExitStack() as stack:
            progress(f"starting {world} ranks", len(rows), len(cases))
            ranks = stack.enter_context(Ranks(world, threads=settings.threads))
            pool = Pool(ranks, bind=settings.bind)
            contestants: list[Contestant] = [
                pool.contestant("host", partial(ours, via=through_python)),
                pool.contestant("raw", partial(ours, via=through_engine)),
            ]
            if "gloo" not in peers.without:
                contestants.append(pool.contestant("gloo", gloo, ours=False))
            names = ("deepspeed", "openmpi")
            contestants += peers.start(stack, names, world, settings.threads, settings.bind)
            lost: dict[str, str] = {}
            for case in cases:
                if case["world"] == world:
                    what = f"{case['op']} {case['dtype']} {case['bytes']} bytes, {world} ranks"
                    progress(what, len(rows), len(cases))
                    done = Measurement(case, settings.budget, lost).run(contestants)
                    rows.append(row(case, done.samples, done.absent))
            peers.note(world, lost)
    return rows


def row(case: Case, samples: dict[str, Sample], absent: dict[str, str]) -> dict[str, Any]:
    """A result as it is written: times, and what follows from them."""
    host = samples["host"].median
    best = min(
        (name for name in PEERS if name in samples),
        key=lambda name: samples[name].median,
        default=None,
    )
    return {
        "case": dict(case),
        "contestants": {name: sample.to_json() for name, sample in samples.items()},
        "absent": absent,
        "derived": {
            "gigabytes_per_second": case["bytes"] / host / 1e9,
            "best_peer": best,
            "best_peer_over_host": samples[best].median / host if best else None,
        },
    }


# In a rank.


Call = Callable[[], Any]


def buffers_of(group: ParallelGroup, case: Case) -> Buffers:
    return Buffers(case, group.rank, group.size, in_place=case["op"] == "all_reduce")


def ours(group: ParallelGroup, case: Case, via: Callable[[ParallelGroup, Buffers], Call]) -> Work:
    if group.memory is None:
        raise UnsupportedError(f"there is no shared memory here: {group.provider_reason}")
    buffers = buffers_of(group, case)
    return buffers.work(via(group, buffers))


def through_python(group: ParallelGroup, buffers: Buffers) -> Call:
    """The public functions."""
    if buffers.op == "all_reduce":
        x = buffers.x
        return lambda: all_reduce(x, group, x)
    x, out = (t.view(t.numel() // buffers.width, buffers.width) for t in (buffers.x, buffers.out))
    if buffers.op == "reduce_scatter":
        return lambda: reduce_scatter(x, group, out)
    rows = buffers.numel // buffers.width
    return lambda: all_gather(x, group, rows=rows, out=out)


def through_engine(group: ParallelGroup, buffers: Buffers) -> Call:
    """The engine alone, with pointers taken before: the difference to the public function is Python."""
    engine = group.slot._raw
    function = getattr(engine, buffers.op)
    size = buffers.numel if buffers.op == "all_reduce" else buffers.counts
    return partial(
        function,
        buffers.x.data_ptr(),
        buffers.out.data_ptr(),
        size,
        REDUCIBLE[buffers.x.dtype],
        OPERATIONS[buffers.op],
        group.timeout,
    )


def gloo(group: ParallelGroup, case: Case) -> Work | str:
    """torch.distributed with the same tensors."""
    buffers = buffers_of(group, case)
    x, out = buffers.x, buffers.out
    if buffers.op == "all_reduce":
        return buffers.work(lambda: dist.all_reduce(x))
    if len(set(buffers.counts)) > 1:
        return "divides evenly only"
    # Newer torch renames these and deprecates the old names.
    if buffers.op == "reduce_scatter":
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return buffers.work(lambda: scatter(out, x))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return buffers.work(lambda: gather(out, x))
