"""Pictures of a report. Needs matplotlib, which is optional: the extra `bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tp_kernels.comm.errors import UnsupportedError

from .report import size

# Okabe and Ito (2008): told apart also by those who do not see red and green.
COLOURS = {
    "host": "#0072B2",
    "raw": "#56B4E9",
    "gloo": "#D55E00",
    "deepspeed": "#009E73",
    "openmpi": "#CC79A7",
    "reference": "#D55E00",
    "chunked": "#E69F00",
    "serial": "#999999",
    "1 process": "#999999",
}
MARKERS = {"host": "o", "raw": ".", "gloo": "s", "deepspeed": "^", "openmpi": "D"}
NAMES = {
    "host": "tp_kernels (host)",
    "raw": "tp_kernels, engine only",
    "gloo": "gloo",
    "deepspeed": "DeepSpeed SHM",
    "openmpi": "Open MPI",
}


def pyplot() -> Any:
    """matplotlib without a screen."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot
    except ImportError as error:
        raise UnsupportedError(
            "plots need matplotlib: pip install 'tp_kernels[bench]' (or ask for --json only)"
        ) from error
    return matplotlib.pyplot


def plot(report: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write the pictures of `report` into `directory`; returns their paths."""
    draw = {"collectives": plot_collectives}[report["kind"]]
    directory.mkdir(parents=True, exist_ok=True)
    return draw(report, directory)


def plot_collectives(report: Mapping[str, Any], directory: Path) -> list[Path]:
    """Time by size, a line per contestant with the band p10..p90; one picture per op, dtype and world."""
    groups: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for row in report["results"]:
        case = row["case"]
        groups.setdefault((case["op"], case["dtype"], case["world"]), []).append(row)
    written = []
    for (op, dtype, world), rows in groups.items():
        figure, axes = _figure(8, 5)
        ticks = [row["case"]["bytes"] for row in rows]
        for name in NAMES:
            here = [row for row in rows if name in row["contestants"]]
            if not here:
                continue
            x = [row["case"]["bytes"] for row in here]
            middle, low, high = (
                [row["contestants"][name][key] for row in here]
                for key in ("median_us", "p10_us", "p90_us")
            )
            axes.fill_between(x, low, high, color=COLOURS[name], alpha=0.15, linewidth=0)
            axes.plot(
                x,
                middle,
                color=COLOURS[name],
                marker=MARKERS[name],
                linewidth=2.2 if name == "host" else 1.4,
                linestyle="--" if name == "raw" else "-",
                label=NAMES[name],
                zorder=3 if name == "host" else 2,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [size(tick) for tick in ticks], rotation=30, ha="right")
        axes.minorticks_off()
        axes.set_xlabel("size of the whole tensor")
        axes.set_ylabel("time per call, slowest rank (µs)")
        axes.set_title(f"{op}, {dtype}, {world} ranks: median, p10 to p90 shaded", fontsize=12)
        axes.legend(frameon=False)
        written.append(
            _save(figure, axes, report, directory / f"collectives-{op}-{dtype}-{world}.png")
        )
    return written


def _figure(width: float, height: float) -> tuple[Any, Any]:
    figure, axes = pyplot().subplots(figsize=(width, height), dpi=120)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _save(figure: Any, axes: Any, report: Mapping[str, Any], path: Path) -> Path:
    figure.text(0.01, 0.01, _caption(report), fontsize=7, color="#666666", ha="left")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path)
    pyplot().close(figure)
    return path


def _caption(report: Mapping[str, Any]) -> str:
    facts: Mapping[str, Any] = report["environment"]
    parts: Sequence[str] = (
        f"{facts['cpu']}, {len(facts['affinity'])} cores",
        f"tp_kernels {facts['versions']['tp_kernels']} ({facts['isa']})",
        f"torch {facts['versions']['torch']}",
        facts["date"][:10],
    )
    return "; ".join(parts)
