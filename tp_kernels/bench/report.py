"""Results as a JSON document and as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import exp, log
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from tp_kernels.comm.errors import UnsupportedError

SCHEMA = "tp_kernels.bench/2"
KINDS = ("collectives", "linear", "block", "p2p")

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


def grouped(report: Mapping[str, Any], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Results by the values of `keys` in their case, in the order of the report."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in report["results"]:
        groups.setdefault(tuple(row["case"][key] for key in keys), []).append(row)
    return groups
