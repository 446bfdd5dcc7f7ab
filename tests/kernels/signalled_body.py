"""What a rank does in the tests of products that signal by groups of rows; mutants have to fail it.

These kernels involve no peer, so one rank is enough.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from triton.runtime import _allocation

from tests.kernels.body import DTYPES, gives_up, values, whole_numbers
from tests.oracle import LAYOUTS, digest, lay_out
from tp_kernels import ShapeError, UnsupportedError, split_sizes
from tp_kernels.comm.process_group import ordered_sum
from tp_kernels.comm.row_groups import RowGroups

GUARD = 8192  # elements around results, which nobody may touch: also what a defect would reach


class Product:
    """A product in poisoned memory.

    Args:
        package: whose kernels.
        groups: of the rows.
        xs, ws: operands.
        tiling: changes of the interpreter's.
    """

    def __init__(
        self, package: str, groups: RowGroups, xs: list[Tensor], ws: list[Tensor], **tiling: Any
    ) -> None:
        self.module = importlib.import_module(f"{package}.linear_signalled")
        gemm = importlib.import_module(f"{package}._gemm")
        self.groups, self.xs, self.ws = groups, xs, ws
        self.tiling = replace(gemm.INTERPRETER, **tiling)
        rows, width = groups.total, ws[0].shape[0]
        self._out = torch.full((rows * width + 2 * GUARD,), torch.nan, dtype=xs[0].dtype)
        self.out = self._out[GUARD : GUARD + rows * width].view(rows, width)
        self._counters = torch.full((len(groups) + 2 * GUARD,), -1, dtype=torch.int32)
        self.counters = self._counters[GUARD : GUARD + len(groups)].zero_()

    def start(self, **options: Any) -> Tensor:
        self.module.linear_signalled(
            self.xs, self.ws, self.groups, self.out, self.counters, tiling=self.tiling, **options
        )
        for memory in (self._out.isnan(), self._counters == -1):
            assert bool(memory[:GUARD].all()) and bool(memory[-GUARD:].all()), "beyond the result"
        return self.out

    @property
    def targets(self) -> list[int]:
        """Tiles of each group, counted by the rows of each destination."""
        m, n, groups = self.tiling.block_m, self.tiling.block_n, self.groups
        columns = math.ceil(self.ws[0].shape[0] / n)
        return [
            columns * sum(math.ceil(piece.rows / m) for piece in groups.ranges(group))
            for group in range(len(groups))
        ]


def shapes(seed: int) -> Iterator[tuple[RowGroups, int, int]]:
    """(groups, width, inner): no rows, fewer than destinations, uneven, parts of several rows each."""
    random = Random(seed)
    yield RowGroups([41, 41, 40], 17), 20, 5  # three groups, all of uneven tiles
    yield RowGroups([60, 20, 20], 16), 17, 3  # two kinds of parts, mixed, and then of one kind
    for rows in (0, 1, 2, 5, 33, 50, 67):
        unit = random.choice((1, 1, 7, 20))
        counts = [unit * count for count in split_sizes(rows // unit, random.choice((1, 2, 3, 5)))]
        groups = RowGroups(counts, random.choice((1, 3, 16, 32, 100)))
        yield groups, random.choice((1, 5, 17, 40)), random.choice((1, 5, 20))


def exact(package: str, seed: int, **tiling: Any) -> None:
    """Whole numbers: the reference's bits in every place, every counter at its target."""
    for index, (groups, width, inner) in enumerate(shapes(seed)):
        dtype = DTYPES[(seed + index) % len(DTYPES)]
        x, w, _ = whole_numbers((groups.total, width, inner), dtype, 0, seed)
        product = Product(package, groups, [x], [w], **tiling)
        expected = product.module.reference([x], [w], groups)
        where = (groups.division, groups.parts, groups.size, width, inner, dtype)
        assert digest(product.start()) == digest(expected), where
        assert product.counters.tolist() == product.targets, where


def by_groups(package: str, **tiling: Any) -> None:
    """One program that ends early has finished the first groups, all of them, and nothing else."""
    groups = RowGroups([41, 41, 40], 17)
    x, w, _ = whole_numbers((groups.total, 20, 5), torch.float32, 0, 1)
    whole = Product(package, groups, [x], [w], programs=1, **tiling)
    expected, targets = whole.start(), whole.targets
    for done in range(len(groups) + 1):
        product = Product(package, groups, [x], [w], programs=1, **tiling)
        # Only the tiles of these groups are launched.
        with mock.patch.object(RowGroups, "__len__", lambda _, done=done: done):
            product.counters = product._counters[GUARD : GUARD + done]
            product.start()
        end = groups.start(done)
        assert torch.equal(product.out[:end], expected[:end]), done
        assert bool(product.out[end:].isnan().all()), done
        assert product.counters.tolist() == targets[:done]


def several_pairs(package: str, **tiling: Any) -> None:
    """Three pairs of x and W, summed before they are rounded."""
    groups = RowGroups([14, 7], 5)
    for dtype in DTYPES:
        given = [whole_numbers((21, 18, inner), dtype, 1, inner) for inner in (5, 1, 19)]
        xs, ws = [x for x, _, _ in given], [w.t().contiguous().t() for _, w, _ in given]
        product = Product(package, groups, xs, ws, **tiling)
        assert digest(product.start()) == digest(product.module.reference(xs, ws, groups))


def against_float64(package: str) -> None:
    """All layouts and dtypes, within the bound of tests/oracle.py for one rounding."""
    for index, layout in enumerate(LAYOUTS * len(DTYPES)):
        dtype, inner = DTYPES[index % len(DTYPES)], (5, 31, 40)[index % 3]
        groups = RowGroups([12, 11], (4, 16)[index % 2])
        x, w = (values((n, inner), dtype, n, index) for n in (23, 19))
        if layout == "expanded":
            x, w = x[:1].expand(23, inner), w[:1].expand(19, inner)
        product = Product(package, groups, [lay_out(x, layout)], [lay_out(w, layout)])
        rows = [r for g in range(len(groups)) for p in groups.ranges(g) for r in range(*_span(p))]
        x64, w64 = x.double()[rows], w.double()
        unit, unit32 = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2
        error = 1.02 * (unit + 10 * math.sqrt(inner) * unit32) * (x64.abs() @ w64.abs().t())
        excess = (product.start().double() - x64 @ w64.t()).abs() - error
        assert bool((excess <= torch.finfo(dtype).tiny).all()), (layout, dtype)


def _span(piece: Any) -> tuple[int, int]:
    return piece.source, piece.source + piece.rows


def by_tma(package: str) -> None:
    """The same bits where operands are loaded by the tensor memory accelerator."""
    groups, allocator = RowGroups([12, 11], 5), _allocation._allocator.get()
    for dtype in DTYPES:
        x, w = (values((n, 24), dtype, n, 3) for n in (23, 19))
        plain, tma = (Product(package, groups, [x], [w], tma=tma) for tma in (False, True))
        assert digest(plain.start()) == digest(tma.start())
    assert _allocation._allocator.get() is allocator, "the caller's allocator has changed"


def programs(package: str) -> None:
    """Some multiprocessors are left, and one program is launched in any case."""
    module = importlib.import_module(f"{package}.linear_signalled")
    tiling = replace(importlib.import_module(f"{package}._gemm").INTERPRETER, programs=132)
    properties = mock.Mock(multi_processor_count=114)
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=properties):
        for reserved, device, expected in (
            (16, "cpu", 116), (0, "cuda", 114), (16, "cuda", 98), (500, "cuda", 1),
        ):  # fmt: skip
            assert module.programs_of(tiling, torch.device(device), reserved) == expected
    groups = RowGroups([40], 16)
    product = Product(package, groups, [torch.ones(40, 3)], [torch.ones(33, 3)], programs=5)
    launched = []
    kernel = module.multiply_by_groups

    class Recorder:
        def __getitem__(self, grid: tuple[int]) -> Any:
            launched.extend(grid)
            return kernel[grid]

    with mock.patch.object(module, "multiply_by_groups", Recorder()):
        product.start(reserved=3)
        product.counters.zero_()
        product.start()
    assert launched == [2, 5]


def waits(package: str) -> None:
    for dtype in DTYPES:
        wait_and_give_up(package, dtype)


def wait_and_give_up(package: str, dtype: torch.dtype) -> None:
    """A complete group is awaited and left alone; one that is not leaves a record, and NaN."""
    module = importlib.import_module(f"{package}.wait_for_group")
    signals = importlib.import_module(f"{package}._signals")
    counters = torch.tensor([3, 5, 4], dtype=torch.int32)
    memory = torch.ones(130 * 3, dtype=dtype)
    record = module.new_record(memory.device)

    def wait(group: int, tiles: int, timeout: float = 1.0) -> None:
        rows = memory[130 * group : 130 * group + 130]
        module.wait_for_group(
            "linear_reduce_scatter", counters, rows, record,
            group=group, tiles=tiles, rank=3, timeout=timeout,
        )  # fmt: skip

    wait(0, 3)
    wait(1, 4)  # beyond it
    module.check(record, 1.0)
    assert bool((memory == 1).all())
    with gives_up(
        "linear_reduce_scatter: rank 3 waited for group 2 of its product, of which 4 of 5 tiles were "
        "done within 0.2 s"
    ):
        wait(2, 5, timeout=0.2)
    assert bool((memory[:260] == 1).all()) and bool(memory[260:].isnan().all())
    names = dict(zip(signals.RECORD, record.tolist(), strict=True))
    assert names == {
        "state": 2, "rank": 3, "operation": 5, "channel": 2, "signal": signals.TILES.value,
        "peer": 0, "expected": 5, "seen": 4,
    }  # fmt: skip
    with gives_up("group 2"):  # at once, and sends nothing that could be taken for data
        wait(0, 3)
    assert bool(memory[:130].isnan().all()) and bool((memory[130:260] == 1).all())


def sums(package: str) -> None:
    """The bits of ordered_sum, of one to several blocks, with bias from any column on."""
    module = importlib.import_module(f"{package}.sum_parts")
    for index, (world, shape, start) in enumerate(
        [(2, (5, 3), 0), (3, (1, 2500), 7), (8, (1024,), 1023), (5, (41, 50), 0), (1, (1,), 2)]
    ):
        for dtype in DTYPES:
            parts = values((world, *shape), dtype, 0, index)
            width = shape[-1] if start == 0 else 11
            bias = values((width,), dtype, 1, index)
            place = (torch.arange(math.prod(shape)) + start) % width
            for used in (None, bias, torch.stack([bias, bias], 1)[:, 0]):
                guarded = torch.full((math.prod(shape) + GUARD,), torch.nan, dtype=dtype)
                out = guarded[:-GUARD].view(shape)
                assert module.sum_parts(parts, used, out, start) is out
                added = None if used is None else bias[place].view(shape)
                expected = ordered_sum(parts, added, torch.empty(shape, dtype=dtype))
                assert digest(out) == digest(expected), (world, shape, start, dtype)
                assert bool(guarded[-GUARD:].isnan().all())


def refused(package: str) -> None:
    """Before anything is launched."""
    x, w, groups = torch.ones(4, 3), torch.ones(5, 3), RowGroups([4], 3)
    out, counters = torch.ones(4, 5), torch.zeros(2, dtype=torch.int32)
    run = importlib.import_module(f"{package}.linear_signalled").linear_signalled
    for error, text, args in (
        (ShapeError, "expected \\[R, K\\]", (x, w.t(), groups, out, counters)),
        (ShapeError, "groups of 5 rows, x has 4", (x, w, RowGroups([5], 3), out, counters)),
        (ShapeError, "out is \\(5, 4\\)", (x, w, groups, torch.ones(5, 4), counters)),
        (ShapeError, "strides \\(1, 4\\)", (x, w, groups, torch.ones(5, 4).t(), counters)),
        (ShapeError, "out is .* torch.float16", (x, w, groups, out.half(), counters)),
        (ShapeError, "counters is \\(3,\\)", (x, w, groups, out, counters.new_zeros(3))),
        (ShapeError, "counters is .* torch.int64", (x, w, groups, out, counters.long())),
        (UnsupportedError, "w is torch.float16", (x, w.half(), groups, out, counters)),
        (UnsupportedError, "torch.float64", (x.double(), w.double(), groups, out, counters)),
    ):
        with pytest.raises(error, match=text):
            run(*args)
    assert counters.tolist() == [0, 0] and bool((out == 1).all())
