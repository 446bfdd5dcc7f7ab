"""Entries of the collectives and of the norm in a reduction; see table.py.

Shapes are [rows, width]; summands of very different size, so that another order has other bits.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.gpu.entry import (
    Answer,
    Kernel,
    Operands,
    reference,
    rows_divided,
    rows_of_all,
    xs_of,
)
from tests.kernels.body import EPSILON, parameters, values
from tp_kernels import split_sizes
from tp_kernels.kernels import all_gather, all_reduce, all_reduce_rms_norm, reduce_scatter

# Fewer elements than programs; a row for few ranks only; sizes that 16 does not divide, and that it does.
TABLES = ((1, 3), (7, 5), (33, 1000), (257, 768))


def summands(world: int, shape: Any, dtype: torch.dtype, seed: int) -> list[Operands]:
    return [{"x": values(shape, dtype, rank, seed)} for rank in range(world)]


def sums(operands: list[Operands]) -> list[tuple[Answer, ...]]:
    total = Answer(reference("all_reduce", xs_of(operands)))
    return [(total,)] * len(operands)


def parts_of_sums(operands: list[Operands]) -> list[tuple[Answer, ...]]:
    xs = xs_of(operands)
    return [(Answer(reference("reduce_scatter", xs, rank)),) for rank in range(len(xs))]


def divided_rows(world: int, shape: Any, dtype: torch.dtype, seed: int) -> list[Operands]:
    rows, width = shape
    return [
        {"x": values((count, width), dtype, rank, seed), "rows": rows}
        for rank, count in enumerate(split_sizes(rows, world))
    ]


def all_rows(operands: list[Operands]) -> list[tuple[Answer, ...]]:
    return [(Answer(reference("all_gather", xs_of(operands))),)] * len(operands)


def summands_and_norm(world: int, shape: Any, dtype: torch.dtype, seed: int) -> list[Operands]:
    operands = summands(world, shape, dtype, seed)
    more = parameters(operands[0]["x"])
    left_out = [("bias", "residual"), ("residual",), ("bias",), ()][seed % 4]
    more |= dict.fromkeys(left_out)
    return [one | more for one in operands]


def norms(operands: list[Operands]) -> list[tuple[Answer, ...]]:
    first, xs = operands[0], xs_of(operands)
    y, s = reference(
        "all_reduce_rms_norm", xs, first["weight"], first["bias"], first["residual"], EPSILON
    )
    # The mean has another order of summation than torch, see tests/kernels/body.py.
    terms, dtype = xs[0].shape[-1] + 4, xs[0].dtype
    relative = terms * torch.finfo(torch.float32).eps + 1.1 * torch.finfo(dtype).eps
    allowed = y.double().abs() * relative + torch.finfo(dtype).tiny
    return [(Answer(y, allowed), Answer(s))] * len(operands)


KERNELS = {
    **{
        f"all_reduce_{shots}": Kernel(
            summands,
            lambda ws, o, shots=shots: (all_reduce(o.x, ws, out=o.out, shots=shots),),
            sums,
            TABLES,
            TABLES[1:3],
            rows_of_all,
            alike=1,
        )
        for shots in (1, 2)
    },
    "reduce_scatter": Kernel(
        summands,
        lambda ws, o: (reduce_scatter(o.x, ws, out=o.out),),
        parts_of_sums,
        TABLES,
        TABLES[1:3],
        rows_divided,
    ),
    "all_gather": Kernel(
        divided_rows,
        lambda ws, o: (all_gather(o.x, ws, o.rows, out=o.out),),
        all_rows,
        TABLES,
        TABLES[1:3],
        rows_of_all,
        alike=1,
    ),
    **{
        f"rms_norm_{shots}": Kernel(
            summands_and_norm,
            lambda ws, o, shots=shots: all_reduce_rms_norm(
                o.x,
                o.weight,
                ws,
                bias=o.bias,
                residual=o.residual,
                epsilon=EPSILON,
                shots=shots,
            ),
            norms,
            TABLES,
            TABLES[1:3],
            alike=2,
        )
        for shots in (1, 2)
    },
}
