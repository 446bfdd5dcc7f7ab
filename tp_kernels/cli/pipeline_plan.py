"""`tp-kernels pipeline plan`: measure the layers of a model and cut it into stages."""

from __future__ import annotations

import json as json_format
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import thread_time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tp_kernels import ShapeError, UnsupportedError

from .models import DEMO_MODEL, ModelOption
from .outputs import check_outputs

if TYPE_CHECKING:
    from tp_kernels.pipeline.plan import LayerCost

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def plan(
    model: ModelOption = DEMO_MODEL,
    stages: Annotated[int, typer.Option(min=1, help="How many.")] = 2,
    method: Annotated[
        str,
        typer.Option(
            help="What makes stages equal: profile (measured seconds), parameters, or uniform (layers)."
        ),
    ] = "profile",
    speeds: Annotated[
        str | None,
        typer.Option(
            help="How fast the device of each stage is, compared with this one: 1,0.5 for two."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="What the device of each stage has: 4GiB,8GiB; one number for all."),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Bytes per second from each stage to the next: 110MiB; a comma list has one per link."
        ),
    ] = None,
    latency: Annotated[
        float, typer.Option(min=0.0, help="Seconds per message, with --bandwidth.")
    ] = 0.0,
    reorder: Annotated[
        bool, typer.Option("--reorder", help="Also find the best order of the devices (up to 8).")
    ] = False,
    schedule: Annotated[
        str, typer.Option(help="forward_only for inference, or a schedule of training.")
    ] = "one_f_one_b",
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="Per step. Default: twice the stages.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a micro-batch.")] = 1,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 64,
    decode: Annotated[
        bool,
        typer.Option(
            "--decode",
            help="With forward_only: one more token after the sequence, with a KV cache.",
        ),
    ] = False,
    checkpoint: Annotated[
        bool,
        typer.Option(
            "--checkpoint", help="Stages keep their inputs only and repeat their forwards."
        ),
    ] = False,
    optimizer_factor: Annotated[
        float,
        typer.Option(min=0.0, help="State of the optimizer, in bytes per byte of parameters."),
    ] = 2.0,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of a layer.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that measure.")] = None,
    costs: Annotated[
        Path | None, typer.Option(help="Costs that --save-costs wrote; nothing is measured.")
    ] = None,
    save_costs: Annotated[
        Path | None, typer.Option(help="Write what was measured to this file.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the plan; `pipeline run --plan` reads it.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Write the predicted step (.png, .svg; needs matplotlib).")
    ] = None,
    chrome: Annotated[
        Path | None, typer.Option(help="Write it as a trace that ui.perfetto.dev opens.")
    ] = None,
    try_all: Annotated[
        bool,
        typer.Option(
            "--try-all",
            help="Run the forwards of every cut into two stages, slowed to --speeds, beside the plan.",
        ),
    ] = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="With --try-all: turns of every cut. Default: 3.")
    ] = None,
) -> None:
    """Cut a model into stages of a pipeline: the slowest as fast as possible, within memory.

    The units are the embedding, every decoder layer, and the head with its norm. They are measured one by
    one on this machine, so the model may be larger than it; a directory with only a config.json gets
    random weights. A stage's memory holds parameters, gradients, optimizer state and the activations of all
    micro-batches that the schedule keeps there (in inference: parameters and KV caches). If nothing
    fits, the message says what is missing where, and what would fit.

        tp-kernels pipeline plan --stages 2 --speeds 1,0.5 --memory 4GiB,2GiB
        tp-kernels pipeline plan --model ./Qwen3-8B --stages 4 --schedule gpipe --batch 2 --sequence 1024
        tp-kernels pipeline plan --stages 2 --schedule forward_only --decode --json plan.json
        tp-kernels pipeline plan --speeds 1,0.5 --schedule forward_only --try-all
    """
    from tp_kernels.pipeline.partition import partition

    check_outputs(picture, save_costs=save_costs, json=json, chrome=chrome)
    if decode and schedule != "forward_only":
        raise UnsupportedError(f"--decode measures inference; {schedule} trains: use forward_only")
    if decode and try_all:
        raise UnsupportedError("--try-all runs forwards of whole sequences: leave --decode out")
    if rounds is not None and not try_all:
        raise UnsupportedError("--rounds has no effect without --try-all")
    if try_all and (stages != 2 or schedule != "forward_only"):
        raise UnsupportedError("--try-all: use --stages 2 --schedule forward_only")
    if try_all and threads not in (None, 1):
        raise UnsupportedError("--try-all runs stages of one thread: leave --threads out")
    if bandwidth is None and latency:
        raise UnsupportedError("--latency is that of a link: give its --bandwidth as well")
    mode = "train" if schedule != "forward_only" else "decode" if decode else "prefill"
    if costs is not None:
        found = _read(costs)
    else:
        clock = None
        if try_all:  # as the ranks that will run the cuts
            mode, threads, clock = "forward", 1, thread_time
        found = _measure(model, mode, batch, sequence, repeats, threads, clock)
    if save_costs is not None:
        save_costs.write_text(json_format.dumps([asdict(cost) for cost in found], indent=1) + "\n")
    factors = None if speeds is None else _numbers("--speeds", speeds)
    made = partition(
        found,
        stages,
        method=method,  # type: ignore[arg-type]  # checked there
        speeds=factors,
        memory=_sizes("--memory", memory),
        bandwidth=_sizes("--bandwidth", bandwidth),
        latency=latency,
        schedule=schedule,
        micro_batches=micro_batches,
        optimizer_factor=optimizer_factor,
        checkpoint=checkpoint,
        reorder=reorder,
    )
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(str(made), markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        json.write_text(made.to_json() + "\n")
    if picture is not None:
        made.timeline.save_picture(picture)
    if chrome is not None:
        made.timeline.save_chrome(chrome)
    for path in (save_costs, json, picture, chrome):
        if path is not None:
            console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    if try_all:
        from .pipeline_cuts import try_cuts

        try_cuts(console, model, found, made, (batch, sequence), rounds or 3)


def _measure(
    model: str,
    mode: str,
    batch: int,
    sequence: int,
    repeats: int,
    threads: int | None,
    clock: Callable[[], float] | None,
) -> list[LayerCost]:
    import torch
    from transformers import AutoConfig

    from tp_kernels.pipeline.causal_lm import load_units
    from tp_kernels.pipeline.profile import profile_units

    from .progress import converted, progress_bars

    if threads is not None:
        torch.set_num_threads(threads)
    with progress_bars() as bars:
        only_config = (Path(model) / "config.json").is_file()
        source = Path(model) if only_config else converted(model, bars)
        task = bars.add_task("measuring units", total=None)
        draw = torch.Generator().manual_seed(0)
        words = AutoConfig.from_pretrained(source).get_text_config().vocab_size
        return profile_units(
            load_units(source),
            torch.randint(0, words, (batch, sequence), generator=draw),
            mode=mode,
            repeats=repeats,
            clock=clock,
            progress=lambda done, _: bars.update(task, completed=done),
        )


def _read(path: Path) -> list[LayerCost]:
    from tp_kernels.pipeline.plan import LayerCost

    try:
        return [LayerCost(**fields) for fields in json_format.loads(path.read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise UnsupportedError(f"--costs {path}: not what --save-costs writes: {error}") from error


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ShapeError(f"{option} {text}: use numbers such as 1,0.5") from None


def _sizes(option: str, text: str | None) -> Any:
    """Bytes: a number for all, or a list."""
    if text is None:
        return None
    sizes = []
    for word in text.split(","):
        found = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)(i?B?)\s*", word, re.IGNORECASE)
        if not found or found[1].count(".") > 1:
            raise ShapeError(f"{option} {text}: use sizes such as 4GiB,512MiB or numbers of bytes")
        sizes.append(int(float(found[1]) * 1024 ** _UNITS[found[2].upper()]))
    return sizes[0] if len(sizes) == 1 else sizes
