"""`tp-kernels pipeline simulate`: when everything of a schedule happens, before anything runs."""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tp_kernels import ShapeError, UnsupportedError

from .outputs import check_outputs

if TYPE_CHECKING:
    from tp_kernels.pipeline.schedule import Schedule
    from tp_kernels.pipeline.simulate import Costs
    from tp_kernels.pipeline.timeline import Timeline

# By option: the field of Costs.
_NUMBERS = (
    "forward",
    "backward_input",
    "backward_weight",
    "backward",
    "communication",
    "activation",
)


def simulate(
    schedule: Annotated[
        str | None,
        typer.Option(
            help="gpipe, one_f_one_b, interleaved_one_f_one_b, pipedream, zero_bubble_h1, zero_bubble_h2, "
            "zero_bubble_v, dual_pipe_v, forward_only; or a table in a .csv file, as --csv writes it."
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes, or devices.")] = 4,
    micro_batches: Annotated[int, typer.Option(min=1, help="Parts of a batch.")] = 8,
    chunks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Stages per rank, where the schedule leaves a choice. Default: 2, or 1."
        ),
    ] = None,
    forward: Annotated[
        str | None, typer.Option(help="Seconds of a stage; a comma list has one number per stage.")
    ] = None,
    backward_input: Annotated[
        str | None, typer.Option(help="Seconds of the gradient of a stage's input.")
    ] = None,
    backward_weight: Annotated[
        str | None, typer.Option(help="Seconds of the gradients of a stage's parameters.")
    ] = None,
    backward: Annotated[
        str | None, typer.Option(help="Seconds of both in one go. Default: their sum.")
    ] = None,
    communication: Annotated[
        str | None, typer.Option(help="Seconds of a message to the next stage; overlaps with work.")
    ] = None,
    activation: Annotated[
        str | None, typer.Option(help="What a micro-batch keeps in a stage, in any unit.")
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            help="A JSON object with these numbers or lists: forward, backward_input, ..."
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="All schedules in one table. Costs are those of a rank's share of the model; where it is "
            "cut into several stages, each takes its part.",
        ),
    ] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Look for a schedule that suits the costs best.")
    ] = False,
    memory_limit: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="For --search and --compare: what a rank may keep, in the unit of --activation.",
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write the table of actions to this file.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Write a picture (.png, .svg, .pdf; needs matplotlib).")
    ] = None,
    chrome: Annotated[
        Path | None, typer.Option(help="Write a trace that ui.perfetto.dev opens.")
    ] = None,
) -> None:
    """What a schedule does, how long it takes, and how much of that is bubble.

    Prints the table of actions (2F0: forward of micro-batch 0 in stage 2; B: backward; I and W: its two
    parts, for the input and for the weights), then the time that every rank works, waits and idles. The
    bubble is given over the ideal time, as papers do, and over the total time; "in a long run" is what
    remains when the next step begins while this one ends. Without numbers, every action takes a second.

        tp-kernels pipeline simulate --schedule one_f_one_b --ranks 4 --micro-batches 8
        tp-kernels pipeline simulate --schedule zero_bubble_v --communication 0.1 --picture v.png
        tp-kernels pipeline simulate --compare --backward-input 1.2 --backward-weight 0.8
        tp-kernels pipeline simulate --search --memory-limit 6 --forward 1,1,2,1 --csv best.csv
        tp-kernels pipeline simulate --schedule best.csv --costs measured.json --chrome trace.json
    """
    wanted = [
        name
        for name, on in (("--schedule", schedule), ("--compare", compare), ("--search", search))
        if on
    ]
    if len(wanted) != 1:
        raise UnsupportedError(
            f"give one of --schedule, --compare and --search, not {' and '.join(wanted) or 'none'}"
        )
    if memory_limit is not None and schedule:
        raise UnsupportedError(
            "--memory-limit chooses schedules: use it with --search or --compare"
        )
    check_outputs(picture, csv=csv, chrome=chrome)
    given = (forward, backward_input, backward_weight, backward, communication, activation)
    cost = _costs(costs, dict(zip(_NUMBERS, given, strict=True)))
    console = Console() if sys.stdout.isatty() else Console(width=200)
    if compare:
        _refuse("--compare", {"--csv": csv, "--chrome": chrome, "--chunks": chunks})
        _compare(console, cost, ranks, micro_batches, memory_limit, picture)
        return
    if search:
        found = _search(cost, ranks, micro_batches, chunks or 1, memory_limit)
    else:
        found = _schedule(schedule or "", ranks, micro_batches, chunks)
    found.validate()
    timeline = found.simulate(cost)
    for text in (str(found), "", timeline.table()):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if csv is not None:
        csv.write_text(found.to_csv())
    if chrome is not None:
        timeline.save_chrome(chrome)
    if picture is not None:
        timeline.save_picture(picture)
    for path in (csv, chrome, picture):
        if path is not None:
            console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


def _refuse(what: str, others: dict[str, Any]) -> None:
    for name, value in others.items():
        if value is not None:
            raise UnsupportedError(f"{name} has no effect with {what}: leave it out")


def _costs(path: Path | None, given: dict[str, str | None]) -> Costs:
    from tp_kernels.pipeline.simulate import Costs

    found: dict[str, Any] = {}
    if path is not None:
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UnsupportedError(f"--costs {path}: {error}") from error
        if not isinstance(found, dict) or set(found) - set(Costs.__dataclass_fields__):
            raise UnsupportedError(
                f"--costs {path}: use an object with {', '.join(Costs.__dataclass_fields__)}"
            )
    for name, text in given.items():
        if text is not None:
            found[name] = _numbers(f"--{name.replace('_', '-')}", text)
    try:
        return Costs(**found)
    except (TypeError, ShapeError) as error:
        raise UnsupportedError(f"--costs {path}: numbers, or lists of numbers: {error}") from error


def _numbers(option: str, text: str) -> float | list[float]:
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        raise ShapeError(
            f"{option} {text}: use a number such as 0.5, or a list such as 1,1,2"
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers


def _schedule(name: str, ranks: int, micro_batches: int, chunks: int | None) -> Schedule:
    from tp_kernels.pipeline.generators import SCHEDULES
    from tp_kernels.pipeline.schedule import Schedule

    if name.endswith(".csv"):
        _refuse("a table", {"--chunks": chunks})
        try:
            text = Path(name).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UnsupportedError(f"--schedule {name}: {error}") from error
        return Schedule.from_csv(text, name=Path(name).stem)
    if name not in SCHEDULES:
        raise UnsupportedError(
            f"--schedule {name}: known are {', '.join(SCHEDULES)}, and .csv files"
        )
    make = SCHEDULES[name]
    if chunks is None:
        return make(ranks, micro_batches)
    if "chunks" not in inspect.signature(make).parameters:
        raise UnsupportedError(f"--chunks {chunks}: {name} has a fixed number of stages per rank")
    return make(ranks, micro_batches, chunks)


def _search(
    costs: Costs, ranks: int, micro_batches: int, chunks: int, memory_limit: float | None
) -> Schedule:
    from tp_kernels.pipeline.search import search

    from .progress import progress_bars

    with progress_bars() as bars:
        task = bars.add_task("starting", total=None)
        return search(
            ranks,
            micro_batches,
            costs,
            math.inf if memory_limit is None else memory_limit,
            chunks,
            progress=lambda what, done, total: bars.update(
                task, description=what, completed=done, total=total
            ),
        )


def _compare(
    console: Console,
    costs: Costs,
    ranks: int,
    micro_batches: int,
    memory_limit: float | None,
    picture: Path | None,
) -> None:
    from tp_kernels.bench.report import new_table
    from tp_kernels.pipeline.generators import SCHEDULES

    costs.check(ranks)
    shown: list[Timeline] = []
    table = new_table(
        "schedule", "stages", "seconds", "bubble/ideal", "bubble/total", "in a long run", "memory"
    )
    for name, make in SCHEDULES.items():
        schedule = make(ranks, micro_batches)
        timeline = schedule.simulate(_shared(costs, schedule))
        memory = max(timeline.peak_memory(rank) for rank in timeline.ranks)
        fits = memory_limit is None or memory <= memory_limit
        if fits:
            shown.append(timeline)
        row = [
            name,
            str(schedule.stages),
            f"{timeline.makespan:.4g}",
            f"{timeline.bubble_over_ideal:.1%}",
            f"{timeline.bubble_over_total:.1%}",
            f"{timeline.steady_bubble:.1%}",
            f"{memory:.4g}" if fits else f"{memory:.4g} > {memory_limit:.4g}",
        ]
        table.add_row(*row, style=None if fits else "dim")
    console.print(table)
    if picture is not None:
        from tp_kernels.pipeline.picture import save_pictures

        save_pictures(shown, picture)
        console.print(f"wrote {picture}", markup=False, highlight=False, soft_wrap=True)


def _shared(costs: Costs, schedule: Schedule) -> Costs:
    """Costs of the stages of `schedule`, if `costs` are those of the share of every rank."""
    from tp_kernels.pipeline.simulate import Costs

    parts = schedule.stages // schedule.ranks

    def split(value: float | Sequence[float] | None) -> float | list[float] | None:
        if isinstance(value, Sequence):
            return [value[rank] / parts for rank in schedule.stage_to_rank]
        return None if value is None else value / parts

    fields = {name: getattr(costs, name) for name in Costs.__dataclass_fields__}
    for name in (
        "forward",
        "backward_input",
        "backward_weight",
        "backward",
        "activation",
        "activation_weight",
    ):
        fields[name] = split(fields[name])
    if isinstance(costs.communication, Sequence) and parts > 1:
        raise UnsupportedError("--communication: give one number for all messages with --compare")
    return Costs(**fields)
