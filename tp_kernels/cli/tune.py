"""`tp-kernels tune`: start ranks, let them tune, print what they agreed on and what the cache holds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from tp_kernels.bench.report import microseconds, new_table
from tp_kernels.comm import ParallelGroup, Ranks, ShapeError, UnsupportedError
from tp_kernels.kernels._gemm import Tiling
from tp_kernels.kernels.workspace import DTYPES
from tp_kernels.planning import Limits, Product, Tuned, load, save, tune_product
from tp_kernels.planning.cache import Entry, default_path, read
from tp_kernels.planning.hardware import INTERPRETED, Hardware, agreed
from tp_kernels.planning.products import entry
from tp_kernels.planning.tilings import GATHERING, OPERATIONS, ShapeClass, candidates

from .progress import progress_bars

# Rows, output and input features of a whole layer: down and output projection of Llama-3-8B and -70B, from
# a decoding step of a few sequences to a long prompt.
SHAPES = tuple(
    (rows, n, k)
    for n, k in ((4096, 14336), (4096, 4096), (8192, 28672), (8192, 8192))
    for rows in (16, 128, 1024, 8192)
)
TINY_SHAPES = ((4, 32, 64), (40, 32, 64))
NOT_A_TIME = "interpreted, not a GPU time"


@dataclass(frozen=True)
class Request:
    """What every rank is asked to do.

    Args:
        products: one of each class.
        interpreted: on CPU tensors, in the Triton interpreter.
        limits: of a product.
        path: of the cache.
    """

    products: tuple[Product, ...]
    interpreted: bool
    limits: Limits
    path: Path


@dataclass(frozen=True)
class Answer:
    """What rank 0 reports: by product the result and the built-in choice, and what there is to say."""

    hardware: Hardware
    found: list[tuple[Product, Tuned[Tiling], Tiling]]
    notes: list[str]


def run(
    operations: Sequence[str],
    shapes: Sequence[tuple[int, int, int]],
    dtype: torch.dtype,
    *,
    nproc: int,
    interpreted: bool,
    limits: Limits,
    path: Path | None,
) -> None:
    """Tune, store, print; all operations and usual shapes where none are given."""
    if nproc < 2:
        raise ShapeError(f"--nproc {nproc}: one rank communicates nothing; tune with 2 or more")
    if not interpreted:
        check_devices(nproc)
    path = path or default_path()
    products, left = products_of(
        operations or OPERATIONS, shapes or (TINY_SHAPES if interpreted else SHAPES), dtype, nproc
    )
    request = Request(products, interpreted, limits, path)
    environment = {"TRITON_INTERPRET": str(int(interpreted))}
    with Ranks(nproc, threads=1 if interpreted else None, env=environment) as ranks:
        answer = ranks.run(work, request)[0]
    console = _console()
    _print_results(console, answer)
    for note in (*left, *answer.notes):
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False, soft_wrap=True)
    if not answer.found:
        raise UnsupportedError("no product could be tuned; the notes say why")
    console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)


def show(path: Path | None) -> None:
    """Print the cache."""
    path = path or default_path()
    tables, problem = read(path)
    console = _console()
    if problem:
        console.print(f"[yellow]note:[/] {escape(problem)}", highlight=False, soft_wrap=True)
    elif not tables:
        console.print(f"{path}: nothing measured yet", highlight=False, soft_wrap=True)
    for hardware, entries in sorted(tables.items()):
        console.print(f"\n[bold]{escape(str(hardware))}[/]{_label(hardware)}", highlight=False)
        table = new_table("op", "shots", "bits", "ranks", "M, N, K up to", "tile", "warps", "stages",
                          "programs", "senders", "us (p10..p90)", "ratio", "date")  # fmt: skip
        for shape, one in sorted(entries.items()):
            tiling = one.tiling
            table.add_row(
                shape.operation,
                *map(str, (shape.shots, 8 * shape.itemsize, shape.world)),
                f"{shape.rows}, {shape.width}, {shape.inner}",
                _tile(tiling),
                *(
                    str(tiling.get(name, "?"))
                    for name in ("warps", "stages", "programs", "senders")
                ),
                *_times(one),
                one.date.partition("T")[0],
            )
        console.print(table)


def sizes(text: str) -> tuple[int, int, int]:
    """ "16,4096,14336" -> (16, 4096, 14336)."""
    numbers = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if len(numbers) != 3 or min(numbers) < 1:
        raise ShapeError(f"--shape {text}: use rows, output and input features, as 16,4096,14336")
    rows, n, k = numbers
    return rows, n, k


def dtype_of(name: str) -> torch.dtype:
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    if name not in dtypes:
        raise UnsupportedError(f"--dtype {name}: known are {', '.join(dtypes)}")
    return dtypes[name]


def check_devices(nproc: int) -> None:
    """Refuse to start ranks that have no GPU each, with the way out."""
    if torch.version.cuda is None:
        found = f"torch {torch.__version__} is built without CUDA"
    elif not torch.cuda.is_available():
        found = "torch sees no CUDA device (is there a driver, what is CUDA_VISIBLE_DEVICES?)"
    elif torch.cuda.device_count() < nproc:
        found = f"torch sees {torch.cuda.device_count()} (use --nproc)"
    else:
        return
    raise UnsupportedError(
        f"tune measures on GPUs, one for each of {nproc} ranks: {found}. To see it at work without "
        "one, with times that are no times of a GPU: tp-kernels tune --interpreter"
    )


def products_of(
    operations: Sequence[str],
    shapes: Sequence[tuple[int, int, int]],
    dtype: torch.dtype,
    world: int,
) -> tuple[tuple[Product, ...], list[str]]:
    """What a rank multiplies for whole layers of `shapes`, and which are left out, being of one class.

    Of a layer whose rows are gathered, every rank has its part of N, of others its part of K.
    """
    by_class: dict[ShapeClass, Product] = {}
    left = []
    for operation in operations:
        for rows, n, k in shapes:
            if operation in GATHERING:
                product = Product(operation, rows, -(-n // world), k, dtype)
            else:
                product = Product(operation, rows, n, -(-k // world), dtype)
            first = by_class.setdefault(product.shape_class(world), product)
            if first is not product:
                left.append(f"{product} is left out: it takes the tiling of {first}")
    return tuple(by_class.values()), left


def work(request: Request) -> Answer:
    """In a rank: tune all products; results are stored one by one, so that a long run may be stopped."""
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if request.interpreted else torch.device("cuda", local)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    found, notes = [], []
    with ParallelGroup() as group, _progress(group.rank == 0) as progress:
        hardware = agreed(Hardware.of(device), group)
        for index, product in enumerate(request.products):
            head = f"{index + 1}/{len(request.products)} {product}:"
            try:
                tuned = tune_product(
                    group, product, device, request.limits, partial(progress, head)
                )
            except UnsupportedError as error:  # on every rank
                notes.append(f"{product}: {error}")
                continue
            shape = product.shape_class(group.size)
            built_in = candidates(hardware, shape)[0]
            note = save(group, hardware, {shape: entry(product, tuned, built_in)}, request.path)
            found.append((product, tuned, built_in))
            notes += [note] if note else []
        # What was stored is what users will get.
        notes += load(group, device, request.path).notes
    return Answer(hardware, found, notes)


def _print_results(console: Console, answer: Answer) -> None:
    console.print(f"{answer.hardware}{_label(answer.hardware)}", highlight=False)
    console.print(
        "Microseconds of a call on its slowest rank, median (p10..p90); ratio: built-in / fastest.",
        highlight=False,
    )
    table = new_table("product of a rank", "built-in", "fastest", "warps", "stages", "programs",
                      "senders", "us (p10..p90)", "ratio", "tried")  # fmt: skip
    dropped: dict[str, list[str]] = {}
    for product, tuned, built_in in answer.found:
        best = tuned.winner
        table.add_row(
            str(product),
            *map(_tile, (asdict(built_in), asdict(best))),
            *map(str, (best.warps, best.stages, best.programs, best.senders)),
            *_times(entry(product, tuned, built_in)),
            f"{len(tuned.timings)} of {len(tuned.timings) + len(tuned.dropped)}",
        )
        for tiling, why in tuned.dropped.items():
            dropped.setdefault(why, []).append(f"{product}: {tiling}")
    console.print(table)
    for why, where in dropped.items():
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        console.print(
            f"[yellow]dropped:[/] {escape(where[0])}{more}: {escape(why)}",
            highlight=False,
            soft_wrap=True,
        )


def _tile(tiling: dict[str, int]) -> str:
    return " x ".join(str(tiling.get(f"block_{side}", "?")) for side in "mnk")


def _times(one: Entry) -> tuple[str, str]:
    median, p10, p90 = map(microseconds, (one.median_us, one.p10_us, one.p90_us))
    ratio = f"{one.built_in_us / one.median_us:.2f}" if one.built_in_us else "-"
    return f"{median} ({p10}..{p90})", ratio


def _label(hardware: Hardware) -> str:
    return f" [yellow]({NOT_A_TIME})[/]" if hardware.capability == INTERPRETED else ""


def _console() -> Console:
    """As wide as the terminal; a file or a pipe has no width to respect."""
    return Console() if sys.stdout.isatty() else Console(width=160)


@contextmanager
def _progress(shown: bool) -> Iterator[Callable[[str, str, int, int], None]]:
    """A bar for one product after the other: which, what runs, steps done, steps in all."""
    if not shown:
        yield lambda product, what, done, total: None
        return
    with progress_bars() as bars:
        task = bars.add_task("starting", total=None)
        yield lambda product, what, done, total: bars.update(
            task, description=f"{product} {what}", completed=done, total=total
        )
