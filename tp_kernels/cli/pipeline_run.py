"""`tp-kernels pipeline run`: answers to several prompts at once, from a model in stages."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tp_kernels import UnsupportedError

from .models import DEMO_MODEL, ModelOption
from .outputs import check_outputs

if TYPE_CHECKING:
    from .pipeline_worker import Answers, Job

_PROMPTS = (
    "Why is the sky blue?",
    "Name three fruits.",
    "Write a haiku about rain.",
    "What is the capital of Peru?",
    "Explain a prime number.",
    "Tell me a joke.",
)


def run(
    model: ModelOption = DEMO_MODEL,
    prompt: Annotated[
        list[str] | None, typer.Option(help="May be repeated. Default: six short questions.")
    ] = None,
    stages: Annotated[
        int | None, typer.Option(min=1, help="Default: 2, or those of --plan.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A cut that `pipeline plan --json` wrote.")
    ] = None,
    tensor: Annotated[
        int, typer.Option(min=1, help="Ranks that share every stage (tensor parallelism).")
    ] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 32,
    in_flight: Annotated[
        int | None,
        typer.Option(min=1, help="Groups of prompts under way. Default: one more than stages."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts in a group.")] = 1,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0: the likeliest token; else drawn at random.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="With --temperature.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads per process. Default: the cores, divided.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Compare with the model of transformers in one process with as many threads as a stage; "
            "exit status 1 if a token differs.",
        ),
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Write what ran when (.png, .svg; needs matplotlib).")
    ] = None,
    chrome: Annotated[
        Path | None, typer.Option(help="Write it as a trace that ui.perfetto.dev opens.")
    ] = None,
) -> None:
    """Generate with a model in stages, one process each, with several prompts under way.

    Every stage loads its own part only. Prints the answers, tokens per second, and for every stage the time
    that it computed, waited and transferred. One prompt alone keeps one stage busy at a time.

        tp-kernels pipeline run --stages 2 --check
        tp-kernels pipeline run --stages 3 --prompt "Why?" --prompt "Who?" --max-new-tokens 64
        tp-kernels pipeline run --stages 2 --tensor 2 --batch 3 --picture run.png
        tp-kernels pipeline plan --schedule forward_only --decode --json plan.json
        tp-kernels pipeline run --plan plan.json

    Under torchrun its processes are used, on one machine or several:

        torchrun --nproc-per-node 2 -m tp_kernels.cli pipeline run --stages 2
    """
    import torch.distributed as dist

    from tp_kernels import Ranks
    from tp_kernels.integrations.checkpoint import stock_checkpoint
    from tp_kernels.pipeline.plan import Plan

    from .pipeline_worker import Job, answer_all
    from .progress import converted, progress_bars

    check_outputs(picture, chrome=chrome)
    if plan is not None and stages is not None:
        raise UnsupportedError("--plan says how many stages there are: leave --stages out")
    if seed and not temperature:
        raise UnsupportedError("--seed has no effect at temperature 0: give a --temperature")
    if check and temperature:
        raise UnsupportedError("--check compares the likeliest tokens: leave --temperature out")
    cut: int | tuple[int, ...] = stages or 2
    if plan is not None:
        try:
            cut = Plan.from_json(plan.read_text()).bounds
        except (OSError, UnicodeDecodeError, UnsupportedError) as error:
            raise UnsupportedError(f"--plan {plan}: {error}") from error
    count = cut if isinstance(cut, int) else len(cut) - 1
    torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if torchrun and (check or threads is not None):
        raise UnsupportedError(
            "--check and --threads start processes of their own: leave them out under torchrun"
        )
    if not torchrun or os.environ.get("LOCAL_RANK", "0") == "0":
        with progress_bars() as bars:
            checkpoint = converted(model, bars)
    if torchrun:
        dist.init_process_group("gloo")
        dist.barrier()  # one rank of each machine converts, and the others find its result
        checkpoint = stock_checkpoint(model)
    job = Job(
        checkpoint,
        cut,
        count,
        tensor,
        tuple(prompt or _PROMPTS),
        max_new_tokens,
        count + 1 if in_flight is None else in_flight,
        batch,
        temperature,
        seed,
    )
    if torchrun:
        try:
            found = answer_all(job)
            if dist.get_rank():
                return
        finally:
            dist.destroy_process_group()
    else:
        with Ranks(count * tensor, threads=threads) as ranks:
            found = ranks.run(answer_all, job)[0]
            used = ranks.threads
    console = Console() if sys.stdout.isatty() else Console(width=200)
    _show(console, job, found)
    if picture is not None:
        found.timeline.save_picture(picture)
    if chrome is not None:
        found.timeline.save_chrome(chrome)
    for path in (picture, chrome):
        if path is not None:
            console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    if check and not _check(console, job, found, used):
        raise typer.Exit(1)


def _show(console: Console, job: Job, found: Answers) -> None:
    from .worker import text_of

    for text, tokens in zip(job.prompts, found.tokens, strict=True):
        console.print(f"[bold]{text}[/]", highlight=False)
        console.print(text_of(job.checkpoint, tokens), markup=False, highlight=False)
    console.print()
    console.print(found.timeline.table(), markup=False, highlight=False, soft_wrap=True)
    held = ", ".join(f"{size / 2**20:.0f}" for size in found.weight_bytes)
    console.print(
        f"{found.count} tokens of {len(job.prompts)} prompts in {found.seconds:.2f} s: "
        f"{found.rate:.1f} tokens/s, prefill included; up to {job.in_flight} groups of {job.batch} "
        "under way; "
        f"MiB of weights by stage: {held}",
        highlight=False,
        soft_wrap=True,
    )


def _check(console: Console, job: Job, found: Answers, threads: int) -> bool:
    """Whether one process gives the same tokens; prints that and its speed."""
    from tp_kernels import Ranks

    from .pipeline_worker import answer_plainly

    with Ranks(1, threads=threads) as ranks:
        tokens, seconds = ranks.run(answer_plainly, job)[0]
    same = tokens == found.tokens
    console.print(
        f"one process, {threads} {'thread' if threads == 1 else 'threads'}, prompts one by one: "
        f"{found.count / seconds:.1f} tokens/s; tokens identical: {'[green]yes' if same else '[bold red]no'}",
        soft_wrap=True,
    )
    return same
