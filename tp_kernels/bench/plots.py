"""Pictures of a report. Needs matplotlib, which is optional: the extra `bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tp_kernels.comm.errors import UnsupportedError

from . import p2p
from .linear import ideal_target
from .report import Row, grouped, size

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
    "1 process, 1 thread": "#999999",
}
HIDDEN_COLOURS = ("#56B4E9", "#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7")
DARK = ("#0072B2", "#D55E00", "#009E73")
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
    draw = {
        "collectives": plot_collectives,
        "linear": plot_linear,
        "block": plot_block,
        "p2p": p2p.plot,
    }
    directory.mkdir(parents=True, exist_ok=True)
    return draw[report["kind"]](report, directory)


def plot_collectives(report: Mapping[str, Any], directory: Path) -> list[Path]:
    """Time by size, a line per contestant with the band p10..p90; one picture per op, dtype and world."""
    written = []
    for (op, dtype, world), rows in grouped(report, "op", "dtype", "world").items():
        figure, (axes,) = _figure(8, 5)
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
        written.append(_save(figure, report, directory / f"collectives-{op}-{dtype}-{world}.png"))
    return written


def plot_linear(report: Mapping[str, Any], directory: Path) -> list[Path]:
    """T_ideal / T_fused and E by shape with their targets; one picture per op, pass, dtype and world."""
    pyplot()
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    written = []
    groups = grouped(report, "op", "pass", "dtype", "world")
    for (op, way, dtype, world), rows in groups.items():
        talks = rows[0]["derived"]["communicates"]
        figure, axes = _figure(9.5, 7.5 if talks else 4.6, 2 if talks else 1)
        counts = sorted({row["case"]["rows"] for row in rows})
        sizes = sorted({row["case"]["hidden"] for row in rows})
        _bars(axes[0], rows, counts, "ideal_over_fused", (0.0, 1.1))
        for place, count in enumerate(counts):
            wanted = ideal_target(count)
            if wanted is not None:
                axes[0].hlines(wanted, place - 0.45, place + 0.45, colors="black", linewidth=1.5)
        axes[0].set_ylabel("T_ideal / T_fused")
        quiet = "" if talks else "\ncommunicates nothing: T_ideal = T_gemm"
        axes[0].set_title(f"{op} {way}, {dtype}, {world} ranks{quiet}", fontsize=12, pad=26)
        handles: list[Any] = [
            Patch(color=HIDDEN_COLOURS[i % 6], label=f"H = {h}") for i, h in enumerate(sizes)
        ]
        handles.append(Line2D([], [], color="black", linewidth=1.5, label="target"))
        axes[0].legend(
            handles=handles,
            ncols=len(handles),
            frameon=False,
            fontsize=9,
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
        )
        if talks:
            _bars(axes[1], rows, counts, "efficiency", (-1.0, 1.1))
            axes[1].axhline(0, color="black", linewidth=0.8)
            axes[1].axhline(1, color="black", linewidth=0.8, linestyle=":")
            axes[1].set_ylabel("E: share of communication hidden")
        axes[-1].set_xlabel("rows of the activation (M)")
        name = f"linear-{op}-{way}-{dtype}-{world}.png"
        written.append(_save(figure, report, directory / name))
    return written


def _bars(
    axes: Any, rows: Sequence[Row], counts: Sequence[int], key: str, limits: tuple[float, float]
) -> None:
    """A group per number of rows, a bar per hidden size, cut at the limits; values at the zero line."""
    sizes = sorted({row["case"]["hidden"] for row in rows})
    width = 0.84 / len(sizes)
    signed = limits[0] < 0
    axes.set_ylim(*limits)
    axes.set_xlim(-0.5, len(counts) - 0.5)
    axes.grid(False, axis="x")
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    for row in rows:
        index, value = sizes.index(row["case"]["hidden"]), row["derived"][key]
        place = counts.index(row["case"]["rows"]) + (index - (len(sizes) - 1) / 2) * width
        shown = 0.0 if value is None else min(max(value, limits[0]), limits[1])
        colour = HIDDEN_COLOURS[index % len(HIDDEN_COLOURS)]
        axes.bar(place, shown, width * 0.94, color=colour)
        # Signed bars leave the other side of zero free; the others have room inside.
        above = not signed or shown < 0
        axes.annotate(
            "none" if value is None else f"{value:.2f}",
            (place, 0.0),
            xytext=(0, 3 if above else -3),
            textcoords="offset points",
            ha="center",
            va="bottom" if above else "top",
            fontsize=8,
            rotation=90,
            color="white" if not signed and colour in DARK else "black",
        )


def plot_block(report: Mapping[str, Any], directory: Path) -> list[Path]:
    """Bars of time with the spread p10..p90; one picture per hidden size and world."""
    written = []
    for (hidden, world), rows in grouped(report, "hidden", "world").items():
        parts = list(dict.fromkeys(row["case"]["part"] for row in rows))
        steps = list(dict.fromkeys((row["case"]["pass"], row["case"]["rows"]) for row in rows))
        names = list(dict.fromkeys(name for row in rows for name in row["contestants"]))
        figure, flat = _figure(3.1 * len(steps) + 1.6, 1.9 * len(parts) + 1, len(parts), len(steps))
        for index, axes in enumerate(flat):
            part, step = parts[index // len(steps)], steps[index % len(steps)]
            here = [
                row
                for row in rows
                if (row["case"]["part"], (row["case"]["pass"], row["case"]["rows"])) == (part, step)
            ]
            if not here:
                axes.set_axis_off()
                continue
            _times(axes, here[0], names)
            if index < len(steps):
                what = "decode, 1 row" if step[1] == 1 else f"{step[0]}, {step[1]} rows"
                axes.set_title(what, fontsize=10)
            if index % len(steps) == 0:
                axes.set_yticks(range(len(names)), names, fontsize=8)
                axes.set_ylabel(part, fontsize=11)
            if index // len(steps) == len(parts) - 1:
                axes.set_xlabel("ms per step")
        figure.suptitle(
            f"hidden size {hidden}, float32, {world} ranks: time per step, median and p10 to p90"
        )
        written.append(_save(figure, report, directory / f"block-{hidden}-{world}.png"))
    return written


def _times(axes: Any, row: Row, names: Sequence[str]) -> None:
    for place, name in enumerate(names):
        sample = row["contestants"].get(name)
        if sample is None:
            continue
        middle, low, high = (sample[key] / 1e3 for key in ("median_us", "p10_us", "p90_us"))
        axes.barh(place, middle, 0.7, color=COLOURS.get(name, "#444444"))
        axes.errorbar(
            middle,
            place,
            xerr=[[max(0.0, middle - low)], [max(0.0, high - middle)]],
            color="black",
            linewidth=1,
            capsize=2,
        )
        axes.annotate(
            f"{middle:.3g}",
            (max(middle, high), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
        )
    axes.set_yticks(range(len(names)), [""] * len(names))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.18)
    axes.set_xlim(left=0)
    axes.grid(False, axis="y")
    axes.tick_params(axis="x", labelsize=8)


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, list[Any]]:
    figure, grid = pyplot().subplots(rows, columns, figsize=(width, height), dpi=120, squeeze=False)
    flat = list(grid.flat)
    for axes in flat:
        axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure, flat


def _save(figure: Any, report: Mapping[str, Any], path: Path) -> Path:
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
