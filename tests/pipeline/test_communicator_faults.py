"""Stages that die, fail, leave, dawdle or count differently: who finds out, how, and how soon."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch

from tp_kernels import (
    CollectiveTimeoutError,
    ParallelGroup,
    PeerLostError,
    RankError,
    TpKernelsError,
)
from tp_kernels.comm import Ranks, barrier
from tp_kernels.pipeline import PipelineCommunicator

PROVIDERS = ("host", "none")
TIMEOUT, SLACK = 3.0, 4.0
WAITS = "stage {} on rank {} waits for {} of micro-batch {} from stage {} on rank {}"

# Rank 1 has a fault in micro-batch 2 while rank 0 waits for its backward and rank 2 for its forward.


def be_killed(comm: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dawdle(comm: Any) -> None:
    time.sleep(TIMEOUT + 1.5)


def fail(comm: Any) -> None:
    comm.fail("out of memory")


def raise_error(comm: Any) -> None:
    raise ArithmeticError("forward of layer 7")


def leave_early(comm: Any) -> None:
    comm.close()


def fail_in_the_group(comm: Any) -> None:
    comm.group.fail("another collective")


FAULTS = {
    "killed": be_killed,
    "late": dawdle,
    "fails": fail,
    "raises": raise_error,
    "closes": leave_early,
    "group fails": fail_in_the_group,
}


def step(provider: str, fault: str) -> float:
    """Three stages, three micro-batches; how long the others waited is in their errors."""
    with (
        ParallelGroup(provider=provider, timeout=TIMEOUT) as group,
        PipelineCommunicator(group) as comm,
    ):
        barrier(group)
        start = time.monotonic()
        try:
            for mb in range(3):
                if comm.rank == 1 and mb == 2:
                    time.sleep(0.2)
                    start = time.monotonic()
                    FAULTS[fault](comm)
                    time.sleep(0.5)
                if comm.rank > 0:
                    comm.recv_forward(micro_batch=mb)
                if comm.rank < 2:
                    comm.send_forward(torch.ones(4), micro_batch=mb)
            for mb in range(3):
                if comm.rank < 2:
                    comm.recv_backward(micro_batch=mb)
                if comm.rank > 0:
                    comm.send_backward(torch.ones(4), micro_batch=mb)
        except TpKernelsError as error:
            error.seconds = time.monotonic() - start  # type: ignore[attr-defined]
            raise
    return 0.0


def errors_of(world, provider: str, fault: str) -> list[Any]:
    with pytest.raises(RankError) as caught:
        world(3).run(step, provider, fault)
    outcomes = caught.value.outcomes
    for rank in (0, 2):
        assert isinstance(outcomes[rank], TpKernelsError), outcomes[rank]
    return outcomes


EXPECTED = {
    "killed": "rank 1 is gone: .*process.* ended|lost rank 1",
    "fails": "rank 1 failed: out of memory",
    "raises": "rank 1 failed: ArithmeticError: forward of layer 7",
    "closes": "rank 1 (closed|failed)",
    "group fails": "rank 1 failed: another collective",
}


@pytest.mark.parametrize(
    ("provider", "fault"),
    [("host", fault) for fault in EXPECTED] + [("none", f) for f in ("killed", "raises", "closes")],
)
def test_a_stage_that_goes(world, provider, fault):
    outcomes = errors_of(world, provider, fault)
    for rank, waits in (
        (0, WAITS.format(0, 0, "backward", 0, 1, 1)),
        # Through a process group, rank 0 may tell it before it has received all that rank 1 sent.
        (2, WAITS.format(2, 2, "forward", "2" if provider == "host" else "[0-2]", 1, 1)),
    ):
        error = outcomes[rank]
        assert isinstance(error, PeerLostError)
        assert re.search(f"recv: {waits}", str(error)), error
        assert re.search(EXPECTED[fault], str(error)), error
        assert error.seconds < SLACK
    assert "nothing has arrived" in str(outcomes[0])
    if provider == "host":
        assert "last arrived: micro-batch 1" in str(outcomes[2])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_late_stage(world, provider):
    outcomes = errors_of(world, provider, "late")
    late = [error for error in outcomes if isinstance(error, CollectiveTimeoutError)]
    assert late
    for error in late:
        assert re.search(
            r"stage \d on rank \d waits for \w+ of micro-batch \d from stage \d", str(error)
        )
        assert f"not within {TIMEOUT:g} s" in str(error)
        # The late one may begin to wait itself when the others have given up.
        assert error.seconds < 2 * TIMEOUT + SLACK


def test_the_first_cause_is_told_to_all(world):
    """Rank 3 fails; ranks that wait for others hear of that, not of each other's errors."""
    outcomes = world(4).run(relay)
    for rank in range(3):
        assert re.search(r"; rank 3 failed: the cause$", outcomes[rank]), outcomes[rank]


def relay() -> str:
    with ParallelGroup(timeout=20) as group:
        comm = PipelineCommunicator(group)
        barrier(group)
        if comm.rank == 3:
            time.sleep(0.2)
            comm.fail("the cause")
            time.sleep(0.5)
            return ""
        with pytest.raises(PeerLostError) as caught:
            comm.recv_backward(micro_batch=comm.rank)
        with pytest.raises(PeerLostError, match="this pipeline is broken since: recv: stage"):
            comm.recv_backward(micro_batch=comm.rank)
        with pytest.raises(PeerLostError, match="broken since"):
            comm.flush()
        comm.close()
        return str(caught.value)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_different_numbers_of_micro_batches(world, provider):
    """Both end, with an error where messages are missing."""
    with pytest.raises(RankError) as caught:
        world(2).run(count, provider)
    error = caught.value.outcomes[1]
    assert isinstance(error, PeerLostError)
    assert WAITS.format(1, 1, "forward", 3, 0, 0) + "; last arrived: micro-batch 2" in str(error)
    assert re.search("rank 0 closed", str(error))


def count(provider: str) -> None:
    with (
        ParallelGroup(provider=provider, timeout=10) as group,
        PipelineCommunicator(group) as comm,
    ):
        for mb in range(3 + comm.rank):
            if comm.rank == 0:
                comm.send_forward(mb, micro_batch=mb)
            else:
                assert comm.recv_forward(micro_batch=mb) == mb


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_receiver_that_stops_receiving(world, provider):
    """The sender's wait for credit is bounded and names what cannot be sent."""
    with pytest.raises(RankError) as caught:
        world(2).run(overflow, provider)
    error = caught.value.outcomes[0]
    assert isinstance(error, CollectiveTimeoutError)
    assert re.search(
        "send: stage 0 on rank 0 cannot send forward of micro-batch 4 from stage 0 on rank 0 to stage 1 on "
        "rank 1; not within 1 s",
        str(error),
    )


def overflow(provider: str) -> None:
    with (
        ParallelGroup(provider=provider, timeout=1) as group,
        PipelineCommunicator(group, credits=2) as comm,
    ):
        if comm.rank == 0:
            for mb in range(10):
                comm.send_forward(mb, micro_batch=mb)
        else:
            time.sleep(2.0)
            comm.leave()


def test_ctrl_c(world):
    waiting, told = world(2).run(interrupt)
    assert waiting == "KeyboardInterrupt"
    assert re.search(r"; rank 0 failed: (KeyboardInterrupt|interrupted in recv)", told)


def interrupt() -> str:
    with ParallelGroup(timeout=20) as group:
        comm = PipelineCommunicator(group)
        barrier(group)
        try:
            if group.rank == 0:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                comm.recv_backward(micro_batch=0)
            else:
                comm.recv_forward(micro_batch=0)
        except (KeyboardInterrupt, PeerLostError) as error:
            return str(error) or type(error).__name__
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # as ranks of a pool have it
        return ""


def test_a_group_that_closes_first():
    """The pipeline goes with it, and says so."""
    with Ranks(2) as ranks:
        for text in ranks.run(close_group):
            assert "is closed" in text


def close_group() -> str:
    group = ParallelGroup(timeout=5)
    comm = PipelineCommunicator(group)
    barrier(group)
    group.close()
    with pytest.raises(TpKernelsError) as caught:
        comm.send_to(1, 1 - group.rank, tag="x")
    return str(caught.value)
