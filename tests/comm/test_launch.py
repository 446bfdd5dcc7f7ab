"""Rank processes: results, failures, and what is left behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tp_kernels.comm import RankError, Ranks, ShapeError, UnsupportedError, launch


def summed(value: float) -> float:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item()


def identity() -> tuple[int, int, dict[str, str | None], int]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return (
        dist.get_rank(),
        dist.get_world_size(),
        {name: os.environ.get(name) for name in names},
        torch.get_num_threads(),
    )


def environment(name: str) -> str | None:
    return os.environ.get(name)


def raise_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError(f"bad rank {rank}")
    return dist.get_rank()


def raise_before_collective(rank: int) -> float:
    if dist.get_rank() == rank:
        raise ValueError("early")
    return summed(1.0)


class NotPicklableError(Exception):
    def __init__(self, text: str, *, required: int) -> None:
        super().__init__(text)


def raise_unpicklable() -> None:
    raise NotPicklableError("odd", required=1)


def kill_self(rank: int, number: int) -> float:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), number)
        time.sleep(60)
    return summed(1.0)


def leave(rank: int, status: int) -> int:
    if dist.get_rank() == rank:
        os._exit(status)
    return dist.get_rank()


def hang_while_peer_raises() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)
    raise ValueError("the other one hangs")


def unpicklable_result() -> object:
    return lambda: None


def cpu_seconds() -> float:
    return time.process_time()


def test_results_come_back_by_rank(world):
    assert world(2).run(summed, 21.0) == [42.0, 42.0]
    assert [rank for rank, *_ in world(3).run(identity)] == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_rank_knows_who_it_is(world, size):
    cores = len(os.sched_getaffinity(0))
    for rank, outcome in enumerate(world(size).run(identity)):
        names = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
        }
        assert outcome == (rank, size, names, max(1, cores // size))


def test_keyword_arguments_and_tensors_travel(world):
    assert world(2).run(summed, value=1.0) == [2.0, 2.0]
    x = torch.arange(6.0).reshape(2, 3)
    for y in world(2).run(torch.neg, x):
        assert torch.equal(y, -x)


def test_launch_runs_once_with_the_environment_of_now(monkeypatch):
    monkeypatch.setenv("TP_KERNELS_TEST_NOW", "parent")
    assert launch(environment, 2, "TP_KERNELS_TEST_NOW") == ["parent"] * 2
    child = {"TP_KERNELS_TEST_NOW": "child"}
    assert launch(environment, 1, "TP_KERNELS_TEST_NOW", env=child) == ["child"]


def test_two_pools_do_not_meet(world):
    two, three = world(2), world(3)
    for _ in range(3):
        assert two.run(summed, 1.0) == [2.0] * 2
        assert three.run(summed, 1.0) == [3.0] * 3


def test_a_rank_that_raises_is_named_and_the_pool_lives_on(world):
    ranks = world(2)
    with pytest.raises(RankError, match="rank 1 raised ValueError: bad rank 1") as caught:
        ranks.run(raise_on, 1)
    error = caught.value
    assert error.rank == 1
    assert isinstance(error.__cause__, ValueError)
    assert "in raise_on" in error.remote_traceback
    assert error.remote_traceback.strip() in str(error)
    assert error.outcomes[0] == 0 and isinstance(error.outcomes[1], ValueError)
    assert ranks.usable
    assert ranks.run(summed, 1.0) == [2.0, 2.0]


def test_ranks_out_of_step_get_a_fresh_group():
    with Ranks(2, timeout=2) as ranks:
        with pytest.raises(RankError, match="rank 0 raised ValueError: early") as caught:
            ranks.run(raise_before_collective, 0)
        survivor = caught.value.outcomes[1]
        assert isinstance(survivor, RuntimeError) and not isinstance(survivor, RankError)
        assert ranks.run(summed, 1.0) == [2.0, 2.0]


def test_an_exception_that_cannot_be_pickled_keeps_its_text(world):
    with pytest.raises(RankError, match="raised NotPicklableError: odd") as caught:
        world(2).run(raise_unpicklable)
    assert all(isinstance(outcome, RankError) for outcome in caught.value.outcomes)
    assert "in raise_unpicklable" in caught.value.remote_traceback


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_named_with_its_signal(number):
    with Ranks(2, timeout=5) as ranks:
        pids = ranks.pids
        with pytest.raises(RankError, match=f"rank 1 was killed by {number.name}") as caught:
            ranks.run(kill_self, 1, int(number))
        assert caught.value.rank == 1
        assert caught.value.__cause__ is None
        assert not ranks.usable
        with pytest.raises(UnsupportedError, match="rank 1 was lost"):
            ranks.run(identity)
    assert not any(exists(pid) for pid in pids)


def test_a_rank_that_exits_is_named_with_its_status():
    with Ranks(2) as ranks, pytest.raises(RankError, match="rank 0 exited with status 3") as caught:
        ranks.run(leave, 0, 3)
    assert caught.value.outcomes[1] == 1


def test_a_rank_killed_while_idle_is_reported_by_the_next_call():
    with Ranks(2, timeout=5) as ranks:
        os.kill(ranks.pids[0], signal.SIGKILL)
        with pytest.raises(RankError, match="rank 0 was killed by SIGKILL"):
            ranks.run(cpu_seconds)


def test_a_rank_that_hangs_is_stopped_after_the_grace_period():
    with Ranks(2, timeout=0.5) as ranks:
        start = time.monotonic()
        with pytest.raises(RankError, match="rank 0 was stopped") as caught:
            ranks.run(hang_while_peer_raises)
        assert time.monotonic() - start < 10
        assert isinstance(caught.value.outcomes[1], ValueError)
        assert isinstance(caught.value.outcomes[0], RankError)


def test_functions_that_cannot_be_sent_are_refused_and_the_pool_lives_on(world):
    ranks = world(2)

    def local() -> None: ...

    for fn in (lambda: None, local):
        with pytest.raises(UnsupportedError, match="top of a module"):
            ranks.run(fn)
    with pytest.raises(UnsupportedError, match="an argument cannot be pickled"):
        ranks.run(summed, lambda: None)
    with pytest.raises(RankError, match=r"raised .*pickle"):
        ranks.run(unpicklable_result)
    assert ranks.run(summed, 1.0) == [2.0, 2.0]


def test_bad_sizes_are_refused():
    with pytest.raises(ShapeError, match="at least one rank"):
        Ranks(0)
    with pytest.raises(ShapeError, match="at least one thread"):
        Ranks(1, threads=0)


def test_a_bad_backend_is_reported():
    with pytest.raises(RankError, match="no_such_backend"):
        Ranks(1, backend="no_such_backend")


def test_closing_ends_every_process_and_refuses_more_calls():
    ranks = Ranks(2)
    pids = ranks.pids
    ranks.close()
    ranks.close()
    assert not any(exists(pid) for pid in pids)
    with pytest.raises(UnsupportedError, match="they were closed"):
        ranks.run(identity)


def test_idle_ranks_use_no_processor(world):
    ranks = world(2)
    before = ranks.run(cpu_seconds)
    time.sleep(1.0)
    after = ranks.run(cpu_seconds)
    assert max(b - a for a, b in zip(before, after, strict=True)) < 0.1


def test_a_rank_error_can_be_pickled():
    error = RankError("rank 1 failed", rank=1, remote_traceback="trace", outcomes=[1, ValueError()])
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.rank, copy.remote_traceback) == (str(error), 1, "trace")
    assert copy.outcomes[0] == 1 and isinstance(copy.outcomes[1], ValueError)


SCRIPT = """
    import time
    import torch.distributed as dist
    from tp_kernels.comm import Ranks

    def sleep():
        time.sleep(60)

    def rank():
        return dist.get_rank()

    if __name__ == "__main__":
        with Ranks(2) as ranks:
            print(ranks.run(rank), *ranks.pids, flush=True)
            {last}
"""


def start_script(tmp_path: Path, last: str) -> tuple[subprocess.Popen[str], list[int]]:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT.format(last=last)))
    process = subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("[0, 1] "):
        process.wait()
        pytest.fail(f"{line}\n{process.stderr.read() if process.stderr else ''}")
    return process, [int(pid) for pid in line.split("]")[1].split()]


@pytest.mark.parametrize("last", ["time.sleep(60)", "ranks.run(sleep)"])
def test_ranks_die_with_a_killed_parent(tmp_path, last):
    process, pids = start_script(tmp_path, last)
    with process:
        process.kill()
    wait_until_gone(pids)


def test_control_c_stops_every_rank(tmp_path):
    process, pids = start_script(tmp_path, "ranks.run(sleep)")
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode != 0
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert stderr.count("Traceback") == 1
    wait_until_gone(pids)


def test_a_script_that_forgets_to_close_ends(tmp_path):
    process, pids = start_script(tmp_path, "globals()['kept'] = Ranks(1)")
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0, stderr
    wait_until_gone(pids)


def test_a_script_without_the_guard_is_told_so(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("from tp_kernels.comm import launch\ndef rank(): ...\nlaunch(rank, 1)\n")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert 'if __name__ == "__main__"' in done.stderr.replace("'", '"')


def test_standard_input_as_the_main_module():
    code = """
        import os
        from tp_kernels.comm import UnsupportedError, launch
        print(launch(os.getppid, 2)[0] > 0)
        def here(): ...
        try:
            launch(here, 1)
        except UnsupportedError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-"],
        input=textwrap.dedent(code),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True\n")
    assert "cannot import here" in done.stdout


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(exists(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still alive: {[p for p in pids if exists(p)]}"
        time.sleep(0.05)
