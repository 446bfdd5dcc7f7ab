"""Numbers that follow from times, reports as files, tables and pictures, and their comparison."""

from __future__ import annotations

import builtins
import json
import math
import os
import platform
import socket
from functools import partial

import pytest
from rich.console import Console

from tp_kernels import UnsupportedError
from tp_kernels.bench import (
    block,
    collectives,
    compare,
    linear,
    measure,
    plots,
    report,
    tables,
)
from tp_kernels.bench.environment import differences, environment
from tp_kernels.bench.timing import Sample

FACTS = environment({"openmpi": "5.0"})


def sample(median: float, low: float = 0.9, high: float = 1.2) -> Sample:
    """Of `median` microseconds."""
    return Sample([median * 1e-6 * factor for factor in (low, 1.0, high)])


def document(kind: str, *rows: dict, not_run=()) -> dict:
    return report.document(kind, FACTS, {"threads": 1}, rows, list(not_run))


def collective_row(size: int, **medians: float) -> dict:
    case = {"op": "all_reduce", "dtype": "float32", "world": 2, "bytes": size}
    samples = {name: sample(median, 1.0, 1.0) for name, median in medians.items()}
    return measure.row(case, samples, {}, collectives.derived)


def linear_row(rows: int = 128, way: str = "forward", **microseconds: float) -> dict:
    case = {"op": "linear_all_reduce", "pass": way, "dtype": "float32", "world": 2}
    case |= {"hidden": 512, "rows": rows}
    samples = {name.replace("_", " "): sample(value) for name, value in microseconds.items()}
    auto = "host" if "host" in samples else "local"
    return measure.row(case, samples, {}, partial(linear.derived, auto=auto))


def block_row(part: str, rows: int) -> dict:
    case = {"part": part, "pass": "forward", "dtype": "float32", "world": 2}
    case |= {"hidden": 576, "rows": rows}
    microseconds = {"host": 1e3, "reference": 2e3, "1 process, 1 thread": 3e3}
    samples = {name: sample(value) for name, value in microseconds.items()}
    return measure.row(case, samples, {}, block.derived)


REPORTS = {
    "collectives": document(
        "collectives",
        collective_row(1024, host=4.0, raw=2.0, gloo=400.0, deepspeed=6.0),
        collective_row(1 << 20, host=100.0, gloo=1000.0, openmpi=150.0),
        collective_row(4 << 20, host=100.0),
        not_run=[{"contestant": "deepspeed", "world": 2, "why": "timed out [sic]"}],
    ),
    "linear": document(
        "linear",
        linear_row(gemm=100, comm=40, serial=150, host=110, reference=300, openmpi=165),
        linear_row(1, gemm=20, gemm_mv=10, comm=4, comm_raw=2, serial=15, host=13, reference=90),
        linear_row(1, "backward", gemm=30, local=40),
    ),
    "block": document("block", block_row("mlp", 1), block_row("mlp", 128), block_row("block", 128)),
}


# What follows from times.


@pytest.mark.parametrize(
    ("gemm", "serial", "fused", "e"),
    [(100, 150, 100, 1.0), (100, 150, 150, 0.0), (100, 150, 110, 0.8), (100, 150, 175, -0.5)],
)
def test_efficiency_is_the_share_of_communication_that_is_hidden(gemm, serial, fused, e):
    assert linear.efficiency(gemm, serial, fused) == pytest.approx(e)
    assert linear.efficiency(gemm, gemm, fused) is None
    assert linear.efficiency(gemm, gemm - 1, fused) is None


def test_a_fused_op_is_held_against_its_limits():
    found = REPORTS["linear"]["results"][0]["derived"]
    assert found["fused"] == "host" and found["best_gemm"] == "gemm" and found["communicates"]
    assert found["efficiency"] == pytest.approx(0.8)
    assert found["ideal_over_fused"] == pytest.approx(100 / 110)
    assert found["serial_over_fused"] == pytest.approx(150 / 110)
    assert (found["best_peer"], found["best_peer_over_fused"]) == ("openmpi", pytest.approx(1.5))
    assert found["overhead_us"] is None
    assert found["targets"] == {
        "ideal_over_fused": False,
        "serial_over_fused": True,
        "overhead": None,
    }


def test_where_communication_takes_longer_it_is_the_limit():
    found = linear_row(gemm=10, comm=40, serial=50, host=41)["derived"]
    assert found["ideal_over_fused"] == pytest.approx(40 / 41)
    assert found["targets"]["ideal_over_fused"] is True


def test_the_fastest_product_counts_and_one_row_has_an_overhead():
    found = REPORTS["linear"]["results"][1]["derived"]
    assert found["best_gemm"] == "gemm mv"
    assert found["efficiency"] == pytest.approx(1 - 3 / 5)
    assert found["overhead_us"] == pytest.approx(13 - 10 - 2)
    assert found["targets"] == {
        "ideal_over_fused": False,
        "serial_over_fused": True,
        "overhead": True,
    }
    slow = linear_row(1, gemm=10, comm=4, comm_raw=2, serial=15, host=28)["derived"]["targets"]
    assert slow == {"ideal_over_fused": False, "serial_over_fused": False, "overhead": False}


def test_an_op_that_sends_nothing_is_held_against_the_product():
    found = REPORTS["linear"]["results"][2]["derived"]
    assert not found["communicates"] and found["efficiency"] is None and found["fused"] == "local"
    assert found["ideal_over_fused"] == found["serial_over_fused"] == pytest.approx(0.75)
    assert found["overhead_us"] == pytest.approx(10)


def test_a_backward_is_held_against_that_of_torchs_layer():
    both = {"gemm": 10, "gemm_autograd": 30}
    found = linear_row(1, **both, comm=4, comm_raw=2, serial=36, host=40)["derived"]
    assert found["best_gemm"] == "gemm" and found["overhead_us"] == pytest.approx(40 - 30 - 2)
    assert found["serial_over_fused"] == pytest.approx(36 / 40)
    assert found["ideal_over_fused"] == pytest.approx(10 / 40)
    alone = linear_row(1, **both, local=32)["derived"]
    assert alone["serial_over_fused"] == pytest.approx(30 / 32)
    assert alone["overhead_us"] == pytest.approx(2)


@pytest.mark.parametrize(
    ("rows", "aim"), [(1, 0.85), (16, 0.85), (17, None), (127, None), (128, 0.95), (2048, 0.95)]
)
def test_aims_depend_on_the_number_of_rows(rows, aim):
    assert linear.ideal_target(rows) == aim


def test_host_is_compared_with_the_best_peer():
    first, second, third = (row["derived"] for row in REPORTS["collectives"]["results"])
    assert (first["best_peer"], first["best_peer_over_host"]) == ("deepspeed", pytest.approx(1.5))
    assert first["gigabytes_per_second"] == pytest.approx(1024 / 4e-6 / 1e9)
    assert second["best_peer"] == "openmpi"
    assert third["best_peer"] is third["best_peer_over_host"] is None


def test_means_of_ratios_are_geometric():
    assert report.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    lines = tables.collectives_summary(REPORTS["collectives"]["results"])
    assert "1.50 in the geometric mean, lowest 1.50" in lines[0]
    assert "gloo / host 100 " in lines[-1]
    slow = collective_row(1 << 20, host=100.0, gloo=24.0)
    lines = tables.collectives_summary([*REPORTS["collectives"]["results"], slow])
    assert "0.81 in the geometric mean, lowest 0.24" in lines[0]


# Reports.


def test_a_report_survives_the_way_through_a_file(tmp_path):
    for kind, found in REPORTS.items():
        path = tmp_path / "new" / f"{kind}.json"
        report.write(path, found)
        assert report.load(path) == json.loads(json.dumps(found))


def test_what_is_no_report_is_refused(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(ValueError):
        report.write(path, {**REPORTS["linear"], "results": [{"x": math.nan}]})
    for text in ("", "[]", '{"schema": "tp_kernels.bench/0"}'):
        path.write_text(text)
        with pytest.raises(UnsupportedError, match=r"x\.json"):
            report.load(path)
    with pytest.raises(UnsupportedError, match="cannot be read"):
        report.load(tmp_path / "absent.json")


def test_the_environment_says_where_but_not_who():
    assert FACTS["cpu"] and FACTS["cores"] and FACTS["memory_mib"] > 0 and FACTS["isa"]
    assert FACTS["versions"]["torch"] and FACTS["versions"]["openmpi"] == "5.0"
    assert FACTS["affinity"] == sorted(os.sched_getaffinity(0))
    text = json.dumps(FACTS)
    assert os.getcwd() not in text and os.path.expanduser("~") not in text
    assert platform.node() not in text or len(platform.node()) < 4
    assert socket.gethostname() not in text or len(socket.gethostname()) < 4


def shown(kind: str) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    tables.show(console, REPORTS[kind])
    return console.export_text()


def test_tables_show_times_ratios_and_who_is_missing():
    text = shown("collectives")
    assert "all_reduce float32, 2 ranks" in text and "1 MiB" in text
    assert "4.00 (4.00..4.00)" in text and "1.50" in text
    assert "not run: deepspeed (2 ranks): timed out [sic]" in text
    text = shown("linear")
    assert "110 (101..128) host" in text
    for part in ("0.80", "0.91", "1.36", "miss", "communicates nothing", "overhead at one row"):
        assert part in text, part
    assert "ideal / fused: 0 of 3 rows meet the target" in text
    assert "serial / fused: 2 of 3 rows meet the target" in text
    assert "fused: 1.50 in the geometric mean" in text
    text = shown("block")
    assert "hidden size 576, 2 ranks" in text and "mlp forward 128" in text and "3.00" in text


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("collectives", ["collectives-all_reduce-float32-2"]),
        (
            "linear",
            [
                "linear-linear_all_reduce-forward-float32-2",
                "linear-linear_all_reduce-backward-float32-2",
            ],
        ),
        ("block", ["block-576-2"]),
    ],
)
def test_pictures_are_written(kind, names, tmp_path):
    paths = plots.plot(REPORTS[kind], tmp_path / "new")
    assert [path.stem for path in paths] == names
    for path in paths:
        image = plots.pyplot().imread(path)
        assert image.shape[0] > 300 and image.shape[1] > 600
        assert image[..., :3].std() > 0.05, "an empty picture"


def test_pictures_without_matplotlib_are_explained(monkeypatch):
    importing = builtins.__import__

    def without(name, *rest, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return importing(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError, match=r"pip install 'tp_kernels\[bench\]'"):
        plots.pyplot()


# Comparison.


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ((100, 0.9, 1.1), (200, 0.9, 1.1), "slower"),
        ((100, 0.9, 1.1), (50, 0.9, 1.1), "faster"),
        ((100, 0.9, 1.1), (105, 0.9, 1.1), ""),
        ((100, 0.5, 3.0), (200, 0.9, 1.1), ""),  # inside the spread of the old one
        ((100, 0.9, 1.1), (200, 0.2, 1.1), ""),  # the old one inside the spread of the new one
    ],
)
def test_a_change_counts_only_outside_both_spreads(old, new, verdict):
    change = compare.Change("case", "host", sample(*old).to_json(), sample(*new).to_json())
    assert change.verdict == verdict
    assert change.ratio == pytest.approx(new[0] / old[0])


def test_common_rows_are_compared():
    new = document(
        "collectives",
        collective_row(4 << 20, host=300.0, raw=1.0),
        collective_row(1024, host=1.0, gloo=400.0),
        collective_row(16, host=1.0),
    )
    found = compare.changes(REPORTS["collectives"], new)
    assert [(c.contestant, c.verdict) for c in found] == [
        ("host", "slower"),
        ("host", "faster"),
        ("gloo", ""),
    ]
    assert "bytes=4194304" in found[0].case
    with pytest.raises(UnsupportedError, match="share no rows"):
        compare.changes(REPORTS["linear"], new)
    with pytest.raises(UnsupportedError, match="no case in common"):
        compare.changes(REPORTS["collectives"], document("collectives"))


def test_a_comparison_warns_when_the_machines_differ(capsys):
    old = REPORTS["collectives"]
    new = json.loads(json.dumps(old))
    new["environment"]["date"] = "2020"
    new["environment"]["load_average"] = [9.0]
    assert differences(old["environment"], new["environment"]) == []
    new["environment"]["versions"]["torch"] = "9.9"
    new["environment"]["affinity"] = [7]
    new["settings"]["threads"] = 2
    compare.show(Console(width=200), old, new)
    text = capsys.readouterr().out
    assert "environments differ: versions.torch" in text and "-> 9.9" in text
    assert "environments differ: affinity" in text
    assert "settings differ: settings.threads: 1 -> 2" in text
    assert "8 rows: 0 faster, 0 slower" in text
