"""Entries of the products that sum over ranks; see table.py.

Shapes are (rows, width, inner), inner of every rank. Whole numbers give the rule of the result to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests import oracle
from tests.gpu.entry import (
    Answer,
    Kernel,
    Operands,
    joined,
    reference,
    rows_divided,
    rows_of_all,
    xs_of,
)
from tests.kernels.body import whole_numbers
from tp_kernels.kernels import linear_all_reduce, linear_reduce_scatter

# One tile of few rows, ragged; many rows for 2 ranks, few for 8; many rows for all, sizes divide by 16.
PRODUCTS = ((1, 3, 2), (37, 130, 70), (300, 520, 136), (1100, 272, 256))
# Of several pairs, with their inner sizes.
PAIRS = ((21, 36, (35, 1, 19)), (300, 520, (136, 64)))
LAYOUTS = ((33, 17, 40, "strided"), (300, 260, 264, "transposed"), (900, 520, 544, "offset"))
# A tile of 128 x 256 elements in 16 bits.
LARGEST_TILE = 1 << 16


def whole(world: int, shape: Any, dtype: torch.dtype, seed: int) -> list[Operands]:
    drawn = [whole_numbers(shape, dtype, rank, seed) for rank in range(world)]
    bias = drawn[0][2] if seed % 2 else None
    return [{"x": x, "w": w, "bias": bias} for x, w, _ in drawn]


def whole_pairs(world: int, shape: Any, dtype: torch.dtype, seed: int) -> list[Operands]:
    rows, width, inners = shape
    pairs = [
        whole(world, (rows, width, inner), dtype, 10 * seed + index)
        for index, inner in enumerate(inners)
    ]
    return [
        {
            "x": [of_ranks[rank]["x"] for of_ranks in pairs],
            "w": [of_ranks[rank]["w"] for of_ranks in pairs],
            "bias": pairs[-1][rank]["bias"],
        }
        for rank in range(world)
    ]


def whole_products(name: str, of_rank: bool) -> Callable[[list[Operands]], Any]:
    def answers(operands: list[Operands]) -> list[tuple[Answer, ...]]:
        given = xs_of(operands), [joined(one["w"]) for one in operands], operands[0]["bias"]
        if not of_rank:
            return [(Answer(reference(name, *given)),)] * len(operands)
        return [(Answer(reference(name, *given, rank)),) for rank in range(len(operands))]

    return answers


def random_numbers(name: str) -> Callable[..., list[Operands]]:
    """Random numbers in every layout; `inner` is of all ranks together."""

    def operands(world: int, shape: Any, dtype: torch.dtype, seed: int) -> list[Operands]:
        rows, width, inner, layout = shape
        case = oracle.Case(
            name, (rows,), inner, (width,), (bool(seed % 2),), dtype, layout=layout, seed=seed
        )
        drawn = [oracle.shard(case, world, rank) for rank in range(world)]
        return [{"x": t.x, "w": t.ws[0], "bias": t.bs[0], "case": case} for t in drawn]

    return operands


def within_bound(operands: list[Operands]) -> list[tuple[Answer, ...]]:
    """Against float64, with the bound of tests/oracle.py."""
    case, world = operands[0]["case"], len(operands)
    names = [f"y{index}" for index in range(len(case.outs))]
    dims, whole = [oracle.split_of(case, name) for name in names], oracle.expected(case, world)
    return [
        tuple(
            Answer(*(oracle.part(t, dim, world, rank) for t in whole[name]))
            for name, dim in zip(names, dims, strict=True)
        )
        for rank in range(world)
    ]


def scattered(name: str, operands: Any, answers: Any, shapes: Any, small: Any) -> Kernel:
    return Kernel(
        operands,
        lambda ws, o: (linear_reduce_scatter(o.x, o.w, ws, bias=o.bias, out=o.out),),
        answers,
        shapes,
        small,
        rows_divided,
        repeats=name != "linear_reduce_scatter",
        chunk=LARGEST_TILE,
    )


def reduced(name: str, shots: int, operands: Any, answers: Any, shapes: Any, small: Any) -> Kernel:
    return Kernel(
        operands,
        lambda ws, o: (linear_all_reduce(o.x, o.w, ws, bias=o.bias, out=o.out, shots=shots),),
        answers,
        shapes,
        small,
        rows_of_all,
        alike=1,
        repeats=name not in ("linear_all_reduce_1", "linear_all_reduce_2"),
        chunk=LARGEST_TILE,
        depth=2 * shots,
    )


SCATTER, REDUCE = "linear_reduce_scatter", "linear_all_reduce"
_exact = {SCATTER: whole_products(SCATTER, True), REDUCE: whole_products(REDUCE, False)}

KERNELS = {
    **{
        name: scattered(name, *given)
        for name, given in {
            SCATTER: (whole, _exact[SCATTER], PRODUCTS, PRODUCTS[1:3]),
            f"{SCATTER}_pairs": (whole_pairs, _exact[SCATTER], PAIRS, PAIRS[:1]),
            f"{SCATTER}_float64": (random_numbers(SCATTER), within_bound, LAYOUTS, LAYOUTS[:1]),
        }.items()
    },
    **{
        name: reduced(name, *given)
        for name, given in {
            f"{REDUCE}_1": (1, whole, _exact[REDUCE], PRODUCTS, PRODUCTS[1:3]),
            f"{REDUCE}_2": (2, whole, _exact[REDUCE], PRODUCTS, PRODUCTS[1:3]),
            f"{REDUCE}_pairs": (2, whole_pairs, _exact[REDUCE], PAIRS, PAIRS[:1]),
            f"{REDUCE}_float64": (1, random_numbers(REDUCE), within_bound, LAYOUTS, LAYOUTS[:1]),
        }.items()
    },
}
