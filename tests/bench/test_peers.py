"""Peers of this test that work, fail, hang and die: the driver reports them and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tp_kernels import UnsupportedError
from tp_kernels.bench import peers
from tp_kernels.bench.peers import Peer, Peers
from tp_kernels.bench.pool import cores_of
from tp_kernels.bench.timing import Budget, ContestantLost, Measurement

FAKE = Path(__file__).with_name("fake_peer.py")
COMMAND = [sys.executable, "-P", str(FAKE)]
CASE = {"op": "all_reduce", "dtype": "float32", "world": 2, "bytes": 4096}


@pytest.fixture(autouse=True)
def _nothing_left():
    before = set(peers._SHARED.glob("tpk-bench-*"))
    yield
    assert not fakes(), "processes left"
    assert set(peers._SHARED.glob("tpk-bench-*")) <= before, "a directory left"


def fakes(argument: str = str(FAKE)) -> list[psutil.Process]:
    """Processes that were started with `argument`."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if argument in (process.info["cmdline"] or [])
    ]


def fake(mode: str, **options: Any) -> Peer:
    return Peer("fake", [COMMAND, COMMAND], 2, environment={"FAKE_PEER": mode}, **options)


def test_a_peer_answers_by_rank():
    with fake("good", cores=[{0}, {0}]) as peer:
        assert peer.versions == {"fake": "1.0"}
        assert all(process.cpu_affinity() == [0] for process in fakes())
        assert peer.prepare({**CASE, "op": "all_gather"}) == "has an all-reduce only"
        done = Measurement(CASE, Budget(2, 0.001), {}).run([peer])
        assert not done.absent and done.samples["fake"].error == 0.0
        assert not peer.ours
        peer.prepare(CASE)
        timed, checked = peer.slice(7, 1, False), peer.slice(3, 0, True)
        assert [len(rank.seconds) for rank in (*timed, *checked)] == [7, 7, 3, 3]
        assert [rank.error for rank in (*timed, *checked)] == [None, None, 0.0, 0.0]
        assert len(fakes()) == 2


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("wrong", "wrong result on rank 1"),
        ("hang", r"timed out: no answer of rank \[1\]"),
        ("die", "rank 1 ended: about to die"),
        ("raise", "ValueError: not today"),
    ],
)
def test_a_peer_that_fails_is_reported_and_ended(mode, reason):
    lost: dict[str, str] = {}
    with fake(mode, slice_seconds=1.0) as peer:
        started = time.monotonic()
        done = Measurement(CASE, Budget(3, 0.001), lost).run([peer])
        assert time.monotonic() - started < 10
        assert not done.samples
        assert re.search(reason, lost["fake"]), lost
        if mode != "wrong":
            assert not fakes(), "ended at once: its ranks may spin"


def test_ranks_of_a_launcher_end_too(tmp_path):
    """They have process groups of their own."""
    command, variables = peers.commands(
        "openmpi", environment_with_fakes(tmp_path) / "bin" / "python", 2
    )
    variables |= {"FAKE_PEER": "hang"}
    with Peer("openmpi", command, 2, environment=variables, slice_seconds=1.0) as peer:
        assert peer.prepare(CASE) is None
        with pytest.raises(ContestantLost, match="timed out"):
            peer.slice(20, 0, False)
        assert not fakes()


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("early", "no luck today"), ("mute", "did not|came up|no answer")],
)
def test_a_peer_that_does_not_come_up_is_reported(mode, reason):
    with pytest.raises(ContestantLost, match=reason):
        fake(mode, start_seconds=2.0)


def test_a_command_that_does_nothing_of_the_kind_is_ended():
    program = "trap '' TERM; echo busy; while :; do sleep 0.1; done"
    with pytest.raises(ContestantLost, match=r"0 of 1 ranks came up in 0\.5 s: busy"):
        Peer("fake", [["sh", "-c", program]], 1, start_seconds=0.5)
    assert not fakes(program)


def test_a_command_that_is_missing_is_reported():
    with pytest.raises(ContestantLost, match="cannot be started"):
        Peer("fake", [["/nonexistent/mpirun"]], 1)


@pytest.mark.parametrize("mode", ["good", "unwatched", "hang"])
def test_peers_end_with_their_driver(mode):
    """Also when it cannot clean up, and in the middle of a call."""
    program = (
        "from time import sleep; from tp_kernels.bench.peers import Peer; "
        f"peer = Peer('fake', [{COMMAND!r}] * 2, 2); peer.prepare({CASE!r}); "
        "print('up', flush=True); peer.slice(20, 0, False); sleep(1000)"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "FAKE_PEER": mode},
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == b"up\n"
    assert len(fakes()) == 2
    deadline = time.monotonic() + 5
    while mode == "hang" and not any(map(ignores_term, fakes())):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    driver.kill()
    driver.wait()
    driver.stdout.close()
    while fakes() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_an_environment_without_peers_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "find_environment", lambda directory: None)
    without = Peers(without=["openmpi"])
    with ExitStack() as stack:
        assert without.start(stack, ("deepspeed", "openmpi"), 2, 1, True) == []
    assert without.not_run == [
        {"contestant": "deepspeed", "world": 2, "why": "not installed: make bench-peers"}
    ]
    with pytest.raises(UnsupportedError, match="make bench-peers"):
        Peers(tmp_path)


def test_the_environment_of_the_peers_is_found(tmp_path, monkeypatch):
    python = tmp_path / "bin" / "python"
    assert peers.find_environment(tmp_path) is None
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    assert peers.find_environment(tmp_path) == python  # the link, not what it points to
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setattr(peers, "__file__", str(tmp_path / "a" / "b" / "peers.py"))
    (tmp_path / ".venv-peers").symlink_to(tmp_path)
    assert peers.find_environment() == tmp_path / ".venv-peers" / "bin" / "python"


def test_open_mpi_has_a_launcher_and_others_have_none(tmp_path, monkeypatch):
    python = tmp_path / "bin" / "python"
    command, variables = peers.commands("deepspeed", python, 3)
    assert len(command) == 3 and command[0][:2] == [str(python), "-P"]
    assert variables["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "extensions")
    assert variables["PATH"].startswith(str(python.parent))
    for user, allowed in ((0, "1"), (1000, None)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        command, variables = peers.commands("openmpi", python, 3)
        assert variables.get("OMPI_ALLOW_RUN_AS_ROOT") == allowed
        assert len(command) == 1 and command[0][:3] == [str(python.parent / "mpirun"), "-n", "3"]


def test_settings_of_other_launchers_stay_outside(tmp_path):
    foreign = {
        "RANK": "1",
        "OMP_NUM_THREADS": "8",
        "PMIX_RANK": "3",
        "PYTHONPATH": "/x",
        "LANG": "C",
    }
    cleaned = peers.clean_environment(foreign, tmp_path)
    assert cleaned == {"LANG": "C", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    assert peers.clean_environment({"HOME": "/home"}, tmp_path)["HOME"] == "/home"


def test_ranks_get_cores_of_their_own_first():
    assert [cores_of(rank, 1, [2, 5]) for rank in range(4)] == [{2}, {5}, {2}, {5}]
    assert [cores_of(rank, 2, [0, 1, 2, 3]) for rank in range(2)] == [{0, 1}, {2, 3}]
    assert cores_of(0, 4, [0, 1]) == {0, 1}


def test_ctrl_c_ends_a_peer_that_hangs(tmp_path):
    """The whole command, with ranks of its own and a peer in the middle of a call."""
    environment = environment_with_fakes(tmp_path)
    driver = subprocess.Popen(
        [
            *(sys.executable, "-m", "tp_kernels.cli", "bench", "collectives", "--bytes", "4K"),
            *("--op", "all_reduce", "--dtype", "float32", "--peers", str(environment)),
        ],
        env={**os.environ, "FAKE_PEER": "hang"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while len(sleeping := [p for p in fakes() if ignores_term(p)]) < 1:
            assert time.monotonic() < deadline and driver.poll() is None
            time.sleep(0.02)
        assert sleeping
        ours = psutil.Process(driver.pid).children(recursive=True)
        os.killpg(driver.pid, signal.SIGINT)
        output, _ = driver.communicate(timeout=20)
        assert driver.returncode == 130, output
    finally:
        driver.kill()
        driver.wait()
    _, alive = psutil.wait_procs(ours, timeout=5)
    assert not alive


def ignores_term(process: psutil.Process) -> bool:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return False
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    return bool(ignored >> (signal.SIGTERM - 1) & 1)


def environment_with_fakes(directory: Path) -> Path:
    """Looks like what `make bench-peers` makes; ranks are fakes, also those of its launcher."""
    bin_ = directory / "peers" / "bin"
    bin_.mkdir(parents=True)
    scripts = {
        "python": f'exec {sys.executable} -P {FAKE} "$@"\n',
        "mpirun": (
            "for rank in $(seq 0 $(($2 - 1))); do\n"
            f"  TPK_BENCH_RANK=$rank {sys.executable} -P {FAKE} &\ndone\nwait\n"
        ),
    }
    for name, text in scripts.items():
        (bin_ / name).write_text("#!/bin/sh\n" + text)
        (bin_ / name).chmod(0o755)
    return bin_.parent
