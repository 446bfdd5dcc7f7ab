"""Train a small decoder on the bytes of a text, and show that dividing it over ranks changes nothing."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from tp_kernels import Ranks, TpKernelsError

from .curves import draw
from .models import MODELS
from .training import Run, Settings, read, train, unigram_entropy

TEXT = Path(__file__).parent.parent / "tests" / "data" / "text.txt"
# What --compare allows between losses of one process and of several, in fp32.
BOUND = 1e-4
WAYS = [(1, False), (2, False), (2, True), (3, False), (3, True), (4, False), (4, True)]

app = typer.Typer(
    add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False, help=__doc__
)


@app.command(
    help=f"{__doc__}\n\n"
    "Weights, batches and masks of dropout are drawn from --seed in a way that does not depend on the number "
    "of ranks: one process and four give the same losses up to fp32 rounding. --compare shows it.\n\n"
    "Starts its ranks itself; under torchrun it is one of them.",
    epilog="Examples:  python -m examples.train --model gpt2 --tp 3 --sequence-parallel  \n"
    "python -m examples.train --compare  \n"
    "python -m examples.train --stop 100 --save state; python -m examples.train --resume state  \n"
    "torchrun --nproc-per-node 2 -m examples.train --model llama",
)
def main(
    model: Annotated[
        str,
        typer.Option(
            help="llama: RMSNorm, rotary embedding, SwiGLU, 5 query heads on 2 of keys and values. gpt2: "
            "LayerNorm, learned positions, gelu, biases, tied head. With --compare also: both."
        ),
    ] = "",
    tp: Annotated[int, typer.Option(help="Ranks that divide the model.", min=1)] = 1,
    sequence_parallel: Annotated[
        bool,
        typer.Option(
            "--sequence-parallel", help="Divide tokens between projections over the ranks."
        ),
    ] = False,
    steps: Annotated[int, typer.Option(help="Steps of the schedule.", min=1)] = 200,
    dropout: Annotated[
        float, typer.Option(help="Of attention, of embeddings, of what is added to the residual.")
    ] = 0.1,
    checkpointing: Annotated[
        bool, typer.Option(help="Compute activations of blocks again in the backward.")
    ] = True,
    learning_rate: Annotated[
        float, typer.Option(help="At the start; it falls to a tenth by half a cosine.")
    ] = Settings.learning_rate,
    seed: Annotated[int, typer.Option(help="Of weights, batches and masks.")] = 0,
    text: Annotated[Path, typer.Option(help="What to learn, byte by byte.", exists=True)] = TEXT,
    stop: Annotated[int | None, typer.Option(help="Stop before this step.")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Directory to write the state to at the end.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Directory of a state to go on from, with as many ranks.")
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Train on one process and on 2, 3 and 4 ranks with and without sequence parallelism, print "
            "a table of losses, and draw them. Fails if they are further apart than 1e-4.",
        ),
    ] = False,
    picture: Annotated[Path, typer.Option(help="Where --compare draws.")] = Path("training.png"),
) -> None:
    settings = Settings(
        model=model or "llama",
        sequence_parallel=sequence_parallel,
        steps=steps,
        dropout=dropout,
        checkpointing=checkpointing,
        learning_rate=learning_rate,
        seed=seed,
    )
    known = ("both", *MODELS) if compare else tuple(MODELS)
    if settings.model not in known:
        raise typer.BadParameter(f"--model {model}: known are {', '.join(known)}")
    if compare:
        if tp != 1 or sequence_parallel or save or resume or stop is not None:
            raise typer.BadParameter(
                "--compare runs all ways to divide, from the start to the end: leave out --tp, "
                "--sequence-parallel, --stop, --save and --resume"
            )
        names = list(MODELS) if model in ("", "both") else [model]
        sys.exit(compare_all([replace(settings, model=name) for name in names], text, picture))
    options = {"stop": stop, "resume": resume, "save": save, "show": True}
    if "RANK" in os.environ:  # torchrun started this process
        dist.init_process_group("gloo")
        run = train(settings, text, **options)
        if dist.get_rank() == 0:
            report(run, text)
        dist.destroy_process_group()
        return
    with Ranks(tp, threads=1) as ranks:
        report(ranks.run(train, settings, text, **options)[0], text)


def report(run: Run, text: Path) -> None:
    """Losses of one run, every tenth of it."""
    count = len(run.losses)
    table = Table("step", "loss", box=box.SIMPLE_HEAD)
    for step in sorted({*range(0, count, max(1, count // 10)), count - 1}):
        table.add_row(str(run.start + step), f"{run.losses[step]:.4f}")
    console = Console()
    console.print(table)
    console.print(
        f"{run.seconds:.1f} s. Nats per byte; the unigram entropy of the text is "
        f"{unigram_entropy(read(text)):.4f}."
    )


def compare_all(settings: list[Settings], text: Path, picture: Path) -> int:
    """Train in every way, print, draw; 1 if losses are apart by more than BOUND."""
    entropy = unigram_entropy(read(text))
    console = Console()
    curves: dict[str, dict[str, list[float]]] = {one.model: {} for one in settings}
    worst = 0.0
    for one in settings:
        table = Table(title=one.model, box=box.SIMPLE_HEAD)
        for heading in ("", "first", "middle", "last 20", "apart", "at step", "s"):
            table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
        for size, sequence_parallel in WAYS:
            with Ranks(size, threads=1) as ranks:
                setting = replace(one, sequence_parallel=sequence_parallel)
                run = ranks.run(train, setting, text, show=True)[0]
            name = way_of(size, sequence_parallel)
            losses = curves[one.model][name] = run.losses
            apart, step = furthest(losses, curves[one.model][way_of(1, False)])
            worst = max(worst, apart)
            end = losses[-20:]
            table.add_row(
                name,
                f"{losses[0]:.4f}",
                f"{losses[len(losses) // 2]:.4f}",
                f"{sum(end) / len(end):.4f}",
                f"{apart:.1e}" if size > 1 else "",
                str(step) if size > 1 else "",
                f"{run.seconds:.1f}",
            )
        console.print(table)
    draw(curves, entropy, BOUND, picture)
    verdict = "[green]yes" if worst <= BOUND else "[bold red]no"
    console.print(
        "Nats per byte; SP: sequence parallel; apart: furthest from the loss of one process.\n"
        f"The unigram entropy of the text is {entropy:.4f}.\n"
        f"Curves: {picture}\nlosses within {BOUND:g} of one process: {verdict}"
    )
    return 0 if worst <= BOUND else 1


def way_of(size: int, sequence_parallel: bool) -> str:
    if size == 1:
        return "1 process"
    return f"{size} ranks" + (", SP" if sequence_parallel else "")


def furthest(losses: list[float], wanted: list[float]) -> tuple[float, int]:
    """The largest distance of two curves, and its step."""
    return max((abs(a - b), step) for step, (a, b) in enumerate(zip(losses, wanted, strict=True)))


if __name__ == "__main__":
    try:
        app()
    except TpKernelsError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False)
        sys.exit(1)
