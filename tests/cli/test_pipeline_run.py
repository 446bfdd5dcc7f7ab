"""`tp-kernels pipeline plan` and `run` as users run them, with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from unittest import mock

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.integrations.tiny_gguf import write_gguf
from tp_kernels import ShapeError, UnsupportedError
from tp_kernels.cli import pipeline_cuts
from tp_kernels.cli import pipeline_run as command
from tp_kernels.cli.app import app
from tp_kernels.integrations.checkpoint import stock_checkpoint
from tp_kernels.pipeline.partition import partition
from tp_kernels.pipeline.plan import LayerCost, Plan


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Four layers, in the cache of the commands of this file."""
    directory = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        file = write_gguf(directory / "tiny.gguf", layers=4)
        stock_checkpoint(file)
        yield file


@pytest.fixture
def shared_ranks(world, monkeypatch):
    """Commands use the ranks that other tests started, and this process where they want a single one."""

    class Shared:
        threads = 1

        def __init__(self, size, threads=None):
            self.size = size

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def run(self, function, *arguments):
            return (
                [function(*arguments)]
                if self.size == 1
                else world(self.size).run(function, *arguments)
            )

    monkeypatch.setattr("tp_kernels.Ranks", Shared)
    monkeypatch.setattr(pipeline_cuts, "Ranks", Shared)


def pipeline(*arguments: object, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["pipeline", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == status, done.output
    return done.output


def test_plan_and_run(model, tmp_path, shared_ranks):
    """The cut that `plan` writes is the one that `run` uses; tokens are those of one process."""
    cut, costs = tmp_path / "cut.json", tmp_path / "costs.json"
    text = pipeline(
        *("plan", "--model", model, "--stages", 2, "--schedule", "forward_only", "--decode"),
        *("--sequence", 8, "--repeats", 2, "--threads", 1, "--json", cut, "--save-costs", costs),
    )
    assert "2 stages by profile, forward_only, 4 micro-batches: a step takes" in text
    assert "embedding" in text and "..head" in text and f"wrote {cut}" in text
    assert [one["name"] for one in json.loads(costs.read_text())][::5] == ["embedding", "head"]
    again = pipeline(
        *("plan", "--costs", costs, "--schedule", "forward_only", "--method", "uniform"),
        *("--json", cut, "--memory", "1GiB", "--picture", tmp_path / "plan.png"),
    )
    assert "of 1 GiB" in again and (tmp_path / "plan.png").stat().st_size > 1000
    assert Plan.from_json(cut.read_text()).bounds == (0, 3, 6)

    trace, picture = tmp_path / "trace.json", tmp_path / "run.png"
    text = pipeline(
        *(
            "run",
            "--model",
            model,
            "--plan",
            cut,
            "--prompt",
            "#$%&",
            "--prompt",
            "()*",
            "--prompt",
            "+",
        ),
        *(
            "--max-new-tokens",
            6,
            "--threads",
            1,
            "--check",
            "--chrome",
            trace,
            "--picture",
            picture,
        ),
    )
    assert "tokens identical: yes" in text and "18 tokens of 3 prompts" in text, text
    assert "up to 3 groups of 1 under way; MiB of weights by stage:" in text
    assert json.loads(trace.read_text())["traceEvents"] and picture.stat().st_size > 1000


def test_tensor_ranks_in_a_stage(model, shared_ranks):
    text = pipeline(
        *(
            "run",
            "--model",
            model,
            "--stages",
            1,
            "--tensor",
            2,
            "--prompt",
            "#$%&",
            "--prompt",
            "'",
        ),
        *("--max-new-tokens", 5, "--batch", 2, "--threads", 1, "--check"),
    )
    assert "tokens identical: yes" in text and "up to 2 groups of 2" in text, text


def test_torchrun(model, tmp_path):
    """The processes of a launcher; rank 0 prints once."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "tp_kernels.cli", "pipeline", "run", "--model", str(model), "--prompt", "#$%&"),
        *("--max-new-tokens", "3", "--chrome", str(tmp_path / "trace.json")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("3 tokens of 1 prompts") == 1, done.stdout
    assert (tmp_path / "trace.json").exists()


def test_a_model_without_weights(model, tmp_path):
    config = json.loads((stock_checkpoint(model) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))
    text = pipeline("plan", "--model", tmp_path, "--stages", 3, "--sequence", 5, "--repeats", 1)
    assert "3 stages by profile, one_f_one_b, 6 micro-batches" in text


def test_what_would_fit(tmp_path):
    costs = [{"name": f"l{i}", "forward": 1.0, "parameter_bytes": 1 << 20} for i in range(4)]
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    with pytest.raises(
        UnsupportedError, match=r"device 1 .* What would fit: 8 MiB on every device"
    ):
        pipeline("plan", "--costs", tmp_path / "costs.json", "--memory", "8MiB,4M")


def test_refusals(tmp_path, monkeypatch):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text("")
    nowhere = tmp_path / "missing" / "file.json"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for text, arguments in {
        "leave --stages out": ("run", "--plan", "x", "--stages", 2),
        "--seed has no effect": ("run", "--seed", 3),
        "leave --temperature out": ("run", "--check", "--temperature", 1),
        "--decode measures inference": ("plan", "--decode"),
        "--rounds has no effect": ("plan", "--rounds", 2),
        "use --stages 2 --schedule forward_only": ("plan", "--try-all"),
        "stages of one thread": (
            *("plan", "--try-all", "--schedule", "forward_only", "--threads", 2),
        ),
        "give its --bandwidth": ("plan", "--latency", 1),
        "not what --save-costs writes": ("plan", "--costs", tmp_path / "none"),
        "--plan .*none": ("run", "--plan", tmp_path / "none"),
        "--plan .*binary.*codec": ("run", "--plan", tmp_path / "binary"),
        "--plan .*empty: not a plan": ("run", "--plan", tmp_path / "empty"),
        "--costs .*binary": ("plan", "--costs", tmp_path / "binary"),
        "--costs .*empty": ("plan", "--costs", tmp_path / "empty"),
        "--json .*: there is no directory": ("plan", "--json", nowhere),
        "--save-costs .*: there is no directory": ("plan", "--save-costs", nowhere),
        "--chrome .*: there is no directory": ("run", "--chrome", nowhere),
        "--picture .*: use a name": ("run", "--picture", tmp_path / "x.xyz"),
        "--picture .*: is a directory": ("plan", "--picture", tmp_path),
        "leave them out under torchrun": ("run", "--check"),
    }.items():
        with pytest.raises(UnsupportedError, match=text):
            pipeline(*arguments)
    (tmp_path / "costs.json").write_text("[]")
    for option, wrong in (("--memory", "4 apples"), ("--speeds", "fast"), ("--bandwidth", "1..2G")):
        with pytest.raises(ShapeError, match=option):
            pipeline("plan", "--costs", tmp_path / "costs.json", option, wrong)


def test_check_sees_a_wrong_token(monkeypatch):
    job = command_job()
    ranks = mock.MagicMock()
    ranks.return_value.__enter__.return_value.run.return_value = [([[1, 2], [3]], 2.0)]
    monkeypatch.setattr("tp_kernels.Ranks", ranks)
    for tokens, same in (([[1, 2], [3]], True), ([[1, 2], [4]], False)):
        out = StringIO()
        found = mock.Mock(tokens=tokens, count=3)
        assert command._check(Console(file=out, width=200), job, found, 1) is same
        assert f"tokens identical: {'yes' if same else 'no'}" in out.getvalue()
        assert "1 thread, prompts one by one: 1.5 tokens/s" in out.getvalue()


def command_job():
    from tp_kernels.cli.pipeline_worker import Job

    return Job("nowhere", 2, 2, 1, ("a", "b"), 4, 3, 1, 0.0, 0)


def test_every_cut(monkeypatch):
    """The verdict on a plan, from times that are made up: the best of all cuts, and another."""
    costs = [LayerCost(f"l{i}", seconds) for i, seconds in enumerate((1.0, 2.0, 4.0, 3.0))]
    plan = partition(costs, 2, speeds=[1.0, 0.5], schedule="forward_only", micro_batches=4)
    assert plan.bounds == (0, 3, 4)
    monkeypatch.setattr(pipeline_cuts, "converted", lambda model, bars: model)
    monkeypatch.setattr(pipeline_cuts, "Ranks", mock.MagicMock())
    run = pipeline_cuts.Ranks.return_value.__enter__.return_value.run
    for times, share, verdict in (
        ({1: 9.0, 2: 4.0, 3: 2.0}, 1.0, "reached"),
        ({1: 9.0, 2: 1.0, 3: 2.0}, 0.5, "missed"),
    ):
        run.side_effect = lambda function, trial, bounds, times=times: [
            (0.5, 0.1),
            (times[bounds[1]], times[bounds[1]]),
        ]
        run.reset_mock()
        out = StringIO()
        found = pipeline_cuts.try_cuts(Console(file=out, width=200), "m", costs, plan, (1, 8), 2)
        text = out.getvalue()
        assert found == share and f"aimed at 90%: {verdict}" in text, text
        assert f"computes at {share:.1%} of the pace" in text
        assert run.call_count == 1 + 2 * 3
        assert run.call_args_list[0].args[1].slowdowns == (1.0, 2.0)
        lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("l")}
        assert "the plan" in lines["l2"] and "7 s" in lines["l2"]
        assert lines["l2"].count(f"{share:.1%}") == 2 and "the plan" not in lines["l1"]


def test_every_cut_runs(model, shared_ranks):
    text = pipeline(
        *("plan", "--model", model, "--schedule", "forward_only", "--try-all", "--rounds", 1),
        *("--sequence", 4, "--repeats", 1, "--micro-batches", 2, "--speeds", "1,0.5"),
    )
    assert "stages slowed 1x, 2x" in text and "layer 3" in text, text
