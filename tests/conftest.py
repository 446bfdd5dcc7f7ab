"""Rank processes that tests share, and checks that no test leaves anything behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import hypothesis
import psutil
import pytest
import torch

from tp_kernels.comm import Ranks

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci")

SHARED_MEMORY = Path("/dev/shm")

# A suite started in the background inherits an ignored SIGINT, and so would the processes that tests
# interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], Ranks]]:
    """`world(n)`: `n` rank processes, shared by all tests that ask for that many.

    Starting ranks costs more than most tests. A pool that a test broke is replaced.
    """
    with rank_pools() as get:
        yield get


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[[int], Ranks]]:
    """As `world`, with the Triton interpreter in every rank."""
    with rank_pools({"TRITON_INTERPRET": "1"}) as get:
        yield get


@contextmanager
def rank_pools(env: dict[str, str] | None = None) -> Iterator[Callable[[int], Ranks]]:
    """Pools of ranks by size, whose processes have the variables `env`."""
    pools: dict[int, Ranks] = {}

    def get(size: int) -> Ranks:
        if size not in pools or not pools[size].usable:
            pools[size] = Ranks(size, env=env)
            # Ranks that oversubscribe the cores make every timing-related failure look random.
            threads = max(1, len(os.sched_getaffinity(0)) // size)
            assert pools[size].run(torch.get_num_threads) == [threads] * size
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()
    zombies = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() == psutil.STATUS_ZOMBIE
    ]
    assert not zombies, f"processes nobody waited for: {zombies}"


@pytest.fixture(autouse=True)
def _no_segment_left_behind() -> Iterator[None]:
    before = segments()
    yield
    left = segments() - before
    # A segment of another run on this machine has a name for a moment only.
    deadline = monotonic() + 2.0
    while left and monotonic() < deadline:
        sleep(0.05)
        left &= segments()
    assert not left, f"left in {SHARED_MEMORY}: {sorted(left)}"


def segments() -> set[str]:
    """Names of this package's entries in shared memory; there should never be any for long."""
    return {entry.name for entry in SHARED_MEMORY.glob("tpk-*")}
