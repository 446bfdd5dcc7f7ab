"""`tp-kernels tune` as users run it: in the interpreter, and on a machine that has no GPU."""

from __future__ import annotations

import builtins
import json
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from tests.planning.test_cache import ENTRY, GPU, SHAPE
from tp_kernels import ShapeError, UnsupportedError
from tp_kernels.cli import tune as command
from tp_kernels.cli.app import app
from tp_kernels.planning import cache


def tune(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["tune", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_interpreter(tmp_path):
    path = tmp_path / "tilings.json"
    path.write_text("{}")
    text = tune(
        *("--interpreter", "--cache", path, "--op", "linear_all_reduce", "--dtype", "float32"),
        *("--shape", "3,17,32", "--shape", "4,20,24", "--rounds", 1, "--turn", 1e-4),
    )
    assert "interpreted, not a GPU time" in text and "4 of 4" in text
    assert "linear_all_reduce 3 x 17 x 16 float32" in text  # K of one rank
    assert "4 x 20 x 12 float32 is left out: it takes the tiling of" in text
    assert "is ignored: no document with a schema; moved to" in text and f"wrote {path}" in text
    (table,) = json.loads(path.read_text())["tables"]
    assert table["hardware"]["capability"] == 0 and len(table["entries"]) == 1
    assert table["entries"][0]["shape"] == {
        "operation": "linear_all_reduce", "shots": 1, "itemsize": 4, "world": 2, "rows": 4,
        "width": 32, "inner": 16,
    }  # fmt: skip
    shown = tune("--show", "--cache", path)
    assert "Triton interpreter (interpreter)" in shown and "not a GPU time" in shown


def test_show(tmp_path, monkeypatch):
    monkeypatch.setenv("TP_KERNELS_CACHE", str(tmp_path))
    path = tmp_path / "tilings.json"
    assert "nothing measured yet" in tune("--show")
    cache.add(path, GPU, {SHAPE: ENTRY})
    text = tune("--show")
    assert "NVIDIA H200 (sm_90), Triton 3.7.1" in text and "not a GPU time" not in text
    assert "64 x 64 x 64" in text and "12.5 (12.0..13.2)" in text and "1.20" in text
    path.write_text("")
    assert "is ignored" in tune("--show")


def test_nothing_could_be_tuned(tmp_path, monkeypatch):
    ranks = mock.MagicMock()
    answer = command.Answer(GPU, [], ["a product: does not work"])
    ranks.return_value.__enter__.return_value.run.return_value = [answer]
    monkeypatch.setattr(command, "Ranks", ranks)
    with pytest.raises(UnsupportedError, match="no product could be tuned"):
        tune("--interpreter", "--cache", tmp_path / "tilings.json")
    assert ranks.call_args.kwargs["env"] == {"TRITON_INTERPRET": "1"}


def test_no_gpu(monkeypatch):
    for found, version, available, count in (
        ("is built without CUDA", None, False, 0),
        ("sees no CUDA device", "12.8", False, 0),
        ("torch sees 1 ", "12.8", True, 1),
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(UnsupportedError, match=f"{found}.*tp-kernels tune --interpreter"):
            tune()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    command.check_devices(2)


def test_no_triton(monkeypatch):
    real = builtins.__import__

    def fail(name, *rest):
        if name == "" and rest[2] == ("tune",):
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(UnsupportedError, match="pip install 'tp_kernels\\[triton\\]'"):
        tune("--show")


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ShapeError, ("--shape", "1,2")),
        (ShapeError, ("--shape", "1,2,x")),
        (ShapeError, ("--shape", "0,2,3")),
        (ShapeError, ("--nproc", 1)),
        (UnsupportedError, ("--show",)),
        (UnsupportedError, ("--dtype", "float64")),
        (UnsupportedError, ("--op", "linear")),
    ],
)
def test_refused(error, arguments):
    with pytest.raises(error):
        tune("--interpreter", *arguments)


def test_help_teaches():
    text = " ".join(CliRunner().invoke(app, ["tune", "--help"]).output.split())
    for words in ("slowest rank", "never its result", "tp-kernels tune --show", "M,N,K"):
        assert words in text
