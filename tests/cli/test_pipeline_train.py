"""`tp-kernels pipeline train` as users run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tp_kernels import UnsupportedError
from tp_kernels.cli import pipeline_train
from tp_kernels.cli.app import app
from tp_kernels.cli.pipeline_trainer import Settings, batch, cuts, read

SMALL = ("--hidden", 16, "--heads", 2, "--tokens", 8, "--batch", 6, "--layers", 2)


def train(*arguments: object, fails: bool = False) -> str:
    done = CliRunner().invoke(
        app, ["pipeline", "train", *map(str, (*SMALL, *arguments))], catch_exceptions=False
    )
    assert (done.exit_code != 0) == fails, done.output
    return done.output


def settings(**options: object) -> Settings:
    values = {
        "schedule": "one_f_one_b",
        "stages": 2,
        "tensor": 1,
        "data": 1,
        "micro_batches": 2,
        "steps": 1,
        "layers": 5,
        "hidden": 16,
        "heads": 2,
        "tokens": 8,
        "batch": 4,
        "tied": True,
        "checkpoint": False,
        "learning_rate": 0.1,
        "seed": 0,
    }
    return Settings(**{**values, **options})


@pytest.mark.parametrize(
    "options",
    [
        ("--schedule", "zero_bubble_v", "--micro-batches", 4, "--checkpoint"),  # 6 rows in 4 parts
        ("--stages", 2, "--tensor", 2, "--schedule", "zero_bubble_h1", "--no-tied", "--explain"),
    ],
)
def test_equals_one_process(options: tuple[object, ...]) -> None:
    text = train("--steps", 2, "--check", *options)
    assert "losses equal to one process" in text
    assert ("o_proj.weight: later (delay_wgrad=True)" in text) == ("--explain" in options)


def test_without_a_flush_and_files(tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text("to be or not to be, " * 50)
    picture, chrome = tmp_path / "steps.png", tmp_path / "trace.json"
    text = train(
        *("--schedule", "pipedream", "--steps", 12, "--text", source, "--explain"),
        *("--picture", picture, "--chrome", chrome),
    )
    assert "stage 0 on rank 0: keeps its activations, stashes weights" in text
    table = text.split("stage 0 on rank 0")[0]
    losses = [float(line.split()[1]) for line in table.splitlines() if line[:4].strip().isdigit()]
    assert losses[-1] < 0.85 * losses[0]  # it learns
    assert picture.read_bytes()[:4] == b"\x89PNG"
    names = {event.get("name") for event in json.loads(chrome.read_text())["traceEvents"]}
    assert {"0F0", "1B3"} <= names, names


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """--check fails where losses are further apart than allowed."""
    monkeypatch.setattr(pipeline_train, "BOUND", -1.0)
    assert "NOT equal" in train("--steps", 1, "--check", "--stages", 1, fails=True)


def test_stages_cover_the_model() -> None:
    for stages in range(1, 7):
        parts = cuts(settings(stages=stages))
        assert [i for part in parts for i in part] == list(range(7))
        assert all(parts)
    assert len(cuts(settings(schedule="zero_bubble_v", stages=2))) == 4


def test_batches() -> None:
    """Replicas and steps draw different rows; a default text is there."""
    text = read(None)
    assert text.numel() > 100_000 and text.dtype == torch.int64
    ids, target = batch(text, settings(), 0)
    assert torch.equal(ids[:, 1:], target[:, :-1])
    again, other, replica = (batch(text, settings(), s, r)[0] for s, r in ((0, 0), (1, 0), (0, 1)))
    assert torch.equal(ids, again) and not torch.equal(ids, other)
    assert not torch.equal(ids, replica)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--schedule", "forward_only"), "schedules that train are gpipe"),
        (("--schedule", "pipedream", "--check"), "does not equal one process"),
        (("--stages", 5), "--layers 2: 5 stages"),
    ],
)
def test_refused(options: tuple[object, ...], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        train(*options)
