"""Results as a JSON document and as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import exp, log
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tp_kernels.comm.errors import UnsupportedError

SCHEMA = "tp_kernels.bench/1"
KINDS = ("collectives", "linear", "block")

Row = Mapping[str, Any]


def document(
    kind: str,
    environment: Mapping[str, Any],
    settings: Mapping[str, Any],
    results: Sequence[Row],
    not_run: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """All of a run: what `--json` writes and `compare` reads."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "environment": dict(environment),
        "settings": dict(settings),
        "results": list(results),
        "not_run": list(not_run),
    }


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write as JSON; numbers that are not finite are refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


def load(path: Path) -> dict[str, Any]:
    """Read what `write` wrote.

    Raises:
        UnsupportedError: the file is no such report.
    """
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"{path} cannot be read: {error}") from error
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise UnsupportedError(
            f"{path} is not a report of this version of tp-kernels bench ({SCHEMA})"
        )
    return report


def geometric_mean(values: Iterable[float]) -> float:
    """exp of the mean of the logarithms; for ratios."""
    logarithms = [log(value) for value in values]
    return exp(sum(logarithms) / len(logarithms))


def microseconds(value: float) -> str:
    """Three digits that mean something."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024 or unit == "MiB":
            return f"{count:g} {unit}"
        count /= 1024
    raise AssertionError


def spread(sample: Mapping[str, Any]) -> str:
    """Median (p10..p90)."""
    median, p10, p90 = (microseconds(sample[key]) for key in ("median_us", "p10_us", "p90_us"))
    return f"{median} ({p10}..{p90})"


def new_table(*headings: str, left: int = 1) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < left else "right", no_wrap=True)
    return table


def show_environment(console: Console, report: Mapping[str, Any]) -> None:
    """One paragraph: where, with what."""
    facts, versions = report["environment"], report["environment"]["versions"]
    caches = ", ".join(f"{level} {amount}" for level, amount in facts["caches"].items())
    console.print(
        f"{facts['cpu']}, {facts['cores']} cores, {caches}; {facts['isa']}; {facts['kernel']}; "
        f"load {facts['load_average'][0]}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        style="dim",
        highlight=False,
        markup=False,
    )


def show_not_run(console: Console, report: Mapping[str, Any]) -> None:
    """Contestants that are missing, and why."""
    for entry in report["not_run"]:
        where = f" ({entry['world']} ranks)" if "world" in entry else ""
        console.print(f"[yellow]not run:[/] {entry['contestant']}{where}: {escape(entry['why'])}")


def show_collectives(console: Console, report: Mapping[str, Any]) -> None:
    """One row per op, dtype, world size and number of bytes."""
    console.print(
        "Microseconds per call on the slowest rank, median; host with p10..p90.\n"
        "host: tp_kernels; raw: its engine without Python; ratio: best peer / host.",
        highlight=False,
    )
    peers = ("gloo", "deepspeed", "openmpi")
    groups: dict[str, list[Row]] = {}
    for row in report["results"]:
        case = row["case"]
        groups.setdefault(f"{case['op']} {case['dtype']}, {case['world']} ranks", []).append(row)
    for group, rows in groups.items():
        console.print(f"\n[bold]{group}[/]", highlight=False)
        table = new_table("bytes", "host", "raw", *peers, "ratio", "GB/s")
        for row in rows:
            found, ratio = row["contestants"], row["derived"]["best_peer_over_host"]
            table.add_row(
                size(row["case"]["bytes"]),
                spread(found["host"]),
                *(
                    microseconds(found[name]["median_us"]) if name in found else "-"
                    for name in ("raw", *peers)
                ),
                "-" if ratio is None else f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f}[/]",
                f"{row['derived']['gigabytes_per_second']:.2f}",
            )
        console.print(table)
    for line in collectives_summary(report["results"]):
        console.print(line, highlight=False)


def collectives_summary(rows: Sequence[Row]) -> list[str]:
    """Geometric means of the ratios, and the worst one."""
    lines = []
    ratios = [row for row in rows if row["derived"]["best_peer_over_host"] is not None]
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in ratios:
        case = row["case"]
        key = case["op"], case["dtype"], case["world"]
        groups.setdefault(key, []).append(row["derived"]["best_peer_over_host"])
    for (op, dtype, world), values in groups.items():
        lines.append(
            f"{op} {dtype}, {world} ranks: best peer / host {geometric_mean(values):.2f} in the "
            f"geometric mean, lowest {min(values):.2f}"
        )
    if ratios:
        values = [row["derived"]["best_peer_over_host"] for row in ratios]
        lines.append(f"all: best peer / host {geometric_mean(values):.2f} in the geometric mean")
    small = [
        row["contestants"]["gloo"]["median_us"] / row["contestants"]["host"]["median_us"]
        for row in rows
        if "gloo" in row["contestants"] and row["case"]["bytes"] <= 64 << 10
    ]
    if small:
        lines.append(f"up to 64 KiB: gloo / host {geometric_mean(small):.0f} in the geometric mean")
    return lines
