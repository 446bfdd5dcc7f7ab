"""The signal protocol, checked exhaustively with spin; each mutant of the model must be found."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[2] / "csrc" / "tests" / "models"

pytestmark = pytest.mark.skipif(shutil.which("spin") is None, reason="spin is not installed")


def errors(directory: Path, model: str, *defines: str) -> int:
    """Build and run the verifier: assertion violations, deadlocks and lost wake-ups found."""
    flags = [f"-D{define}" for define in defines]
    subprocess.run(["spin", "-a", *flags, MODELS / model], cwd=directory, check=True)
    build = ["cc", "-O2", "-DSAFETY", "-DMEMLIM=2048", "-w", "-o", "pan", "pan.c"]
    subprocess.run(build, cwd=directory, check=True)
    report = subprocess.run(
        ["./pan", "-m200000"], cwd=directory, check=True, capture_output=True, text=True
    ).stdout
    assert "max search depth too small" not in report
    assert "out of memory" not in report
    return int(re.search(r"errors: (\d+)", report)[1])


@pytest.mark.parametrize(
    "defines",
    [
        ("RANKS=2", "ROUNDS=4"),
        ("RANKS=2", "ROUNDS=3", "BUFFERS=1"),
        ("RANKS=3", "ROUNDS=3"),
    ],
)
def test_rounds_neither_deadlock_nor_read_stale_data(tmp_path, defines):
    assert errors(tmp_path, "round.pml", *defines) == 0


@pytest.mark.parametrize(
    "mutant", ["NO_CREDIT", "EARLY_PUBLISH", "EARLY_FINISH", "NO_SECOND_WAIT", "PLAIN_COMPARE"]
)
def test_mutants_of_rounds_are_found(tmp_path, mutant):
    assert errors(tmp_path, "round.pml", "RANKS=2", mutant) > 0


@pytest.mark.parametrize("defines", [("CELLS=3",), ("CELLS=2",), ("CELLS=1", "LONGEST=3")])
def test_messages_arrive_in_order_and_whole(tmp_path, defines):
    assert errors(tmp_path, "ring.pml", *defines) == 0


@pytest.mark.parametrize(
    "mutant",
    [
        "NO_CREDIT",
        "EXTRA_CREDIT",
        "EARLY_PUBLISH",
        "EARLY_CREDIT",
        "CREDIT_AT_END",
        "NO_EMPTY_CREDIT",
        "EQUAL_COMPARE",
        "PLAIN_COMPARE",
        "CELL_BY_COUNT",
    ],
)
def test_mutants_of_rings_are_found(tmp_path, mutant):
    assert errors(tmp_path, "ring.pml", mutant) > 0


def test_no_wake_up_is_lost(tmp_path):
    assert errors(tmp_path, "sleep.pml") == 0


@pytest.mark.parametrize("mutant", ["WAKE_EARLY", "NO_COMPARE"])
def test_mutants_of_sleeping_are_found(tmp_path, mutant):
    assert errors(tmp_path, "sleep.pml", mutant) > 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_rounds_in_place(tmp_path, ranks):
    assert errors(tmp_path, "in_place.pml", f"RANKS={ranks}") == 0


@pytest.mark.parametrize(
    "mutant", ["NO_FIRST_WAIT", "EARLY_REDUCED", "NO_SECOND_WAIT", "NO_SETTLE"]
)
def test_mutants_of_rounds_in_place_are_found(tmp_path, mutant):
    assert errors(tmp_path, "in_place.pml", "RANKS=2", mutant) > 0
