"""Ranks that die, raise, leave, stop, dawdle or do something else: who finds out, how, and how soon."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Timer
from typing import Any, NoReturn

import psutil
import pytest
import torch
from torch import Tensor

from tp_kernels import (
    CollectiveTimeoutError,
    GroupMismatchError,
    ParallelGroup,
    PeerLostError,
    RankError,
    TpKernelsError,
    UnsupportedError,
    all_gather_linear,
    linear_all_reduce,
    linear_reduce_scatter,
)
from tp_kernels.comm import all_gather, all_reduce, barrier, reduce_scatter
from tp_kernels.comm.faults import error_from_process_group
from tp_kernels.comm.short_way import ShortWay
from tp_kernels.comm.topology import HostIdentity
from tp_kernels.ops import gemm_all_reduce, gemm_reduce_scatter

TIMEOUT, SLACK = 5.0, 3.0
CULPRIT = 1
PROVIDERS = ("host", "none")

THREADED = ("killed within", "late", "too late")  # the other faults meet ranks without the thread

Call = Callable[[ParallelGroup], Any]


@pytest.fixture(autouse=True)
def _no_zombies() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 10
    while zombies := [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() == psutil.STATUS_ZOMBIE
    ]:
        assert time.monotonic() < deadline, zombies
        time.sleep(0.05)


def product(rows: int, inner: int, outs: int) -> tuple[Tensor, Tensor]:
    return torch.ones(rows, inner), torch.ones(outs, inner)


CALLS: dict[str, Call] = {
    "all_reduce": lambda group: all_reduce(torch.ones(7), group),
    "reduce_scatter": lambda group: reduce_scatter(torch.ones(7, 2), group),
    "all_gather": lambda group: all_gather(torch.ones(7), group),
    "barrier": barrier,
    # several rounds each
    "linear_all_reduce": lambda group: linear_all_reduce(*product(300, 4, 50), group=group),
    "linear_reduce_scatter": lambda group: linear_reduce_scatter(*product(300, 4, 50), group=group),
    "all_gather_linear": lambda group: all_gather_linear(*product(300, 50, 4), group=group),
}


def be_killed(group: ParallelGroup) -> NoReturn:
    time.sleep(0.3)  # the others are waiting by now
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def be_killed_within(group: ParallelGroup) -> None:
    Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()


def fail(group: ParallelGroup) -> NoReturn:
    raise ValueError("no fault of the package")


def be_stopped(group: ParallelGroup) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    leave_process_group(group)


def dawdle(group: ParallelGroup) -> None:
    time.sleep(TIMEOUT + 1.0)
    leave_process_group(group)


def leave_process_group(group: ParallelGroup) -> None:
    """A culprit that comes back would only wait for another deadline there: nobody tells it."""
    if group.provider == "none":
        group.close()


FAULTS: dict[str, Call] = {
    "killed": be_killed,
    "killed within": be_killed_within,
    "raises": fail,
    "closes": ParallelGroup.close,
    "late": lambda group: time.sleep(3.0),
    "too late": dawdle,
    "stopped": be_stopped,
}


def take_part(provider: str, call: str, fault: str) -> bool:
    """Call a collective for a while; one rank has its fault. Errors carry the seconds they took."""
    group = ParallelGroup(
        provider=provider,
        timeout=TIMEOUT,
        window=8192,
        communication_thread=fault in THREADED,
    )
    CALLS[call](group)
    if group.rank == CULPRIT:
        FAULTS[fault](group)
    for _ in range(1_000_000 if fault == "killed within" else 2):
        start = time.monotonic()
        try:
            CALLS[call](group)
        except TpKernelsError as error:
            error.seconds = time.monotonic() - start  # type: ignore[attr-defined]
            raise
    return True


def outcomes_of(world, provider: str, call: str, fault: str) -> tuple[list[Any], Any]:
    """What the other two ranks raised, and the culprit."""
    with pytest.raises(RankError) as caught:
        world(3).run(take_part, provider, call, fault)
    outcomes = caught.value.outcomes
    culprit = outcomes.pop(CULPRIT)
    for error in outcomes:
        assert isinstance(error, TpKernelsError) and not isinstance(error, RankError), error
        assert error.seconds < TIMEOUT + SLACK, error
    return outcomes, culprit


@pytest.mark.parametrize("fault", ["killed", "killed within"])
@pytest.mark.parametrize(
    ("provider", "call"),
    [(provider, call) for provider in PROVIDERS for call in ("all_reduce", "all_gather_linear")]
    + [("host", "linear_all_reduce"), ("host", "linear_reduce_scatter"), ("host", "barrier")],
)
def test_a_killed_rank(world, provider, call, fault):
    survivors, culprit = outcomes_of(world, provider, call, fault)
    assert str(culprit) == f"rank {CULPRIT} was killed by SIGKILL"
    for error in survivors:
        assert isinstance(error, PeerLostError)
        assert f"rank {CULPRIT}" in str(error), error
        assert "ended" in str(error), error
        assert error.seconds < SLACK, "the survivors need not wait for the deadline"


@pytest.mark.parametrize("fault", ["raises", "closes"])
@pytest.mark.parametrize("call", ["all_reduce", "linear_reduce_scatter"])
def test_a_rank_that_leaves(world, call, fault):
    survivors, culprit = outcomes_of(world, "host", call, fault)
    assert isinstance(culprit, ValueError if fault == "raises" else UnsupportedError)
    for error in survivors:
        assert isinstance(error, PeerLostError)
        assert f"waited for rank {CULPRIT}" in str(error), error
        assert "closed the group" in str(error)
        assert error.seconds < SLACK


def test_a_rank_that_leaves_a_process_group(world):
    """Nothing tells the others: they learn it at the deadline, from who does not wait with them."""
    survivors, _ = outcomes_of(world, "none", "all_reduce", "raises")
    for error in survivors:
        assert isinstance(error, CollectiveTimeoutError)
        assert f"waited longer than 5 s for a rank of [0, 1, 2]; rank {CULPRIT} did not" in str(
            error
        )


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("call", ["linear_all_reduce", "linear_reduce_scatter"])
def test_a_rank_that_raises_within(world, call, threaded):
    """Out of memory between two rounds, say: the peers need not wait for the deadline."""
    outcomes = world(3).run(run_out_of_memory, call, threaded)
    for rank, (error, seconds) in enumerate(outcomes):
        assert seconds < SLACK
        if rank == CULPRIT:
            assert error == "MemoryError: none left"
        else:
            assert f"PeerLostError: {call}: rank {rank}" in error
            assert f"rank {CULPRIT} failed: {call}: MemoryError: none left" in error


def run_out_of_memory(call: str, threaded: bool) -> tuple[str, float]:
    module = {
        "linear_all_reduce": gemm_all_reduce,
        "linear_reduce_scatter": gemm_reduce_scatter,
    }[call]
    original, calls = module.partial_product, 0

    def allocate_or_fail(*args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if not threaded or calls > 2:  # without the thread there is one product
            raise MemoryError("none left")
        return original(*args)

    with ParallelGroup(
        provider="host", timeout=TIMEOUT, window=8192, communication_thread=threaded
    ) as group:
        CALLS[call](group)
        if group.rank == CULPRIT:
            group.short = ShortWay()  # which would not call what fails
            module.partial_product = allocate_or_fail
        start = time.monotonic()
        try:
            CALLS[call](group)
        except (TpKernelsError, MemoryError) as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - start
        finally:
            module.partial_product = original
    raise AssertionError("a rank failed")


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_late_rank_is_waited_for(world, provider):
    assert world(3).run(take_part, provider, "linear_all_reduce", "late") == [True] * 3


def test_a_rank_later_than_the_deadline(world):
    survivors, culprit = outcomes_of(world, "host", "linear_all_reduce", "too late")
    assert isinstance(culprit, PeerLostError)
    assert re.search("rank [02] failed: .* did not arrive within 5 s", str(culprit)), culprit
    for error in survivors:
        assert isinstance(error, CollectiveTimeoutError)
        assert f"waited for rank {CULPRIT}" in str(error), error
        assert "did not arrive within 5 s" in str(error)
        assert error.seconds >= TIMEOUT


def test_a_rank_later_than_the_deadline_of_a_process_group(world):
    survivors, _ = outcomes_of(world, "none", "all_reduce", "too late")
    for error in survivors:
        assert isinstance(error, CollectiveTimeoutError)
        assert f"waited longer than 5 s for a rank of [0, 1, 2]; rank {CULPRIT} did not" in str(
            error
        )
        assert error.seconds >= TIMEOUT


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_stopped_rank(world, provider):
    resume = Timer(TIMEOUT + SLACK, os.kill, (world(3).pids[CULPRIT], signal.SIGCONT))
    resume.start()
    try:
        survivors, _ = outcomes_of(world, provider, "all_reduce", "stopped")
        for error in survivors:
            assert isinstance(error, CollectiveTimeoutError)
            assert f"waited for rank {CULPRIT}" in str(error), error
            assert "stopped" in str(error), error
            assert error.seconds >= TIMEOUT
    finally:
        resume.join()


def test_a_rank_that_is_just_dying_is_named():
    """Its connections close before it is seen to have ended."""
    here = HostIdentity.current()
    with ParallelGroup() as group, subprocess.Popen(["sleep", "0.2"]) as dying:
        group.identities = [here, replace(here, pid=dying.pid)]
        failure = RuntimeError("Connection closed by peer")
        error = error_from_process_group(failure, group, "all_reduce")
        assert isinstance(error, PeerLostError)
        assert "lost rank 1 (process ended)" in str(error)


# What two ranks call, and what the culprit calls at the same time.
DIFFERENCES: dict[str, tuple[Call, Call]] = {
    "shape": (CALLS["all_reduce"], lambda group: all_reduce(torch.ones(8), group)),
    "dtype": (CALLS["all_reduce"], lambda group: all_reduce(torch.ones(7).bfloat16(), group)),
    "halves": (
        lambda group: all_gather(torch.ones(7).half(), group),
        lambda group: all_gather(torch.ones(7).bfloat16(), group),
    ),
    "integers": (
        lambda group: all_gather(torch.ones(7, dtype=torch.int64), group),
        lambda group: all_gather(torch.ones(7, dtype=torch.float64), group),
    ),
    "op": (CALLS["all_reduce"], lambda group: all_gather(torch.ones(7), group)),
    "rows": (
        lambda group: all_gather_linear(*product(30, 6, 4), group=group),
        lambda group: all_gather_linear(*product(31, 6, 4), group=group),
    ),
    "rows of several rounds": (
        CALLS["all_gather_linear"],
        lambda group: all_gather_linear(*product(600, 50, 4), group=group),
    ),
    "width": (
        CALLS["linear_all_reduce"],
        lambda group: linear_all_reduce(*product(300, 4, 51), group=group),
    ),
    "transposed": (
        lambda group: linear_reduce_scatter(*product(4, 2, 6), group=group),
        lambda group: linear_reduce_scatter(*product(6, 2, 4), group=group),
    ),
    "linear op": (CALLS["linear_all_reduce"], CALLS["linear_reduce_scatter"]),
    "half of the linear op": (
        CALLS["linear_all_reduce"],
        lambda group: linear_all_reduce(*(t.half() for t in product(300, 4, 50)), group=group),
    ),
    "barrier": (CALLS["all_reduce"], barrier),
}
# gloo's barrier carries no description; what meets it waits until the deadline.
UNDESCRIBED = {"host": set(), "none": {"barrier"}}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_ranks_that_do_different_things(world, provider):
    outcomes = world(3).run(differ, provider)
    for rank, errors in enumerate(outcomes):
        assert set(errors) == set(DIFFERENCES) - UNDESCRIBED[provider]
        others = "[02]" if rank == CULPRIT else CULPRIT
        for what, error in errors.items():
            assert "must make the same calls" in error, (what, error)
            assert re.search(f"ranks {rank} and {others} ", error), (what, error)


def differ(provider: str) -> dict[str, str]:
    """The error of this rank for every difference, each in a group of its own."""
    errors = {}
    for what in sorted(DIFFERENCES.keys() - UNDESCRIBED[provider]):
        with ParallelGroup(provider=provider, timeout=TIMEOUT, window=8192) as group:
            CALLS["all_reduce"](group)
            start = time.monotonic()
            with pytest.raises(GroupMismatchError) as caught:
                DIFFERENCES[what][group.rank == CULPRIT](group)
            assert time.monotonic() - start < SLACK
            errors[what] = str(caught.value)
    return errors
