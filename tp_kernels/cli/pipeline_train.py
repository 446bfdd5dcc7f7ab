"""`tp-kernels pipeline train`: a small decoder in stages on real text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from tp_kernels import Ranks, UnsupportedError

from .outputs import check_outputs

if TYPE_CHECKING:
    from .pipeline_trainer import Run, Settings

BOUND = 1e-4  # between losses of one process and of a pipeline, in fp32


def train(
    schedule: Annotated[
        str,
        typer.Option(
            help="gpipe, one_f_one_b, interleaved_one_f_one_b, pipedream, zero_bubble_h1, zero_bubble_h2, "
            "zero_bubble_v, dual_pipe_v. Interleaved and V schedules have two stages per process."
        ),
    ] = "one_f_one_b",
    stages: Annotated[int, typer.Option(min=1, help="Processes in a row.")] = 2,
    micro_batches: Annotated[int, typer.Option(min=1, help="Parts of a batch.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Updates of the weights.")] = 50,
    tensor: Annotated[int, typer.Option(min=1, help="Processes that divide every stage.")] = 1,
    data: Annotated[int, typer.Option(min=1, help="Replicas, each with batches of its own.")] = 1,
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="What to learn, byte by byte. Default: the source of this package.",
        ),
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the decoder.")] = 4,
    hidden: Annotated[int, typer.Option(min=1, help="Width of the decoder.")] = 64,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Bytes of a row.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 16,
    tied: Annotated[
        bool | None,
        typer.Option(
            help="One weight for the embedding and the head, on two stages. Default: yes, but not with "
            "pipedream, which cannot."
        ),
    ] = None,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Compute activations again in the backward.")
    ] = False,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 3e-3,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Train on one process as well, without any pipeline, and compare the losses. Fails if "
            "they are further apart than 1e-4.",
        ),
    ] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Print what the runner of rank 0 does with its stages."),
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the last step (.png, .svg, .pdf; needs matplotlib).")
    ] = None,
    chrome: Annotated[
        Path | None, typer.Option(help="Write a trace of the last step that ui.perfetto.dev opens.")
    ] = None,
) -> None:
    """Train a small decoder whose layers are cut into stages, on the bytes of a text.

    Starts stages x tensor x data processes on this machine. Prints the loss (nats per byte), and where the
    time of the last step went on every process. How the model is divided changes nothing: weights and
    batches are drawn from --seed, and --check compares with one process.

        tp-kernels pipeline train --check
        tp-kernels pipeline train --schedule zero_bubble_v --micro-batches 8 --picture v.png
        tp-kernels pipeline train --stages 2 --tensor 2 --check
        tp-kernels pipeline train --schedule pipedream --steps 200 --text book.txt
    """
    from tp_kernels.pipeline.generators import SCHEDULES

    from .pipeline_trainer import Settings, train, train_alone

    known = [name for name in SCHEDULES if name != "forward_only"]
    if schedule not in known:
        raise UnsupportedError(
            f"--schedule {schedule}: schedules that train are {', '.join(known)}"
        )
    check_outputs(picture, chrome=chrome)
    if text is not None and text.stat().st_size <= tokens:
        raise UnsupportedError(f"--text {text}: needs more than {tokens} bytes, a row (--tokens)")
    updates = schedule == "pipedream"
    if updates and check:
        raise UnsupportedError(
            "--check: pipedream updates after every micro-batch, with gradients of older weights, so it does "
            "not equal one process; leave it out"
        )
    settings = Settings(
        schedule,
        stages,
        tensor,
        data,
        micro_batches,
        steps,
        layers,
        hidden,
        heads,
        tokens,
        batch,
        not updates if tied is None else tied,
        checkpoint,
        learning_rate,
        seed,
    )
    if len(settings.placement) > layers + 2:
        raise UnsupportedError(
            f"--layers {layers}: {len(settings.placement)} stages need at least as many layers, counting "
            "embedding and head"
        )
    console = Console()
    with Ranks(settings.ranks, threads=1) as ranks:
        run = ranks.run(train, settings, text, True)[0]
    alone: Run | None = None
    if check:
        with Ranks(1, threads=1) as one:
            alone = one.run(train_alone, settings, text, True)[0]
    console.print(_losses(run, alone))
    if explain:
        console.print(run.explained, markup=False, highlight=False)
    assert run.timeline is not None
    console.print(run.timeline.table(), markup=False, highlight=False, soft_wrap=True)
    if chrome is not None:
        run.timeline.save_chrome(chrome)
    if picture is not None:
        run.timeline.save_picture(picture)
    for path in (chrome, picture):
        if path is not None:
            console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    _report(console, settings, run, alone)


def _losses(run: Run, alone: Run | None) -> Table:
    """Every tenth of the run."""
    count = len(run.losses)
    table = Table("step", "loss", box=box.SIMPLE_HEAD)
    if alone is not None:
        table.add_column("one process")
    for step in sorted({*range(0, count, max(1, count // 10)), count - 1}):
        row = [str(step + 1), f"{run.losses[step]:.4f}"]
        table.add_row(*row, *([] if alone is None else [f"{alone.losses[step]:.4f}"]))
    return table


def _report(console: Console, settings: Settings, run: Run, alone: Run | None) -> None:
    rate = settings.batch * settings.data * settings.tokens * settings.steps / run.seconds
    what = f"{settings.schedule} on {settings.ranks} processes"
    console.print(f"{what}: {run.seconds:.1f} s, {rate:.0f} bytes/s", highlight=False)
    if alone is None:
        return
    worst = max(abs(a - b) for a, b in zip(run.losses, alone.losses, strict=True))
    fine = worst <= BOUND  # also false for nan
    verdict = "equal" if fine else "NOT equal"
    console.print(
        f"losses {verdict} to one process: furthest apart {worst:.1e} (bound {BOUND:.0e})",
        highlight=False,
        style=None if fine else "bold red",
    )
    if not fine:
        raise typer.Exit(1)
