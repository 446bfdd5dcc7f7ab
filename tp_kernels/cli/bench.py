"""`tp-kernels bench`: options of the measurements; they are made in `tp_kernels.bench`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tp_kernels import ShapeError, UnsupportedError

if TYPE_CHECKING:
    from tp_kernels.bench.measure import Settings
    from tp_kernels.bench.peers import Peers
    from tp_kernels.bench.timing import Budget

bench_app = typer.Typer(
    help="Measure collectives, fused linear ops and transformer blocks on this machine.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

WorldOption = Annotated[
    str, typer.Option("--world", help="Number of ranks; a comma list measures several.")
]
ThreadsOption = Annotated[int, typer.Option(min=1, help="Threads per rank.")]
BindOption = Annotated[
    bool, typer.Option("--bind/--no-bind", help="Pin rank r to core r (modulo the cores).")
]
RoundsOption = Annotated[
    int | None, typer.Option(min=1, help="Turns of every contestant in a case.")
]
SecondsOption = Annotated[
    float | None,
    typer.Option("--slice", min=1e-4, help="Seconds of one turn; longer calls run once a turn."),
]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="A few cases and turns, in less than half a minute.")
]
WithoutOption = Annotated[
    str, typer.Option(help="Peers to leave out: a comma list of gloo, deepspeed, openmpi.")
]
PeersOption = Annotated[
    Path | None,
    typer.Option(help="Environment of the peers. Default: .venv-peers of the checkout."),
]
TimeoutOption = Annotated[
    float,
    typer.Option("--peer-timeout", min=0.1, help="Seconds until a peer's turn counts as hung."),
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")]
OutputOption = Annotated[
    Path | None,
    typer.Option(help="Write the report and its plots into this directory (needs matplotlib)."),
]


@bench_app.callback(invoke_without_command=True)
def _compare_option(
    context: typer.Context,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="OLD.json NEW.json", help="The same as the command `compare`."),
    ] = None,
) -> None:
    if compare is not None:
        if context.invoked_subcommand:
            raise UnsupportedError("--compare takes two reports and no command")
        _compare(*compare)


@bench_app.command("compare")
def compare_command(
    old: Annotated[Path, typer.Argument(help="A report that --json or --output wrote.")],
    new: Annotated[Path, typer.Argument(help="Another one of the same kind.")],
) -> None:
    """Two reports, row by row. A row is flagged only if each median is outside the other's spread.

    tp-kernels bench compare before.json after.json
    tp-kernels bench --compare before.json after.json
    """
    _compare(old, new)


@bench_app.command()
def collectives(
    op: Annotated[
        str,
        typer.Option(help="Comma list of all_reduce, reduce_scatter, all_gather. Default: all."),
    ] = "",
    sizes: Annotated[
        str,
        typer.Option(
            "--bytes",
            help="Sizes of the whole tensor, a comma list. Default: 1K to 64M in steps of four.",
        ),
    ] = "",
    dtype: Annotated[
        str, typer.Option(help="Comma list. Default: float32,bfloat16; --quick: float32.")
    ] = "",
    world: WorldOption = "2",
    threads: ThreadsOption = 1,
    bind: BindOption = True,
    rounds: RoundsOption = None,
    seconds: SecondsOption = None,
    quick: QuickOption = False,
    without: WithoutOption = "",
    peers: PeersOption = None,
    peer_timeout: TimeoutOption = 60.0,
    json: JsonOption = None,
    output: OutputOption = None,
) -> None:
    """All-reduce, reduce-scatter and all-gather by size, beside gloo, DeepSpeed and Open MPI.

    All contestants are alive at once and take turns; a call counts with its slowest rank; every
    result is checked against float64 in the same run. Before a call every rank writes its input
    anew, then the ranks meet; neither is timed. `make bench-peers` installs the peers.

        tp-kernels bench collectives --quick
        tp-kernels bench collectives --op all_reduce --bytes 16K --world 2,4,8
        tp-kernels bench collectives --output results --json results/today.json
    """
    from tp_kernels.bench import collectives as work

    usual = work.QUICK if quick else work.Settings()
    settings = work.Settings(
        ops=_choices("--op", op, work.OPS, usual.ops),
        dtypes=_choices("--dtype", dtype, work.ALL_DTYPES, usual.dtypes),
        sizes=_numbers("--bytes", sizes, usual.sizes),
        worlds=_numbers("--world", world),
        threads=threads,
        bind=bind,
        budget=_budget(usual.budget, rounds, seconds),
    )
    _run("collectives", work.run, settings, _peers(peers, without, peer_timeout), json, output)


@bench_app.command()
def linear(
    op: Annotated[
        str,
        typer.Option(
            help="Comma list of linear_all_reduce, linear_reduce_scatter, all_gather_linear, "
            "copy_linear. Default: all."
        ),
    ] = "",
    way: Annotated[
        str, typer.Option("--pass", help="Comma list of forward, backward. Default: both.")
    ] = "",
    hidden: Annotated[
        str, typer.Option(help="Hidden sizes. Default: 512,1024,2048,4096; --quick: 512.")
    ] = "",
    rows: Annotated[
        str, typer.Option(help="Rows M. Default: 1,4,16,128,512,2048; --quick: 1,128.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    world: WorldOption = "2",
    threads: ThreadsOption = 1,
    bind: BindOption = True,
    rounds: RoundsOption = None,
    seconds: SecondsOption = None,
    quick: QuickOption = False,
    without: WithoutOption = "",
    peers: PeersOption = None,
    peer_timeout: TimeoutOption = 60.0,
    json: JsonOption = None,
    output: OutputOption = None,
) -> None:
    """The four fused ops against their limits: product alone, collective alone, one after the other.

    E is the share of the communication that is hidden; ideal is max(product, collective) / fused.
    Row-parallel ops have x \\[M, H/W] and W \\[H, H/W], column-parallel ops x \\[M, H] and
    W \\[H/W, H]. Peers take part in the forward of linear_all_reduce: torch.mm, then their all-reduce.

        tp-kernels bench linear --quick
        tp-kernels bench linear --op linear_all_reduce --pass forward --hidden 2048 --rows 1,16
        tp-kernels bench linear --output results
    """
    from tp_kernels.bench import linear as work
    from tp_kernels.bench.collectives import ALL_DTYPES

    usual = work.QUICK if quick else work.Settings()
    settings = work.Settings(
        ops=_choices("--op", op, tuple(work.OPS), usual.ops),
        passes=_choices("--pass", way, work.PASSES, usual.passes),
        hidden=_numbers("--hidden", hidden, usual.hidden),
        rows=_numbers("--rows", rows, usual.rows),
        dtype=_choice("--dtype", dtype, ALL_DTYPES),
        worlds=_numbers("--world", world),
        threads=threads,
        bind=bind,
        budget=_budget(usual.budget, rounds, seconds),
    )
    _run("linear", work.run, settings, _peers(peers, without, peer_timeout), json, output)


@bench_app.command()
def block(
    part: Annotated[
        str, typer.Option(help="Comma list of mlp, attention, block. Default: all.")
    ] = "",
    way: Annotated[
        str, typer.Option("--pass", help="Comma list of forward, forward+backward. Default: both.")
    ] = "",
    hidden: Annotated[
        str,
        typer.Option(
            help="576 (like SmolLM2-135M), 2048 (like Llama-3.2-1B). Default: both; --quick: 576."
        ),
    ] = "",
    rows: Annotated[
        str,
        typer.Option(help="Tokens; 1 is a decoding step. Default: 1,128,512; --quick: 1,128."),
    ] = "",
    world: WorldOption = "2",
    threads: ThreadsOption = 1,
    bind: BindOption = True,
    rounds: RoundsOption = None,
    seconds: SecondsOption = None,
    quick: QuickOption = False,
    json: JsonOption = None,
    output: OutputOption = None,
) -> None:
    """MLP, attention and a whole transformer block, split over ranks and on one process.

    The unsplit layer runs on one process with one thread, and with as many threads as there are
    ranks. Every result and gradient is checked against float64.

        tp-kernels bench block --quick
        tp-kernels bench block --hidden 2048 --rows 1,512 --output results
    """
    from tp_kernels.bench import block as work
    from tp_kernels.bench.peers import Peers

    usual = work.QUICK if quick else work.Settings()
    settings = work.Settings(
        parts=_choices("--part", part, work.PARTS, usual.parts),
        passes=_choices("--pass", way, work.PASSES, usual.passes),
        hidden=_numbers("--hidden", hidden, usual.hidden),
        rows=_numbers("--rows", rows, usual.rows),
        worlds=_numbers("--world", world),
        threads=threads,
        bind=bind,
        budget=_budget(usual.budget, rounds, seconds),
    )
    _run("block", work.run, settings, Peers(), json, output)


@bench_app.command()
def p2p(
    measure: Annotated[
        str, typer.Option(help="Comma list of latency, bandwidth. Default: both.")
    ] = "",
    sizes: Annotated[
        str,
        typer.Option(
            "--bytes", help="Sizes of a message, a comma list. Default: 1K to 64M in steps of four."
        ),
    ] = "",
    threads: ThreadsOption = 1,
    bind: BindOption = True,
    rounds: RoundsOption = None,
    seconds: SecondsOption = None,
    quick: QuickOption = False,
    json: JsonOption = None,
    output: OutputOption = None,
) -> None:
    """Messages from one rank to another: PipelineCommunicator, P2PChannel, and send and recv of gloo.

    Latency is half a round trip, bandwidth a stream one way. Contestants take turns; what arrives is
    compared bit by bit.

        tp-kernels bench p2p --quick
        tp-kernels bench p2p --measure latency --bytes 1K,64K --output results
    """
    from tp_kernels.bench import p2p as work
    from tp_kernels.bench.peers import Peers

    usual = work.QUICK if quick else work.Settings()
    settings = work.Settings(
        measures=_choices("--measure", measure, work.MEASURES, usual.measures),
        sizes=_numbers("--bytes", sizes, usual.sizes),
        threads=threads,
        bind=bind,
        budget=_budget(usual.budget, rounds, seconds),
    )
    _run("p2p", work.run, settings, Peers(), json, output)


@bench_app.command()
def pipeline(
    schedule: Annotated[
        str,
        typer.Option(
            help="Comma list of gpipe, one_f_one_b, interleaved_one_f_one_b, zero_bubble_h1, "
            "zero_bubble_v, dual_pipe_v. Default: all."
        ),
    ] = "",
    world: WorldOption = "2,4",
    micro_batches: Annotated[int, typer.Option(min=1, help="Parts of a batch.")] = 8,
    seconds: Annotated[
        float | None,
        typer.Option(min=1e-5, help="Seconds a rank sleeps for each of F, I and W."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps; the median counts.")] = None,
    quick: QuickOption = False,
    json: JsonOption = None,
    output: OutputOption = None,
) -> None:
    """Bubbles of pipeline schedules: measured, by formula, and simulated.

    Stages sleep, so that more ranks than cores do no harm; everything else is what a training step does.
    The exit status is 1 if a bubble is more than three points of the ideal time off.

        tp-kernels bench pipeline --quick
        tp-kernels bench pipeline --schedule gpipe,zero_bubble_v --world 4 --output results
    """
    from tp_kernels.bench import pipeline as work
    from tp_kernels.bench import plots, report, tables
    from tp_kernels.bench.environment import environment

    usual = work.QUICK if quick else work.Settings()
    settings = work.Settings(
        schedules=_choices("--schedule", schedule, tuple(work.FORMULAS), usual.schedules),
        worlds=_numbers("--world", world),
        micro_batches=micro_batches,
        seconds=seconds or usual.seconds,
        steps=steps or usual.steps,
    )
    if output is not None:
        plots.pyplot()  # missing: better known before the measurement than after it
    facts = environment()
    with _progress() as progress:
        rows, timelines = work.run(settings, progress)
    found = report.document("pipeline", facts, asdict(settings), rows, [])
    console = _console()
    tables.show_environment(console, found)
    work.show(console, rows)
    written = [json] if json is not None else []
    if output is not None:
        written += [output / "pipeline.json", *work.plot(rows, timelines, output)]
    for path in written:
        if path.suffix == ".json":
            report.write(path, found)
        _say(console, path)
    raise typer.Exit(0 if all(row["derived"]["target"] for row in rows) else 1)


def _budget(usual: Budget, rounds: int | None, seconds: float | None) -> Budget:
    return replace(usual, rounds=rounds or usual.rounds, seconds=seconds or usual.seconds)


def _peers(directory: Path | None, without: str, timeout: float) -> Peers:
    from tp_kernels.bench.collectives import PEERS
    from tp_kernels.bench.peers import Peers

    return Peers(
        directory, without=_choices("--without", without, PEERS, ()), slice_seconds=timeout
    )


def _run(
    kind: str,
    measure: Callable[..., list[dict[str, Any]]],
    settings: Settings,
    peers: Peers,
    json: Path | None,
    output: Path | None,
) -> None:
    """Measure with a bar, print the table, write the files that were asked for."""
    from tp_kernels.bench import plots, report, tables
    from tp_kernels.bench.environment import environment

    if output is not None:
        plots.pyplot()  # missing: better known before the measurement than after it
    facts = environment()
    with _progress() as progress:
        results = measure(settings, peers, progress)
    facts["versions"] |= peers.versions
    found = report.document(kind, facts, asdict(settings), results, peers.not_run)
    console = _console()
    tables.show(console, found)
    if json is not None:
        report.write(json, found)
        _say(console, json)
    if output is not None:
        report.write(output / f"{kind}.json", found)
        for path in (output / f"{kind}.json", *plots.plot(found, output)):
            _say(console, path)


def _compare(old: Path, new: Path) -> None:
    from tp_kernels.bench import compare, report

    compare.show(_console(), report.load(old), report.load(new))


def _console() -> Console:
    """As wide as the terminal; a file or a pipe has no width to respect."""
    return Console() if sys.stdout.isatty() else Console(width=140)


def _say(console: Console, path: Path) -> None:
    console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    from .progress import progress_bars

    with progress_bars() as bars:
        task = bars.add_task("starting", total=None)
        yield lambda what, done, total: bars.update(
            task, description=what, completed=done, total=total
        )


def _choices(option: str, text: str, known: Sequence[str], usual: Sequence[str]) -> Sequence[str]:
    """The names of a comma list; `usual` where it is empty."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return [_choice(option, name, known) for name in names] or usual


def _choice(option: str, name: str, known: Sequence[str]) -> str:
    if name not in known:
        raise UnsupportedError(f"{option} {name}: known are {', '.join(known)}")
    return name


def _numbers(option: str, text: str, usual: Sequence[int] = ()) -> Sequence[int]:
    """ "1K,64,2M" -> [1024, 64, 2097152]; `usual` where it is empty."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    numbers = []
    for word in (word.strip() for word in text.split(",") if word.strip()):
        digits, unit = (word[:-1], units.get(word[-1].upper())) if word[-1].isalpha() else (word, 1)
        if unit is None or not digits.isdecimal() or int(digits) < 1:
            raise ShapeError(f"{option} {word}: use positive numbers such as 4, 16K or 64M")
        numbers.append(int(digits) * unit)
    if not numbers and not usual:
        raise ShapeError(f"{option}: give at least one number")
    return numbers or usual
