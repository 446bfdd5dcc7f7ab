"""`tp-kernels pipeline simulate` as users run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tp_kernels import ShapeError, UnsupportedError
from tp_kernels.cli.app import app
from tp_kernels.pipeline.generators import one_f_one_b, zero_bubble_h1
from tp_kernels.pipeline.schedule import Schedule, ScheduleError


def simulate(*arguments: object) -> str:
    done = CliRunner().invoke(
        app, ["pipeline", "simulate", *map(str, arguments)], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return done.output


def test_one_schedule() -> None:
    text = simulate("--schedule", "one_f_one_b", "--ranks", 2, "--micro-batches", 3)
    assert str(one_f_one_b(2, 3)) in text
    assert "one_f_one_b: 12.00 s, bubble 33.3% of ideal, 25.0% of total" in text
    text = simulate(
        *(
            "--schedule",
            "interleaved_one_f_one_b",
            "--ranks",
            2,
            "--micro-batches",
            2,
            "--chunks",
            3,
        ),
        *("--forward", "1,1,1,1,1,2", "--backward", "0.5", "--communication", "0.25"),
    )
    assert "2 ranks, 6 stages, 2 micro-batches" in text and "transfer s" in text


def test_files(tmp_path: Path) -> None:
    costs = {"forward": [1.0, 2.0], "backward_input": 1.5, "activation": 3.0, "unit": "bytes"}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    table, trace, picture = (
        tmp_path / "table.csv",
        tmp_path / "trace.json",
        tmp_path / "picture.png",
    )
    text = simulate(
        *("--schedule", "zero_bubble_h1", "--ranks", 2, "--micro-batches", 3),
        *("--costs", tmp_path / "costs.json", "--forward", "1,2.5"),  # an option wins
        *("--csv", table, "--chrome", trace, "--picture", picture),
    )
    assert all(f"wrote {path}" in text for path in (table, trace, picture))
    assert Schedule.from_csv(table.read_text(), name="zero_bubble_h1") == zero_bubble_h1(2, 3)
    found = json.loads(trace.read_text())["traceEvents"]
    assert {e["dur"] for e in found if e["ph"] == "X" and e["cat"] == "F"} == {1e6, 2.5e6}
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = simulate("--schedule", table, "--costs", tmp_path / "costs.json", "--forward", "1,2.5")
    assert again.splitlines()[-1].split(": ")[1] in text
    broken = table.read_text().replace("1F0", "1F1", 1)
    table.write_text(broken)
    with pytest.raises(ScheduleError, match="rank 1, step 3, 1F1: happens twice"):
        simulate("--schedule", table)


def test_compare(tmp_path: Path) -> None:
    text = simulate("--compare", "--memory-limit", 5)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line[:1].isalpha()}
    assert rows["gpipe"] == ["4", "33", "37.5%", "27.3%", "37.5%", "8", ">", "5"]
    assert rows["one_f_one_b"] == ["4", "33", "37.5%", "27.3%", "37.5%", "4"]
    # Two stages per rank, each half of the rank's share.
    assert rows["zero_bubble_v"] == ["8", "25.5", "6.2%", "5.9%", "0.0%", "4"]
    assert rows["interleaved_one_f_one_b"][:3] == ["8", "28.5", "18.8%"]
    size = ("--ranks", 2, "--micro-batches", 2)
    uneven = simulate("--compare", *size, "--forward", "1,3", "--picture", tmp_path / "all.png")
    assert "zero_bubble_v" in uneven and (tmp_path / "all.png").exists()


def test_search(tmp_path: Path) -> None:
    costs = ("--forward", "1,2,1", "--backward-input", "2,2,1", "--backward-weight", "1,1,3")
    size = ("--ranks", 3, "--micro-batches", 6)
    text = simulate("--search", "--memory-limit", 3, *costs, *size, "--csv", tmp_path / "found.csv")
    assert "search: 33.00 s" in text
    again = simulate("--schedule", tmp_path / "found.csv", *costs)
    assert "found: 33.00 s" in again


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give one of --schedule, --compare and --search, not none"),
        ("--schedule gpipe --search", "not --schedule and --search"),
        ("--schedule gpipe --memory-limit 3", "use it with --search or --compare"),
        ("--schedule gpype", "known are gpipe"),
        ("--schedule gpipe --chunks 2", "gpipe has a fixed number of stages per rank"),
        ("--schedule none.csv", "none.csv: .*No such file"),
        ("--compare --csv x.csv", "--csv has no effect with --compare"),
        ("--compare --communication 1,2,3", "give one number for all messages"),
        ("--schedule gpipe --costs none.json", "--costs none.json: .*No such file"),
        ("--schedule gpipe --forward a,b", "--forward a,b: use a number such as 0.5"),
        ("--schedule gpipe --forward 1,2", "forward has 2 numbers, but 4 stages need 4"),
        ("--search --memory-limit 0.5", "the memory limit is 0.5"),
        ("--schedule gpipe --csv none/x.csv", "--csv none/x.csv: there is no directory none"),
        ("--schedule gpipe --chrome .", "--chrome .: is a directory"),
        ("--schedule gpipe --picture x.xyz", "--picture x.xyz: use a name that ends in .png"),
    ],
)
def test_refuses(arguments: str, message: str) -> None:
    with pytest.raises((UnsupportedError, ShapeError, ScheduleError), match=message):
        simulate(*arguments.split())


def test_costs_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    for text in ("[1]", '{"forward": [1, null]}', '{"forwards": 1}', "{", '{"forward": "one"}'):
        path.write_text(text)
        with pytest.raises(UnsupportedError, match="--costs"):
            simulate("--schedule", "gpipe", "--costs", path)


def test_tables_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "binary.csv"
    path.write_bytes(b"\xff\x00")
    with pytest.raises(UnsupportedError, match=r"--schedule .*binary\.csv: .*decode"):
        simulate("--schedule", path)
