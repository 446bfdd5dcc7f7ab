"""What ranks do in the tests of the products that sum over ranks; see body.py.

"linear_all_reduce_2" is linear_all_reduce in two shots.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import oracle
from tests.kernels.body import DTYPES, REAL, Kernels, check, kernels, stalled, whole_numbers
from tests.oracle import LAYOUTS, Case, digest
from tp_kernels import (
    CollectiveTimeoutError,
    ParallelGroup,
    ShapeError,
    UnsupportedError,
    split_sizes,
)

# Of the interpreter's tiles in float32.
CHUNK = 16 * 16 * 4
# Rows and widths about a tile and its parts: less than the ranks, none, one tile, several with a ragged end.
ROWS = (0, 1, 2, 5, 33, 34, 50)
WIDTHS = (1, 5, 16, 17, 24)
INNERS = (1, 2, 16, 31, 40)


def module_of(k: Kernels, operation: str) -> Any:
    return k.module(operation.removesuffix("_2"))


def run(k: Kernels, operation: str, x: Any, w: Any, **more: Any) -> Tensor:
    """Into memory full of NaN, so that what nobody writes is seen."""
    name = operation.removesuffix("_2")
    if name == "linear_all_reduce":
        more["shots"] = 2 if operation.endswith("_2") else 1
    first, (width, _) = (x, w.shape) if isinstance(x, Tensor) else (x[0], w[0].shape)
    rows = len(first)
    if name == "linear_reduce_scatter":
        counts = more.get("counts") or split_sizes(rows, k.group.size)
        rows = counts[k.group.rank]
    out = torch.full((rows, width), torch.nan, dtype=first.dtype)
    assert getattr(k.module(name), name)(x, w, k.workspace, out=out, **more) is out
    return out


def cases(operation: str, seed: int, each: int) -> list[Case]:
    """`each` cases for every dtype; all layouts in turn."""
    random = Random(f"{operation} {seed}")
    return [
        Case(
            operation.removesuffix("_2"),
            leading=(ROWS[(seed + index) % len(ROWS)],),
            inner=random.choice(INNERS),
            outs=(random.choice(WIDTHS),),
            biased=(random.random() < 0.6,),
            dtype=dtype,
            layout=LAYOUTS[(seed + index) % len(LAYOUTS)],
            frozen="xwb",
            seed=random.randrange(1 << 30),
        )
        for index, dtype in enumerate(DTYPES * each)
    ]


def against_float64(
    package: str, operation: str, given: list[Case], again: bool = False, **options: Any
) -> list[str]:
    """Every case within the bound of tests/oracle.py; digests of the results."""
    digests = []
    more = {key: options.pop(key) for key in ("tiling",) if key in options}
    with kernels(package, **{"chunk": CHUNK} | options) as k:
        for case in given:
            args = oracle.shard(case, k.group.size, k.group.rank)
            ys = [
                run(k, operation, args.x, args.ws[0], bias=args.bs[0], **more)
                for _ in range(1 + again)
            ]
            assert len({digest(y) for y in ys}) == 1, (case, "another run, other bits")
            oracle.check(case, {"y0": ys[0]}, k.group)
            digests.append(digest(ys[0]))
    return digests


def bits(
    k: Kernels, operation: str, shape: tuple[int, int, int], dtype: torch.dtype, seed: int
) -> str:
    """The rule of the result to the bit: what is rounded when, summed in which order."""
    given = [whole_numbers(shape, dtype, peer, seed) for peer in range(k.group.size)]
    x, w, bias = given[k.group.rank]
    used = bias if seed % 2 else None
    y = run(k, operation, x, w, bias=used)
    module = module_of(k, operation)
    extra = (k.group.rank,) if operation == "linear_reduce_scatter" else ()
    expected = module.reference([g[0] for g in given], [g[1] for g in given], used, *extra)
    k.expect(digest(y) == digest(expected), operation, shape, dtype, seed, k.group.rank)
    return digest(y)


def exact(
    package: str, operation: str, shapes: list[tuple[int, int, int]], **options: Any
) -> list[str]:
    with kernels(package, **{"chunk": CHUNK} | options) as k:
        return [
            bits(k, operation, shape, dtype, seed)
            for dtype in DTYPES
            for seed, shape in enumerate(shapes)
        ]


def several_pairs(
    package: str, operation: str, unit: int = 1, transposed: bool = False, **options: Any
) -> list[str]:
    """Products of three pairs of x and W, summed before they are rounded; parts of `unit` rows."""
    inners, width, digests = (5, 1, 19), 18, []
    with kernels(package, **{"chunk": CHUNK} | options) as k:
        size, rank = k.group.size, k.group.rank
        for rows in (size + 1, 3):
            counts = [unit * count for count in split_sizes(rows, size)]
            given = [
                [
                    whole_numbers((unit * rows, width, inner), torch.bfloat16, peer, inner)
                    for inner in inners
                ]
                for peer in range(size)
            ]
            xs, ws = ([pair[side] for pair in given[rank]] for side in (0, 1))
            if transposed:  # as in a backward
                ws = [w.t().contiguous().t() for w in ws]
            more = {"counts": counts} if operation == "linear_reduce_scatter" else {}
            y = run(k, operation, xs, ws, **more)
            parts = [
                sum(x.float() @ w.float().t() for x, w, _ in pairs).bfloat16().float()  # type: ignore[union-attr]
                for pairs in given
            ]
            expected = parts[0]
            for part in parts[1:]:
                expected = expected + part
            if more:
                start = sum(counts[:rank])
                expected = expected[start : start + counts[rank]]
            k.expect(digest(y) == digest(expected.bfloat16()), operation, rows, rank)
            digests.append(digest(y))
    return digests


def back_to_back(package: str, operation: str, late: int, **options: Any) -> list[str]:
    """Calls of changing size without a host between them; rank `late` comes last to each of them."""
    with kernels(package, **{"chunk": CHUNK} | options) as k:
        digests = []
        for seed, rows in enumerate((40, 50, 2)):
            if k.group.rank == late:
                time.sleep(0.15)
            digests.append(bits(k, operation, (rows, 20, 18), DTYPES[seed], seed))
        return digests


def slow_rank(package: str, operation: str, slow: int, **options: Any) -> list[str]:
    """Rank `slow` rests after each signal, while the others run as far ahead as they may."""
    with (
        kernels(package, channels=1, chunk=CHUNK, **options) as k,
        stalled(k, 0.05) if k.group.rank == slow else nullcontext(),
    ):
        return [bits(k, operation, (66, 17, 9), torch.float32, seed) for seed in range(2)]


def interleaved(operation: str) -> list[str]:
    """Between calls of all_reduce on a workspace of its own, and before others on the same one."""
    digests = []
    with (
        ParallelGroup(timeout=30) as group,
        kernels(REAL, group, chunk=CHUNK) as first,
        kernels(REAL, group, channels=3) as second,
    ):
        for seed, rows in enumerate((3, 50, 33)):
            if (seed + group.rank) % 2:
                time.sleep(0.02)
            digests.append(bits(first, operation, (rows, 20, 9), DTYPES[seed], seed))
            check(second, "all_reduce_1", (rows, 7), torch.float32, seed)
            check(first, "all_reduce_2", (rows, 7), torch.float32, seed)
    return digests


def absent_rank(operation: str, absent: int) -> dict[str, int] | None:
    """Rank `absent` does not call: the others raise and keep the record."""
    with kernels(chunk=CHUNK) as k:
        bits(k, operation, (5, 4, 3), torch.float32, 0)
        k.workspace.timeout = 0.3
        if k.group.rank == absent:
            return None
        with pytest.raises(CollectiveTimeoutError, match=f"{operation}: .* data of rank {absent} "):
            bits(k, operation, (5, 4, 3), torch.float32, 0)
        names = k.module("_signals").RECORD
        return dict(zip(names, k.workspace.record.tolist(), strict=True))


def refused(operation: str) -> None:
    """Errors come before any signal, so ranks go on together afterwards."""
    x, w = torch.ones(4, 3), torch.ones(5, 3)
    with kernels(chunk=CHUNK) as k:
        function = getattr(module_of(k, operation), operation)
        for error, text, args, more in (
            (ShapeError, "expected \\[R, K\\]", (x, w.t()), {}),
            (ShapeError, "expected \\[R, K\\]", (x[0], w), {}),
            (ShapeError, "expected \\[5\\]", (x, w), {"bias": torch.ones(4)}),
            (ShapeError, "out is", (x, w), {"out": torch.ones(1, 1)}),
            (UnsupportedError, "w is torch.float16", (x, w.half()), {}),
            (UnsupportedError, "bias is torch.float16", (x, w), {"bias": torch.ones(5).half()}),
            (UnsupportedError, "torch.float64", (x.double(), w.double()), {}),
            (UnsupportedError, "2\\^31 or more", (x[:1].expand(2**31, 3), w), {}),
        ):
            with pytest.raises(error, match=text):
                function(*args, k.workspace, **more)
        larger = replace(k.module("_gemm").INTERPRETER, block_n=32)
        with pytest.raises(UnsupportedError, match="chunk=2048"):
            function(x, w, k.workspace, tiling=larger)
        bits(k, operation, (5, 4, 3), torch.float32, 0)
    with (
        kernels(chunk=CHUNK, depth=1) as k,
        pytest.raises(UnsupportedError, match="depth=2 or more"),
    ):
        getattr(k.module(operation), operation)(x, w, k.workspace)
