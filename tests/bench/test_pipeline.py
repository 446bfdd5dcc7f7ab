"""`tp-kernels bench pipeline`: it runs, and its verdict is that of the numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tp_kernels import ShapeError
from tp_kernels.bench import report
from tp_kernels.bench.pipeline import FORMULAS, Settings, row_of, show
from tp_kernels.cli.app import app
from tp_kernels.pipeline.generators import SCHEDULES
from tp_kernels.pipeline.simulate import Costs
from tp_kernels.pipeline.timeline import Timeline


def test_command(tmp_path: Path) -> None:
    names = "one_f_one_b,dual_pipe_v"
    sizes = ["--world", "2", "--micro-batches", "4", "--seconds", "0.002", "--steps", "1"]
    done = CliRunner().invoke(
        app, ["bench", "pipeline", "--schedule", names, *sizes, "--output", str(tmp_path)]
    )
    assert done.exit_code in (0, 1), done.output
    assert "of 2 rows within 3 points" in done.output
    found = report.load(tmp_path / "pipeline.json")
    assert [row["case"]["schedule"] for row in found["results"]] == names.split(",")
    assert (done.exit_code == 0) == all(row["derived"]["target"] for row in found["results"])
    for row in found["results"]:
        # Sleeping takes at least its time, so nothing is faster than the simulation.
        assert (
            row["contestants"]["runner"]["median_us"] >= row["derived"]["simulated_seconds"] * 1e6
        )
    assert (tmp_path / "pipeline-2.png").read_bytes().startswith(b"\x89PNG")
    json.dumps(found)


@pytest.mark.parametrize("name", sorted(FORMULAS))
@pytest.mark.parametrize("world", [2, 4])
def test_formulas_are_those_of_the_simulation(name: str, world: int) -> None:
    settings = Settings(seconds=0.5)
    for m in (2 * world, 4 * world):
        schedule = SCHEDULES[name](world, m)
        seconds = 0.5 * world / schedule.stages
        steps = [schedule.simulate(Costs(seconds, seconds, seconds))]
        row, shown = row_of(name, world, replace(settings, micro_batches=m), steps)
        facts = row["derived"]
        assert facts["formula"] == pytest.approx(facts["simulated"], abs=1e-9)
        assert facts["measured"] == facts["simulated"] and facts["target"]
        assert [timeline.name for timeline in shown] == [name, f"{name} simulated"]


def later(timeline: Timeline, seconds: float) -> Timeline:
    """As if the last rank had begun everything so much later."""
    last = max(timeline.ranks)
    return replace(
        timeline,
        events=tuple(
            e._replace(start=e.start + seconds, end=e.end + seconds) if e.rank == last else e
            for e in timeline.events
        ),
    )


def test_verdict_follows_the_measurement() -> None:
    settings = Settings(seconds=1.0, micro_batches=8)
    true = SCHEDULES["one_f_one_b"](2, 8).simulate(Costs())
    # The ideal time is 24 s; the last rank ends 2 s before the end.
    for seconds, met in ((0.0, True), (2.5, True), (3.0, False)):
        row, _ = row_of("one_f_one_b", 2, settings, [later(true, seconds)])
        assert row["derived"]["target"] is met
        assert row["derived"]["measured"] == pytest.approx((3 + max(0.0, seconds - 2)) / 24)
    # The median of the steps counts.
    row, _ = row_of("one_f_one_b", 2, settings, [true, later(true, 9.0), true])
    assert row["derived"]["target"]
    row, _ = row_of("one_f_one_b", 2, settings, [true, later(true, 9.0), later(true, 8.0)])
    assert not row["derived"]["target"]
    console = Console(record=True, width=160)
    show(console, [row])
    text = console.export_text()
    assert "miss" in text and "0 of 1 rows within 3 points; largest difference 25.0 points" in text


def test_sizes_without_formula() -> None:
    for size in (
        ["--world", "1"],
        ["--micro-batches", "6", "--world", "4"],
        ["--micro-batches", "9"],
    ):
        with pytest.raises(ShapeError, match=r"formulas hold|no pipeline"):
            CliRunner().invoke(app, ["bench", "pipeline", *size], catch_exceptions=False)
