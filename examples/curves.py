"""A picture of training runs: losses, and how far apart they are. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tp_kernels.bench.plots import pyplot

# Okabe and Ito (2008): told apart also by those who do not see red and green.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def draw(
    runs: Mapping[str, Mapping[str, Sequence[float]]], entropy: float, bound: float, path: Path
) -> None:
    """runs: losses by step, by model and by name of the run, the unsplit one first; written to `path`."""
    plt = pyplot()
    figure, grid = plt.subplots(
        2,
        len(runs),
        figsize=(6.2 * len(runs), 6.4),
        dpi=120,
        squeeze=False,
        sharex=True,
        height_ratios=(3, 2),
    )
    for column, (model, curves) in enumerate(runs.items()):
        above, below = grid[0][column], grid[1][column]
        (first, unsplit), *others = curves.items()
        above.plot(unsplit, color="#999999", linewidth=5, label=first)
        for colour, (name, losses) in zip(COLOURS, others, strict=False):
            above.plot(losses, color=colour, linewidth=0.9, label=name)
            # Equal losses have no place on a logarithmic axis.
            apart = [max(abs(a - b), 1e-8) for a, b in zip(losses, unsplit, strict=True)]
            below.plot(apart, color=colour, linewidth=0.9)
        above.axhline(entropy, color="black", linestyle="--", linewidth=1)
        above.annotate(
            f"unigram entropy {entropy:.2f}",
            (len(unsplit) - 1, entropy),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=9,
        )
        below.axhline(bound, color="black", linestyle="--", linewidth=1)
        below.set_yscale("log")
        below.set_ylim(8e-9, 3 * bound)
        above.set_title(model)
        above.legend(frameon=False, fontsize=9)
        below.set_xlabel("step")
        for axes, label in ((above, "loss (nats per byte)"), (below, "distance from one process")):
            axes.set_ylabel(label)
            axes.grid(True, color="#dddddd", linewidth=0.7)
            axes.set_axisbelow(True)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
