"""Peers of a channel that die, leave, stop or dawdle: who finds out, how, and how soon."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tp_kernels import (
    CollectiveTimeoutError,
    GroupMismatchError,
    P2PChannel,
    ParallelGroup,
    PeerLostError,
    RankError,
    TpKernelsError,
)
from tp_kernels.comm import all_reduce, barrier

PROVIDERS = ("host", "none")
TIMEOUT, SLACK = 4.0, 3.0

# Faults: rank 1 has one while rank 0 waits to send to it or to receive from it; rank 2 needs neither.


def be_killed(p2p: P2PChannel) -> None:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


def be_stopped(p2p: P2PChannel) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def dawdle(p2p: P2PChannel) -> None:
    time.sleep(TIMEOUT + 1.0)


def close_group(p2p: P2PChannel) -> None:
    time.sleep(0.2)
    p2p.group.close()


def close(p2p: P2PChannel) -> None:
    time.sleep(0.2)
    p2p.close()


def fail(p2p: P2PChannel) -> None:
    time.sleep(0.2)
    p2p.fail("out of memory")


FAULTS = {
    "killed": be_killed,
    "stopped": be_stopped,
    "late": dawdle,
    "closes": close,
    "closes the group": close_group,
    "fails": fail,
}


def wait_for_culprit(provider: str, call: str, fault: str) -> float:
    """How long rank 0 waited, in its error too."""
    with ParallelGroup(provider=provider, timeout=TIMEOUT) as group:
        p2p = P2PChannel(group, cells=2, cell_bytes=64)
        barrier(group)
        if group.rank == 1:
            FAULTS[fault](p2p)
            if fault not in ("killed", "stopped", "late"):
                time.sleep(SLACK)  # that it has left is to be told, not that it is collected
        if group.rank != 0:
            return 0.0
        start = time.monotonic()
        try:
            if call == "send":
                p2p.send(torch.ones(1 << 20), 1)  # larger than what gloo and TCP take at once
            elif call == "recv":
                p2p.recv(1)
            else:
                while not p2p.poll(1):
                    time.sleep(0.001)
        except TpKernelsError as error:
            error.seconds = time.monotonic() - start  # type: ignore[attr-defined]
            raise
        finally:
            p2p.leave()
        raise AssertionError("nothing was wrong")


def error_of(world, provider: str, call: str, fault: str) -> Any:
    with pytest.raises(RankError) as caught:
        world(3).run(wait_for_culprit, provider, call, fault)
    error = caught.value.outcomes[0]
    assert isinstance(error, TpKernelsError) and not isinstance(error, RankError), error
    assert str(error).startswith(f"{call}: rank 0 of group 'tp_kernels:"), error
    assert "rank 1" in str(error) and "rank 2" not in str(error), error
    if provider == "host" and call != "poll":
        assert re.search(r"waited for rank 1 \(expected epoch \d+, seen \d+\)", str(error)), error
    return error


@pytest.mark.parametrize("call", ["send", "recv", "poll"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_killed_peer(world, provider, call):
    error = error_of(world, provider, call, "killed")
    assert isinstance(error, PeerLostError)
    assert "ended" in str(error)
    assert error.seconds < SLACK


@pytest.mark.parametrize("call", ["send", "recv"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_stopped_peer(world, provider, call):
    resume = threading.Timer(TIMEOUT + SLACK, os.kill, (world(3).pids[1], signal.SIGCONT))
    resume.start()
    try:
        error = error_of(world, provider, call, "stopped")
        assert isinstance(error, CollectiveTimeoutError)
        assert "stopped" in str(error)
        assert TIMEOUT <= error.seconds < TIMEOUT + SLACK
    finally:
        resume.join()


@pytest.mark.parametrize("call", ["send", "recv"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_late_peer(world, provider, call):
    error = error_of(world, provider, call, "late")
    assert isinstance(error, CollectiveTimeoutError)
    assert "did not arrive" in str(error)
    assert TIMEOUT <= error.seconds < TIMEOUT + SLACK


@pytest.mark.parametrize("call", ["send", "recv", "poll"])
@pytest.mark.parametrize("fault", ["closes", "closes the group", "fails"])
def test_a_peer_that_leaves(world, fault, call):
    error = error_of(world, "host", call, fault)
    assert isinstance(error, PeerLostError)
    why = "rank 1 failed: out of memory" if fault == "fails" else "rank 1 closed the group"
    assert why in str(error)
    assert error.seconds < SLACK - 1.0


def test_a_failure_is_told_to_all(world):
    """A rank whose receive fails tells the ranks that wait for it, in the channel and in the group."""
    outcomes = world(4).run(pass_on)
    assert "CollectiveTimeoutError: recv: rank 0" in outcomes[0]
    for outcome, call in zip(outcomes[2:], ("recv", "all_reduce"), strict=True):
        assert f"PeerLostError: {call}: rank" in outcome
        assert "rank 0 failed: recv: " in outcome


def pass_on() -> str:
    with ParallelGroup(timeout=1.0 if dist.get_rank() == 0 else 20.0) as group:
        p2p = P2PChannel(group)
        barrier(group)
        start = time.monotonic()
        try:
            if group.rank == 0:
                p2p.recv(1)
            elif group.rank == 1:
                time.sleep(2.0)
            elif group.rank == 2:
                p2p.recv(0)
            else:
                all_reduce(torch.ones(1), group)
        except TpKernelsError as error:
            assert time.monotonic() - start < 1.0 + SLACK
            return f"{type(error).__name__}: {error}"
        return ""


def test_an_interrupted_wait(world):
    waiting, told = world(2).run(interrupt)
    assert waiting == "KeyboardInterrupt"
    assert "rank 0 failed: interrupted in recv" in told


def interrupt() -> str:
    with ParallelGroup(timeout=20) as group:
        p2p = P2PChannel(group)
        barrier(group)
        try:
            if group.rank == 0:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            p2p.recv(1 - group.rank)
        except (KeyboardInterrupt, PeerLostError) as error:
            return str(error) or type(error).__name__
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # as ranks of a pool have it
        return ""


def test_a_failure_without_rings_is_told_to_the_group(world):
    told, _ = world(2).run(fail_beside_the_memory)
    assert told.startswith("PeerLostError: barrier: rank 0")
    assert "rank 1 failed: GroupMismatchError: recv: rank 1" in told


def fail_beside_the_memory() -> str:
    with ParallelGroup(provider="host", timeout=10) as group:
        p2p = P2PChannel(group, cells=65536, cell_bytes=1 << 40)  # does not fit
        assert (group.provider, p2p.provider) == ("host", "none")
        if group.rank == 1:
            with pytest.raises(GroupMismatchError):
                p2p.recv(0, tag=1)
            return ""
        p2p.send(b"x", 1, tag=2)
        with pytest.raises(PeerLostError) as caught:
            barrier(group)
        return f"{type(caught.value).__name__}: {caught.value}"
