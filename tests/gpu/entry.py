"""What the table of `make gpu-check` consists of: a kernel, its operands, and what its results have to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests import oracle
from tp_kernels import split_sizes
from tp_kernels.kernels import Workspace

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
        operands: (world, shape, dtype, seed) -> of every rank, what `call` gets, on the CPU: "x", and what
            else it needs, tensors, lists of tensors, and other values.
        call: (workspace, operands) -> results. Memory for them is in operands["out"] where it takes any.
        answers: operands of all ranks -> of every rank, an answer for each result.
        shapes: that are tried, of sizes that divide and that do not.
        small: of `shapes`, for where time is short.
        out: operands of all ranks -> shape of each rank's result that `call` is given the memory for.
        alike: so many results, from the first on, are the same on all ranks.
        repeats: another entry calls the same kernel; of this one only numbers are of interest.
        chunk, depth: of the workspace.
    """

    operands: Callable[[int, Any, torch.dtype, int], list[Operands]]
    call: Callable[[Workspace, SimpleNamespace], tuple[Tensor, ...]]
    answers: Callable[[list[Operands]], list[tuple[Answer, ...]]]
    shapes: tuple[Any, ...]
    small: tuple[Any, ...]
    out: Callable[[list[Operands]], list[tuple[int, ...]]] | None = None
    alike: int = 0
    repeats: bool = False
    chunk: int = 1 << 14
    depth: int = 2


def _first(wrong: Tensor) -> list[list[int]]:
    return wrong.nonzero()[:1].tolist()


def tensors(value: Any) -> list[Tensor]:
    """Those that `value` is or lists."""
    return [
        one for one in (value if isinstance(value, list) else [value]) if isinstance(one, Tensor)
    ]


def each(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `function` of every tensor that it is or lists."""
    if isinstance(value, Tensor):
        return function(value)
    return [each(function, one) for one in value] if isinstance(value, list) else value


def on_device(operands: Operands, device: torch.device | str) -> SimpleNamespace:
    """The operands of a rank with equal strides and offsets, what lies between full of NaN."""
    move = partial(oracle.copy_to, device=device)
    return SimpleNamespace(**{name: each(move, value) for name, value in operands.items()})


def joined(value: Tensor | list[Tensor]) -> Tensor:
    """What has the same products as a list of x_i or w_i: side by side."""
    return torch.cat(value, 1) if isinstance(value, list) else value


def xs_of(operands: list[Operands]) -> list[Tensor]:
    return [joined(one["x"]) for one in operands]


def rows_divided(operands: list[Operands]) -> list[tuple[int, ...]]:
    """Shapes of results that have the rows of one rank each."""
    rows, width = joined(operands[0]["x"]).shape[0], _width(operands[0])
    return [(count, *width) for count in split_sizes(rows, len(operands))]


def rows_of_all(operands: list[Operands]) -> list[tuple[int, ...]]:
    """Shapes of results that have all rows."""
    first = operands[0]
    return [(first.get("rows", joined(first["x"]).shape[0]), *_width(first))] * len(operands)


def _width(one: Operands) -> tuple[int, ...]:
    return tuple(joined(one["w"]).shape[:1] if "w" in one else one["x"].shape[1:])


def reference(name: str, *arguments: Any) -> Any:
    return import_module(f"tp_kernels.kernels.{name}").reference(*arguments)


def draw(kernel: Kernel, world: int, shape: Any, dtype: torch.dtype, seed: int) -> list[Operands]:
    """Operands of every rank, with memory for the result that is full of NaN."""
    operands = kernel.operands(world, shape, dtype, seed)
    outs = kernel.out(operands) if kernel.out else [None] * world
    for one, out in zip(operands, outs, strict=True):
        one["out"] = None if out is None else torch.full(out, torch.nan, dtype=dtype)
    return operands


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
    alike = {oracle.digest(*map(Tensor.cpu, given[: kernel.alike])) for given in results.values()}
    if len(alike) > 1:
        found.append("ranks have different bits")
    return found
