"""The kernels that `make gpu-check` runs: how each is called, and what its results have to be.

A kernel is added by an entry in KERNELS; everything else (worlds, dtypes, virtual ranks, processes, graphs)
goes over this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests import oracle
from tests.kernels.body import EPSILON, parameters, values, whole_numbers
from tp_kernels import split_sizes
from tp_kernels.kernels import Workspace
from tp_kernels.kernels import all_gather as gather
from tp_kernels.kernels import all_reduce as reduce
from tp_kernels.kernels import all_reduce_rms_norm as reduce_and_norm
from tp_kernels.kernels import linear_all_reduce as multiply_and_reduce
from tp_kernels.kernels import linear_reduce_scatter as multiply_and_scatter
from tp_kernels.kernels import reduce_scatter as scatter

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Operands = dict[str, Any]  # of one rank: tensors, and what else `call` needs


@dataclass(frozen=True)
class Answer:
    """What a result has to be: `value` to the bit, or within `allowed` of it, elementwise."""

    value: Tensor
    allowed: Tensor | None = None

    def fault(self, result: Tensor) -> str | None:
        """What is wrong with `result`, or None."""
        result, value = result.cpu(), self.value
        if self.allowed is None and oracle.digest(result) == oracle.digest(value):
            return None
        if result.shape != value.shape or (self.allowed is None and result.dtype != value.dtype):
            return f"is {tuple(result.shape)} {result.dtype}, expected {tuple(value.shape)}"
        if self.allowed is None:
            wrong = ~(result == value)
            return f"{int(wrong.sum())} of {wrong.numel()} differ, first at {_first(wrong)}"
        excess = (result.double() - value.double()).abs() - self.allowed
        wrong = ~(excess <= 0)
        if not wrong.any():
            return None
        return f"off by {float(excess.max()):.3g} more than allowed, first at {_first(wrong)}"


@dataclass(frozen=True)
class Kernel:
    """One way of calling a kernel.

    Args:
        operands: (world, shape, dtype, seed) -> of every rank, what `call` gets, on the CPU.
        call: (workspace, operands) -> results. Memory for them is in operands["out"] where it takes any.
        answers: operands of all ranks -> of every rank, an answer for each result.
        shapes: that are tried, of sizes that divide and that do not.
        small: of `shapes`, for where time is short.
        out: operands of all ranks -> shape of each rank's result that `call` is given the memory for.
        alike: whether all ranks have the same results.
        repeats: another entry calls the same kernel; of this one only numbers are of interest.
        chunk: of the workspace.
    """

    operands: Callable[[int, Any, torch.dtype, int], list[Operands]]
    call: Callable[[Workspace, SimpleNamespace], tuple[Tensor, ...]]
    answers: Callable[[list[Operands]], list[tuple[Answer, ...]]]
    shapes: tuple[Any, ...]
    small: tuple[Any, ...]
    out: Callable[[list[Operands]], list[tuple[int, ...]]] | None = None
    alike: bool = False
    repeats: bool = False
    chunk: int = 1 << 14


def _first(wrong: Tensor) -> list[list[int]]:
    return wrong.nonzero()[:1].tolist()


def on_device(operands: Operands, device: torch.device | str) -> SimpleNamespace:
    """The operands of a rank with equal strides and offsets, what lies between full of NaN."""

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.numel() == 0:
            return value.to(device)
        reach = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        filling = torch.nan if value.is_floating_point() else 0
        count = value.storage_offset() + reach + 1
        memory = torch.full((count,), filling, dtype=value.dtype, device=device)
        moved = memory.as_strided(value.shape, value.stride(), value.storage_offset())
        return moved.copy_(value)

    return SimpleNamespace(**{name: move(value) for name, value in operands.items()})


def draw(kernel: Kernel, world: int, shape: Any, dtype: torch.dtype, seed: int) -> list[Operands]:
    """Operands of every rank, with memory for the result that is full of NaN."""
    operands = kernel.operands(world, shape, dtype, seed)
    outs = kernel.out(operands) if kernel.out else [None] * world
    for one, out in zip(operands, outs, strict=True):
        one["out"] = None if out is None else torch.full(out, torch.nan, dtype=dtype)
    return operands


# Reductions: shape [rows, width]; summands of very different size, so that another order has other bits.


def summands(world: int, shape: Any, dtype: torch.dtype, seed: int) -> list[Operands]:
    return [{"x": values(shape, dtype, rank, seed)} for rank in range(world)]


def xs_of(operands: list[Operands]) -> list[Tensor]:
    return [one["x"] for one in operands]


def sums(operands: list[Operands]) -> list[tuple[Answer, ...]]:
    total = Answer(_reference("all_reduce", xs_of(operands)))
    return [(total,)] * len(operands)


def parts_of_sums(operands: list[Operands]) -> list[tuple[Answer, ...]]:
    xs = xs_of(operands)
    return [(Answer(_reference("reduce_scatter", xs, rank)),) for rank in range(len(xs))]


def divided_rows(world: int, shape: Any, dtype: torch.dtype, seed: int) -> list[Operands]:
    rows, width = shape
    return [
        {"x": values((count, width), dtype, rank, seed), "rows": rows}
        for rank, count in enumerate(split_sizes(rows, world))
    ]


def all_rows(operands: list[Operands]) -> list[tuple[Answer, ...]]:
    return [(Answer(_reference("all_gather", xs_of(operands))),)] * len(operands)


def summands_and_norm(world: int, shape: Any, dtype: torch.dtype, seed: int) -> list[Operands]:
    operands = summands(world, shape, dtype, seed)
    more = parameters(operands[0]["x"])
    left_out = [("bias", "residual"), ("residual",), ("bias",), ()][seed % 4]
    more |= dict.fromkeys(left_out)
    return [one | more for one in operands]


def norms(operands: list[Operands]) -> list[tuple[Answer, ...]]:
    first, xs = operands[0], xs_of(operands)
    y, s = _reference(
        "all_reduce_rms_norm", xs, first["weight"], first["bias"], first["residual"], EPSILON
    )
    # The mean has another order of summation than torch, see tests/kernels/body.py.
    terms, dtype = xs[0].shape[-1] + 4, xs[0].dtype
    relative = terms * torch.finfo(torch.float32).eps + 1.1 * torch.finfo(dtype).eps
    allowed = y.double().abs() * relative + torch.finfo(dtype).tiny
    return [(Answer(y, allowed), Answer(s))] * len(operands)


# Products: shape (rows, width, inner), inner of every rank. Whole numbers give the rule to the bit.


def whole(world: int, shape: Any, dtype: torch.dtype, seed: int) -> list[Operands]:
    drawn = [whole_numbers(shape, dtype, rank, seed) for rank in range(world)]
    bias = drawn[0][2] if seed % 2 else None
    return [{"x": x, "w": w, "bias": bias} for x, w, _ in drawn]


def _whole_products(name: str, of_rank: bool) -> Callable[[list[Operands]], Any]:
    def answers(operands: list[Operands]) -> list[tuple[Answer, ...]]:
        given = xs_of(operands), [one["w"] for one in operands], operands[0]["bias"]
        if not of_rank:
            return [(Answer(_reference(name, *given)),)] * len(operands)
        return [(Answer(_reference(name, *given, rank)),) for rank in range(len(operands))]

    return answers


def _random(name: str) -> Callable[..., list[Operands]]:
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
    dim = oracle.split_of(case, "y0")
    value, allowed = oracle.expected(case, world)["y0"]
    return [
        (Answer(oracle.part(value, dim, world, rank), oracle.part(allowed, dim, world, rank)),)
        for rank in range(world)
    ]


def _rows_divided(operands: list[Operands]) -> list[tuple[int, ...]]:
    rows, width = operands[0]["x"].shape[0], _width(operands[0])
    return [(count, *width) for count in split_sizes(rows, len(operands))]


def _rows_of_all(operands: list[Operands]) -> list[tuple[int, ...]]:
    first = operands[0]
    return [(first.get("rows", first["x"].shape[0]), *_width(first))] * len(operands)


def _width(one: Operands) -> tuple[int, ...]:
    return (one["w"].shape[0],) if "w" in one else tuple(one["x"].shape[1:])


def _reference(name: str, *arguments: Any) -> Any:
    return import_module(f"tp_kernels.kernels.{name}").reference(*arguments)


# Fewer elements than programs; a row for few ranks only; sizes that 16 does not divide, and that it does.
TABLES = ((1, 3), (7, 5), (33, 1000), (257, 768))
# One tile of few rows, ragged; many rows for 2 ranks, few for 8; many rows for all, sizes divide by 16.
PRODUCTS = ((1, 3, 2), (37, 130, 70), (300, 520, 136), (1100, 272, 256))
LAYOUTS = ((33, 17, 40, "strided"), (300, 260, 264, "transposed"), (900, 520, 544, "offset"))
# A tile of 128 x 256 elements in 16 bits.
LARGEST_TILE = 1 << 16

KERNELS = {
    **{
        f"all_reduce_{shots}": Kernel(
            summands,
            lambda ws, o, shots=shots: (reduce(o.x, ws, out=o.out, shots=shots),),
            sums,
            TABLES,
            TABLES[1:3],
            _rows_of_all,
            alike=True,
        )
        for shots in (1, 2)
    },
    "reduce_scatter": Kernel(
        summands,
        lambda ws, o: (scatter(o.x, ws, out=o.out),),
        parts_of_sums,
        TABLES,
        TABLES[1:3],
        _rows_divided,
    ),
    "all_gather": Kernel(
        divided_rows,
        lambda ws, o: (gather(o.x, ws, o.rows, out=o.out),),
        all_rows,
        TABLES,
        TABLES[1:3],
        _rows_of_all,
        alike=True,
    ),
    **{
        f"rms_norm_{shots}": Kernel(
            summands_and_norm,
            lambda ws, o, shots=shots: reduce_and_norm(
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
            alike=True,
        )
        for shots in (1, 2)
    },
    "linear_reduce_scatter": Kernel(
        whole,
        lambda ws, o: (multiply_and_scatter(o.x, o.w, ws, bias=o.bias, out=o.out),),
        _whole_products("linear_reduce_scatter", True),
        PRODUCTS,
        PRODUCTS[1:3],
        _rows_divided,
        chunk=LARGEST_TILE,
    ),
    "linear_reduce_scatter_float64": Kernel(
        _random("linear_reduce_scatter"),
        lambda ws, o: (multiply_and_scatter(o.x, o.w, ws, bias=o.bias, out=o.out),),
        within_bound,
        LAYOUTS,
        LAYOUTS[:1],
        _rows_divided,
        repeats=True,
        chunk=LARGEST_TILE,
    ),
    "linear_all_reduce": Kernel(
        whole,
        lambda ws, o: (multiply_and_reduce(o.x, o.w, ws, bias=o.bias, out=o.out),),
        _whole_products("linear_all_reduce", False),
        PRODUCTS,
        PRODUCTS[1:3],
        _rows_of_all,
        alike=True,
        chunk=LARGEST_TILE,
    ),
    "linear_all_reduce_float64": Kernel(
        _random("linear_all_reduce"),
        lambda ws, o: (multiply_and_reduce(o.x, o.w, ws, bias=o.bias, out=o.out),),
        within_bound,
        LAYOUTS,
        LAYOUTS[:1],
        _rows_of_all,
        repeats=True,
        alike=True,
        chunk=LARGEST_TILE,
    ),
}


def faults(
    kernel: Kernel, results: dict[int, tuple[Tensor, ...]], answers: list[tuple[Answer, ...]]
) -> list[str]:
    """What is wrong with the results, by rank."""
    found = []
    for rank, given in results.items():
        for index, (answer, result) in enumerate(zip(answers[rank], given, strict=True)):
            fault = answer.fault(result)
            if fault:
                found.append(f"rank {rank}, result {index}: {fault}")
    if (
        kernel.alike
        and len({oracle.digest(*map(Tensor.cpu, given)) for given in results.values()}) > 1
    ):
        found.append("ranks have different bits")
    return found
