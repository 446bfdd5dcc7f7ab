"""How many rows travel at a time while a product goes on, measured: see comm/group_size.py for the model.

    tune_groups(group, "linear_reduce_scatter", rows=8192, n=8192, k=3584, dtype=x.dtype, device=x.device)

What is found holds for this `ParallelGroup`, for all calls of such a shape; nothing is written to a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tp_kernels.comm.errors import UnsupportedError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.group_size import candidates, counts_of, measured_key, rows_of_group
from tp_kernels.comm.layout import split_range
from tp_kernels.dispatch import direct_obstacle
from tp_kernels.ops.all_gather_linear import all_gather_linear
from tp_kernels.ops.linear_all_reduce import linear_all_reduce
from tp_kernels.ops.linear_reduce_scatter import linear_reduce_scatter

from .products import BEFORE, device_seconds, operands, wall_seconds
from .tuner import Limits, Progress, Tuned, tune

OPERATIONS: dict[str, Callable[..., Any]] = {
    "linear_all_reduce": linear_all_reduce,
    "linear_reduce_scatter": linear_reduce_scatter,
    "all_gather_linear": all_gather_linear,
}


@dataclass(frozen=True)
class GroupRows:
    """Rows of each destination in a group."""

    rows: int

    def __str__(self) -> str:
        return f"{self.rows} rows"


def tune_groups(
    group: ParallelGroup,
    operation: str,
    *,
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    limits: Limits | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Tuned[GroupRows]:
    """The fastest size for x of `rows` rows of all ranks and w [n, k] on every rank; `group` goes by it then.

    Collective, and raises, as `tune`. The built-in choice is that of the model.

    Raises:
        UnsupportedError: no such operation, no rows, or rows that do not travel in groups.
    """
    if operation not in OPERATIONS or min(rows, n, k) < 1:
        raise UnsupportedError(
            f"tune_groups({operation!r}) of {rows} rows, n={n}, k={k}: use one of "
            f"{', '.join(OPERATIONS)}, and sizes from 1"
        )
    width = k if operation == "all_gather_linear" else n
    if direct_obstacle(operation, group, rows, width, dtype, device.type) is None:
        raise UnsupportedError(
            f"tune_groups({operation!r}) of {rows} rows: they go straight to the memory of the peers, there "
            "are no groups to choose"
        )
    subject = _Overlap(group, operation, rows, n, k, dtype, device)
    subject.forget()  # what an earlier call has found: the first candidate is the model's
    built_in = GroupRows(rows_of_group(group, operation, *subject.shape))
    others = [GroupRows(size) for size in candidates(max(subject.shape[0]))]
    choices = [built_in, *(one for one in others if one != built_in)]
    try:
        tuned = tune(group, choices, subject, limits, progress)
    except BaseException:
        subject.forget()
        raise
    finally:
        group.decisions.clear()  # which say how large groups are
    subject.use(tuned.winner)
    return tuned


class _Overlap:
    """An op with implementation="cuda", as the tuner sees it."""

    def __init__(
        self,
        group: ParallelGroup,
        operation: str,
        rows: int,
        n: int,
        k: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group, self._function, self._device = group, OPERATIONS[operation], device
        gathers = operation == "all_gather_linear"
        # All ranks have the same rows where they hold parts of them.
        self._x, self._w = operands((rows, n, k), dtype, 0 if gathers else group.rank, device)
        if gathers:
            start, stop = split_range(rows, group.size, group.rank)
            self._x = self._x[start:stop].contiguous()
        self.shape = (
            counts_of(operation, rows, group.size),
            k if gathers else n,
            dtype,
            device.type,
        )
        self._key = measured_key(operation, *self.shape)
        self._options = {"rows": rows} if gathers else {}
        self._before: Tensor | None = None
        if device.type == "cuda":
            self._before = torch.empty(BEFORE, dtype=torch.uint8, device=device)

    def use(self, size: GroupRows) -> None:
        self._group.group_sizes[self._key] = size.rows

    def forget(self) -> None:
        self._group.group_sizes.pop(self._key, None)

    def prepare(self, size: GroupRows) -> None:
        """Kernels do not depend on it but for few rows; `digest` compiles them."""

    def digest(self, size: GroupRows) -> str:
        self.use(size)
        result = self._call()
        self._group.check()
        return hashlib.sha256(result.view(torch.uint8).cpu().numpy().tobytes()).hexdigest()

    def ready(self) -> None:
        if self._before is not None:
            torch.cuda.synchronize(self._device)

    def seconds(self, size: GroupRows) -> float:
        self.use(size)
        if self._before is None:
            return wall_seconds(self._call)
        seconds = device_seconds(self._call, self._before)
        self._group.check()
        return seconds

    def recover(self) -> None:
        """A group that has failed stays so: what is measured next raises."""

    def _call(self) -> Tensor:
        result: Tensor = self._function(
            self._x, self._w, group=self._group, implementation="cuda", **self._options
        )
        return result
