"""The command as users run it: a process of its own, read through its output and exit status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

import tp_kernels
from tests.integrations.tiny_gguf import write_gguf
from tp_kernels.cli import doctor, main
from tp_kernels.cli.app import app
from tp_kernels.cli.demo import Row
from tp_kernels.cli.worker import Answer, Question, Source
from tp_kernels.integrations.checkpoint import stock_checkpoint

PROMPT = "#$%&"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny model as a GGUF file, already converted in the cache that `run` uses."""
    directory = tmp_path_factory.mktemp("model")
    file = write_gguf(directory / "tiny.gguf", layers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        stock_checkpoint(file)
    return file


@pytest.fixture(scope="module")
def expected(model) -> str:
    """What the plain model of transformers answers to PROMPT in eight tokens."""
    where = {"gguf_file": model.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.parent, **where)
    plain = transformers.AutoModelForCausalLM.from_pretrained(model.parent, **where)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    output = plain.generate(**inputs, max_new_tokens=8, do_sample=False)
    answer = output[0, inputs["input_ids"].shape[1] :]
    assert len(answer) == 8
    return tokenizer.decode(answer, skip_special_tokens=True)


def run(*command: str, model: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, COLUMNS="200")
    if model is not None:
        environment["XDG_CACHE_HOME"] = str(model.parent / "cache")
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
    )


def generate(model: Path | str, *options: str) -> list[str]:
    command = ["tp_kernels.cli", "generate", "--model", str(model), "--prompt", PROMPT]
    return [*command, "--max-new-tokens", "8", *options]


def test_generate_prints_the_answer_of_the_plain_model(model, expected):
    done = run(*generate(model, "--tp", "3", "--sequence-parallel"), model=model)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == expected


def test_generate_uses_the_ranks_of_torchrun(model, expected):
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    done = run(*launcher, *generate(model), model=model)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == expected


@pytest.mark.parametrize(
    ("name", "options", "environment", "explanation"),
    [
        ("no-such-model", (), {}, "package no_such_model: not installed"),
        ("", ("--tp", "4"), {}, "use at most 3 ranks"),
        ("", ("--tp", "3"), {"RANK": "0", "WORLD_SIZE": "2"}, "torchrun started 2 processes"),
    ],
)
def test_mistakes_are_explained_without_a_stack(
    model, monkeypatch, capsys, name, options, environment, explanation
):
    environment = {
        "XDG_CACHE_HOME": str(model.parent / "cache"),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
        **environment,
    }
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys, "argv", generate(name or model, *options))
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr()
    assert caught.value.code == 1
    assert printed.err.lstrip().startswith("error: ")
    assert explanation in printed.err
    assert "Traceback" not in printed.err and not printed.out


def test_demo_compares_and_agrees(model):
    options = ("--prompt", PROMPT, "--max-new-tokens", "8", "--rounds", "1")
    done = run("tp_kernels.cli", "demo", "--model", str(model), *options, model=model)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens identical: yes" in done.stdout
    for name in ("1 process, 2 threads", "2 ranks", "3 ranks"):
        assert re.search(rf"{name}.* \d+\.\d \(\d+\.\d\.\.\d+\.\d\)", done.stdout), done.stdout
    assert re.search(r"3 ranks.*\bhost\b", done.stdout), done.stdout


def test_a_row_of_the_demo_counts_the_slowest_rank():
    row = Row("", Source(Path()), ranks=None, threads=1)  # type: ignore[arg-type]
    for seconds in (1.0, 2.0, 4.0):
        quick = Answer([5, 6, 7], seconds / 2, 0.1, {"op": {"host": 3}})
        slow = Answer([5, 6, 7], seconds, 0.2, {"op": {"host": 3, "reference": 1}})
        row.rounds.append([slow, quick])
    assert row.speeds == [2.0, 1.0, 0.5]
    assert row.communication_ms == pytest.approx(100.0)
    assert row.implementations == "host, reference"
    assert row.tokens == {(5, 6, 7)}
    row.rounds[1][1].tokens[0] = 4
    assert len(row.tokens) == 2


def test_doctor_reports_what_runs():
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["usable"]
    assert found["versions"]["tp_kernels"] == tp_kernels.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["built"]["_host"]["built"]
    assert found["isa"]["used"] in found["isa"]["available"]
    assert found["short_way"] is True
    assert found["cores"]["usable"] == sorted(os.sched_getaffinity(0))
    for name in ("reference", "chunked", "host"):
        assert found["implementations"][name]["available"], found["implementations"]
    for name in ("triton", "cuda"):
        state = found["implementations"][name]
        why = "rank 0: CPU tensors need Triton's interpreter"
        assert not state["available"] and why in state["why"], state


def test_doctor_prints_tables(monkeypatch):
    monkeypatch.setattr(doctor, "_implementations", lambda *_: {"host": BROKEN})
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    for text in ("_host", "/dev/shm", "cores", "instruction set", "[sic]", "not usable"):
        assert text in done.stdout


BROKEN = {"available": False, "why": "a wrong result [sic]"}


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([1, 3], "1, 3")]
)
def test_runs_of_cores_are_short(numbers, text):
    assert doctor._ranges(numbers) == text


@pytest.mark.parametrize("command", [[], ["doctor"], ["generate"], ["demo"]])
def test_help_shows_how_to_start(command):
    done = CliRunner().invoke(app, [*command, "--help"])
    assert done.exit_code == 0
    assert "tp-kernels" in done.stdout


def test_version():
    done = CliRunner().invoke(app, ["--version"])
    assert done.stdout.strip() == tp_kernels.__version__


def test_a_question_is_encoded_with_the_template_of_the_chat(model):
    from tp_kernels.cli.worker import encode

    tokenizer = transformers.AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    encoded = encode(tokenizer, Question("#$", system="!"))
    assert encoded["input_ids"].tolist() == [tokenizer.convert_tokens_to_ids(list("!#$"))]
    tokenizer.chat_template = None
    assert encode(tokenizer, Question("#$"))["input_ids"].shape == (1, 2)
