"""Thousands of collectives: several groups, several threads, flat memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from threading import Thread

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from tp_kernels import ParallelGroup, linear_all_reduce, split_range
from tp_kernels.comm import all_gather, all_reduce, barrier, reduce_scatter

CALLS, WARM_UP = 10_000, 2_000
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(group: ParallelGroup, rank: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Small integers, so that sums are exact in every dtype."""
    return (torch.arange(rows * width).view(rows, width) % 7 + group.ranks[rank] % 5).to(dtype)


def one_call(group: ParallelGroup, random: Random) -> None:
    """A collective of random kind, shape and dtype, checked to the bit."""
    kind = random.choice(("all_reduce", "reduce_scatter", "all_gather", "linear", "barrier"))
    rows, width = random.choice((0, 1, 3, 17, 200)), random.choice((1, 5, 64))
    dtype = random.choice(DTYPES)
    if kind == "barrier":
        return barrier(group)
    parts = [values(group, rank, rows, width, dtype) for rank in range(group.size)]
    total = torch.stack(parts).sum(0).to(dtype)
    mine = parts[group.rank]
    start, stop = split_range(rows, group.size, group.rank)
    if kind == "all_reduce":
        assert torch.equal(all_reduce(mine, group), total)
    elif kind == "reduce_scatter":
        assert torch.equal(reduce_scatter(mine, group), total[start:stop])
    elif kind == "all_gather":
        whole = all_gather(total[start:stop].contiguous(), group, rows)
        assert torch.equal(whole, total)
    else:
        eye = torch.eye(width, dtype=dtype)
        assert torch.equal(linear_all_reduce(mine, eye, group=group), total)
    return None


def test_soak(world):
    """10 000 collectives over two groups at once; what the process holds does not grow."""
    for grown in world(4).run(soak):
        assert grown["descriptors"] <= 0  # what earlier tests left may go meanwhile
        assert grown["mappings"] <= 2  # an arena of the C library may come or go
        # Half a kilobyte lost in each of the 8000 counted calls would be more than this.
        assert grown["resident"] < 4 << 20, grown


def soak() -> dict[str, int]:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    # Slots of one buffer's size only, to go through many rounds; all ranks, and this rank's pair.
    with (
        ParallelGroup(window=4096, timeout=30) as everybody,
        ParallelGroup(pairs[rank % 2], window=4096, timeout=30) as pair,
    ):
        common, ours = Random("all"), Random(f"pair {rank % 2}")
        order = Random("order")
        before = {}
        for call in range(CALLS):
            if call == WARM_UP:
                before = held()
            if order.random() < 0.5:
                one_call(everybody, common)
            else:
                one_call(pair, ours)
        after = held()
    for group in pairs:
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)
    return {name: after[name] - before[name] for name in after}


def held() -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
        "resident": process.memory_info().rss,
    }


def test_two_threads_with_a_group_each(world):
    world(2).run(two_threads)


def two_threads() -> None:
    # Made one after the other, as construction is a collective of the process group; used at once.
    with ParallelGroup(window=4096, timeout=30) as one, ParallelGroup(timeout=30) as other:
        failures: list[BaseException] = []

        def run(group: ParallelGroup, seed: str) -> Callable[[], None]:
            def body() -> None:
                random = Random(seed)
                try:
                    for _ in range(400):
                        one_call(group, random)
                except BaseException as failure:
                    failures.append(failure)

            return body

        threads = [Thread(target=run(one, "one")), Thread(target=run(other, "other"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
