"""Checks that hang, break their process or come too late, on a machine without a GPU; and the report."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import check_counts
from tests.gpu import __main__ as command
from tests.gpu import checks
from tests.gpu.runner import Check, Outcome, Runner, Skipped, prepare


def fail() -> None:
    raise ValueError("wrong bits")


def collect() -> list[Check]:
    return [
        Check("process", os.getpid),
        Check("fail", fail),
        Check("hang", lambda: time.sleep(600), 0.5),
        Check("die", lambda: os.kill(os.getpid(), signal.SIGKILL)),
        Check("after", os.getpid),
        Check("lack", lack),
        Check("again", os.getpid),
        Check("write", lambda: None, prepare=write),
        Check("not prepared", lambda: None, prepare=fail),
    ]


def lack() -> None:
    raise Skipped("no such tool")


def write() -> None:
    Path(os.environ["PREPARED"]).touch()


def healthy() -> None:
    pass


def broken() -> None:
    raise RuntimeError("an illegal memory access was encountered")


def test_a_check_that_hangs_or_dies_costs_only_itself():
    seen: list[Outcome] = []
    outcomes = Runner(collect, healthy).run(collect()[:7], seen.append)
    assert seen == outcomes
    assert [outcome.status for outcome in outcomes] == [
        "passed",
        "failed",
        "failed",
        "failed",
        "passed",
        "skipped",
        "passed",
    ]
    messages = [outcome.message for outcome in outcomes]
    assert "wrong bits" in messages[1] and "no end after" in messages[2]
    assert "the process ended" in messages[3]
    assert messages[5] == "no such tool"
    first, *_, after, _, again = (outcome.data for outcome in outcomes)
    assert first != after == again


def test_prepare(tmp_path, monkeypatch):
    monkeypatch.setenv("PREPARED", str(tmp_path / "file"))
    prepare(collect, ["write", "not prepared"], 2, 60)
    assert (tmp_path / "file").exists()


def test_a_broken_device_is_left():
    some = [check for check in collect() if check.name in ("process", "fail", "after")]
    first, _, after = Runner(collect, broken).run(some, lambda _: None)
    assert first.data != after.data


def test_what_has_not_begun_in_time_has_failed():
    (outcome,) = Runner(collect, healthy, budget=0).run(collect()[:1], lambda _: None)
    assert (outcome.status, outcome.message) == ("failed", "not run: the time is up")


def test_names_are_unique():
    names = [check.name for check in checks.collect()]
    assert len(names) == len(set(names)) > 100


def test_report_without_a_device(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: False)
    path = tmp_path / "report.xml"
    assert command.main(["--only", "epochs|absent rank all_gather$", "--junit", str(path)]) == 0
    assert "0 passed, 0 failed, 2 skipped (no CUDA device)" in capsys.readouterr().out
    counts, reasons = check_counts.read(path)
    assert counts == {"skipped": 2} and reasons == {"no CUDA device": 2}


def test_report_with_outcomes(tmp_path: Path):
    samples = {"kernel": {"median_us": 10.0, "p10_us": 9.0, "p90_us": 12.0}}
    times = {"name": "sum", "samples": samples, "ratio": 0.5, "target": 0.85}
    outcomes = [
        Outcome("a", "passed", 1.0, data=times),
        Outcome("b", "failed", 2.0, 'line\n"last" <line>'),
    ]
    command.write_junit(tmp_path / "report.xml", outcomes)
    failure = ElementTree.parse(tmp_path / "report.xml").find("testcase/failure")
    assert failure is not None and '"last" <line>' in failure.get("message", "")
    assert check_counts.read(tmp_path / "report.xml")[0] == {"passed": 1, "failed": 1}
    text = command.summary(outcomes)
    assert "0.500    0.85  below" in text and '"last" <line>' in text
    assert (
        command.short(outcomes[0]) == ": 0.500" and command.short(outcomes[1]) == ': "last" <line>'
    )


@pytest.mark.parametrize("name", ["NVIDIA H200", "nvidia--h200 "])
def test_slug(monkeypatch, name):
    monkeypatch.setattr(command.torch.cuda, "get_device_name", lambda _: name)
    assert command.slug() == "nvidia-h200"
