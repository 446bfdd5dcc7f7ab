"""Entries of the products that gather rows; see table.py.

Shapes are (rows before they are multiplied by a unit, inner, widths). Sums of products of whole numbers are
exact in float32 in any order. Counts of ranks are multiples of one, two or three rows; ranks differ in
widths.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests import oracle
from tests.gpu.entry import Answer, Kernel, Operands, reference, xs_of
from tests.gpu.products import LAYOUTS, within_bound
from tests.kernels.gather_body import whole_numbers
from tp_kernels import split_sizes
from tp_kernels.kernels import Workspace, all_gather_linear, all_gather_weight_gradient
from tp_kernels.kernels._activation import TORCH

# A row for few ranks only; tiles with rows of several ranks; many rows for 2 ranks, few for 8; many for all.
SHAPES = (
    (1, 3, (2,)),
    (21, 40, (35, 17)),
    (300, 136, (520,)),
    (150, 263, (72, 301, 33)),
    (1100, 256, (272, 64)),
)
# With three ways to put the result away and two of what is gathered, in turn.
GRADIENTS = (
    (1, 3, 2),
    (21, 40, 35),
    (150, 136, 264),
    (150, 135, 73),
    (300, 520, 136),
    (1100, 272, 256),
)
ACTIVATIONS = (None, "gelu", None, "silu", "gelu_tanh", "relu")
Shared = list[tuple[Tensor, list[int]]]  # of every rank: x and the counts of all


def _xs(rows: int, inner: int, world: int, dtype: torch.dtype, seed: int) -> Shared:
    counts = [(1 + seed % 3) * count for count in split_sizes(rows, world)]
    return [
        (whole_numbers(count, inner, dtype=dtype, seed=1009 * seed + rank), counts)
        for rank, count in enumerate(counts)
    ]


def layers(world: int, shape: Any, dtype: torch.dtype, seed: int) -> list[Operands]:
    rows, inner, widths = shape
    activation = ACTIVATIONS[seed % len(ACTIVATIONS)]
    scale = 128 if activation else 1  # about 0, where activations are curved
    operands = []
    for rank, (x, counts) in enumerate(_xs(rows, inner, world, dtype, seed)):
        mine, outs = 101 * seed + rank, [width + rank * (seed % 2) for width in widths]
        ws = [whole_numbers(n, inner, dtype=dtype, seed=mine + n) / scale for n in outs]
        biases = [whole_numbers(n, dtype=dtype, seed=mine - n) / 8 for n in outs]
        operands.append(
            {
                "x": x,
                "w": ws,
                "bias": biases if seed % 2 else None,
                "counts": counts,
                "activation": activation,
            }
        )
    return operands


def random_layers(world: int, shape: Any, dtype: torch.dtype, seed: int) -> list[Operands]:
    rows, width, inner, layout = shape
    outs, biased = (width, width // 2 + 1), (bool(seed % 2),) * 2
    case = oracle.Case(
        "all_gather_linear", (rows,), inner, outs, biased, dtype, layout=layout, seed=seed
    )
    counts = split_sizes(rows, world)
    drawn = [oracle.shard(case, world, rank) for rank in range(world)]
    return [
        {
            "x": t.x,
            "w": t.ws,
            "bias": t.bs if biased[0] else None,
            "counts": counts,
            "activation": None,
            "case": case,
        }
        for t in drawn
    ]


def gather_and_multiply(workspace: Workspace, o: SimpleNamespace) -> tuple[Tensor, ...]:
    """The products, and the gathered rows."""
    new = partial(_nan, o.x, sum(o.counts))
    ys, gathered = all_gather_linear(
        o.x,
        o.w,
        workspace,
        counts=o.counts,
        bias=o.bias,
        activation=o.activation,
        gathered=new(o.x.shape[1]),
        outs=[new(w.shape[0]) for w in o.w],
    )
    return (*ys, gathered)


def _nan(like: Tensor, *shape: int) -> Tensor:
    """Memory in which what nobody writes is seen."""
    return like.new_full(shape, torch.nan)


def layers_of_all_rows(operands: list[Operands]) -> list[tuple[Answer, ...]]:
    xs, answers = xs_of(operands), []
    for one in operands:
        biases = one["bias"] or [None] * len(one["w"])
        ys = reference("all_gather_linear", xs, one["w"], biases)
        results = [_activated(y, one["activation"]) for y in ys]
        answers.append((*results, Answer(torch.cat(xs))))
    return answers


def _activated(y: Tensor, activation: str | None) -> Answer:
    """With the bound of tests/kernels/gather_body.py, twice: a GPU takes approximate exp and quotients."""
    if activation is None:
        return Answer(y)
    relative = 2 * (32 * torch.finfo(torch.float32).eps + torch.finfo(y.dtype).eps / 2)
    allowed = y.double().abs() * relative + torch.finfo(y.dtype).tiny
    return Answer(TORCH[activation](y.double()), allowed)


def random_layers_of_all_rows(operands: list[Operands]) -> list[tuple[Answer, ...]]:
    gathered = Answer(torch.cat(xs_of(operands)))
    return [(*ys, gathered) for ys in within_bound(operands)]


def gradients(world: int, shape: Any, dtype: torch.dtype, seed: int) -> list[Operands]:
    rows, inner, columns = shape
    of_gathered = bool(seed % 2)
    into = (None, dtype, torch.float32)[seed % 3]
    size = (inner, columns) if of_gathered else (columns, inner)
    operands = []
    for x, counts in _xs(rows, inner, world, dtype, seed):
        other = whole_numbers(sum(counts), columns, dtype=dtype, seed=seed)
        main_grad = None if into is None else whole_numbers(*size, dtype=into, seed=seed)
        if main_grad is not None and seed % 4 > 1:
            main_grad = main_grad.t().contiguous().t()
        operands.append(
            {
                "x": x,
                "other": other,
                "counts": counts,
                "of_gathered": of_gathered,
                "main_grad": main_grad,
                "size": size,
            }
        )
    return operands


def gather_and_accumulate(workspace: Workspace, o: SimpleNamespace) -> tuple[Tensor, ...]:
    """The gradient, and the gathered rows."""
    given = o.main_grad
    return all_gather_weight_gradient(
        o.x,
        o.other,
        workspace,
        counts=o.counts,
        of_gathered=o.of_gathered,
        out=_nan(o.x, *o.size) if given is None else None,
        accumulate_into=None if given is None else given.clone(),  # as calls are repeated
        gathered=_nan(o.x, sum(o.counts), o.x.shape[1]),
    )


def sums_over_rows(operands: list[Operands]) -> list[tuple[Answer, ...]]:
    xs, answers = xs_of(operands), []
    for one in operands:
        given = one["main_grad"]
        result = reference("all_gather_weight_gradient", xs, one["other"], one["of_gathered"])
        dtype = xs[0].dtype if given is None else given.dtype
        if given is not None:
            result = given.float() + result
        answers.append((Answer(result.to(dtype)), Answer(torch.cat(xs))))
    return answers


KERNELS = {
    "all_gather_linear": Kernel(
        layers, gather_and_multiply, layers_of_all_rows, SHAPES, SHAPES[1:3]
    ),
    "all_gather_linear_float64": Kernel(
        random_layers,
        gather_and_multiply,
        random_layers_of_all_rows,
        LAYOUTS,
        LAYOUTS[:1],
        repeats=True,
    ),
    "all_gather_weight_gradient": Kernel(
        gradients, gather_and_accumulate, sums_over_rows, GRADIENTS, GRADIENTS[1:3]
    ),
}
