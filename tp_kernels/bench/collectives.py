"""`tp-kernels bench collectives`: all-reduce, reduce-scatter and all-gather, by size.

`bytes` are those of the whole: the tensor of an all-reduce, the input of a reduce-scatter, the output of an
all-gather. Tensors are made once; `all_reduce` runs in place, as in torch.distributed and DeepSpeed. Before
every call each rank writes its input anew, in all contestants, and the ranks meet at a barrier; neither is
timed. A call takes as long as on the rank where it took longest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tp_kernels.comm import ParallelGroup, ShapeError, UnsupportedError
from tp_kernels.comm.collectives import all_gather, all_reduce, reduce_scatter
from tp_kernels.comm.host_slot import OPERATIONS, REDUCIBLE

from . import measure
from .peers import Peers
from .pool import Case
from .slices import Buffers, Work
from .timing import Budget, Contestant, Progress

OPS = ("all_reduce", "reduce_scatter", "all_gather")
DTYPES = ("float32", "bfloat16")
ALL_DTYPES = (*DTYPES, "float16")
SIZES = tuple(1 << exponent for exponent in range(10, 27, 2))
PEERS = ("gloo", "deepspeed", "openmpi")


@dataclass(frozen=True)
class Settings(measure.Settings):
    """What to measure."""

    ops: Sequence[str] = OPS
    dtypes: Sequence[str] = DTYPES
    sizes: Sequence[int] = SIZES


QUICK = Settings(dtypes=("float32",), sizes=(4 << 10, 256 << 10, 4 << 20), budget=Budget(2, 0.01))


def run(settings: Settings, peers: Peers, progress: Progress) -> list[dict[str, Any]]:
    """One row per op, dtype, world size and number of bytes; `peers` records who did not run."""
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

    def start(stack: ExitStack, world: int) -> tuple[list[Contestant], measure.Derive]:
        pool = measure.start_pool(stack, settings, world)
        contestants: list[Contestant] = [
            pool.contestant("host", partial(ours, via=through_python)),
            pool.contestant("raw", partial(ours, via=through_engine)),
        ]
        if "gloo" not in peers.without:
            contestants.append(pool.contestant("gloo", gloo, ours=False))
        names = ("deepspeed", "openmpi")
        contestants += peers.start(stack, names, world, settings.threads, settings.bind)
        return contestants, derived

    return measure.measure(cases, start, settings, peers, progress)


def derived(case: Case, medians: Mapping[str, float]) -> dict[str, Any]:
    """What follows from the medians (seconds) of a case."""
    host = medians["host"]
    best = min((name for name in PEERS if name in medians), key=lambda n: medians[n], default=None)
    return {
        "gigabytes_per_second": case["bytes"] / host / 1e9,
        "best_peer": best,
        "best_peer_over_host": medians[best] / host if best else None,
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
    engine = group.slot.raw
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
