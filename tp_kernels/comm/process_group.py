"""Collectives through any torch ProcessGroup (gloo, NCCL, several hosts) in the package's arithmetic.

Sums are taken in fp32 in rank order and rounded once, like everywhere in this package. Therefore an
all-reduce is two steps, all-to-all of the parts and all-gather of the sums: the bytes of a ring
all-reduce, with an order that does not depend on the transport.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import GroupMismatchError

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


# Newer torch calls all_gather_into_tensor "all_gather_single" and deprecates the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32; the dtype itself for float64 (which oracles use), integers and complex numbers."""
    return torch.float32 if dtype.is_floating_point and dtype != torch.float64 else dtype


def ordered_sum(parts: Tensor | Sequence[Tensor], bias: Tensor | None, out: Tensor) -> Tensor:
    """out = round(parts[0] + parts[1] + ... + bias): fp32, rank order, one rounding."""
    total = parts[0].to(accumulation_dtype(out.dtype), copy=True)
    for part in parts[1:]:
        total += part
    if bias is not None:
        total += bias
    return out.copy_(total.view(out.shape))


class Pending:
    """A collective in flight; `wait()` returns its result.

    It bounds the wait by the deadline. Of CUDA tensors, but over gloo, the current stream waits and this
    thread goes on: a deadline would make NCCL wait here, and could not be captured in a graph. NCCL has its
    own.
    """

    def __init__(self, transport: ProcessGroupTransport, work: Any, result: Any) -> None:
        self._transport = transport
        self._work = work
        self._result = result

    def wait(self) -> Any:
        start = perf_counter()
        if self._work is not None:
            if self._result.is_cuda and not self._transport.host_waits:
                self._work.wait()
            else:
                self._work.wait(self._transport.deadline)
        self._transport.seconds += perf_counter() - start
        return self._result


class ProcessGroupTransport:
    """Asynchronous all-to-all and all-gather of row blocks; everything else is made of these two."""

    def __init__(
        self, group: dist.ProcessGroup, rank: int, size: int, timeout: float, check: bool | str
    ) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        self.deadline = timedelta(seconds=timeout)
        self.check = check
        self.host_waits = dist.get_backend(group) == "gloo"  # for CUDA tensors too
        self.seconds = 0.0
        self.abandoned: list[Any] = []  # transfers nobody waits for, with their memory

    def agree(self, operation: str, x: Tensor, *sizes: int) -> None:
        """Raise GroupMismatchError on every rank if op, dtype or sizes differ anywhere.

        Costs one small all-gather; a transport fed with different sizes crashes or hangs instead.
        """
        if not (x.is_cpu if self.check == "auto" else self.check):
            return
        name = int.from_bytes(operation.encode()[-7:], "little")
        mine = [name, _DTYPES.index(x.dtype) if x.dtype in _DTYPES else -1, *sizes]
        mine += [0] * (8 - len(mine))
        local = torch.tensor(mine, dtype=torch.int64, device=x.device)
        table = local.new_empty(self.size * 8)
        start = perf_counter()
        _all_gather(table, local, group=self.group, async_op=True).wait(self.deadline)
        self.seconds += perf_counter() - start
        other = [rank for rank, row in enumerate(table.view(-1, 8).tolist()) if row != mine]
        if other:
            theirs = table.view(-1, 8)[other[0]].tolist()
            raise GroupMismatchError(
                f"{operation}: ranks {self.rank} and {other[0]} called with different arguments: "
                f"(op, dtype, sizes) {mine} here, {theirs} there; every rank of the group must make "
                "the same calls with the same shapes and dtypes in the same order"
            )

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Rows of `x` [sum(send), ...] go to ranks by `send`; result [sum(receive), ...]."""
        out = x.new_empty(sum(receive), *x.shape[1:])
        if x.numel() == 0 and out.numel() == 0 and x.shape[1:].numel() == 0:
            return Pending(self, None, out)
        work = dist.all_to_all_single(
            _raw(out), _raw(x.contiguous()), list(receive), list(send), self.group, async_op=True
        )
        return Pending(self, work, out)

    def all_gather(self, x: Tensor, counts: Sequence[int], out: Tensor | None = None) -> Pending:
        """Rows of every rank, [sum(counts), ...]. Uneven counts are padded to the largest.

        out: contiguous memory for the result of even counts; not used if it has not just the size.
        """
        largest = max(counts)
        if largest * x.shape[1:].numel() == 0:
            return Pending(self, None, x.new_empty(sum(counts), *x.shape[1:]))
        even = all(count == largest for count in counts)
        padded = x.contiguous()
        if x.shape[0] < largest:
            padded = x.new_zeros(largest, *x.shape[1:])
            padded[: x.shape[0]] = x
        shape = (self.size * largest, *x.shape[1:])
        fits = even and out is not None and out.numel() == math.prod(shape)
        table = out.view(shape) if fits and out is not None else x.new_empty(shape)
        work = _all_gather(_raw(table).view(-1), _raw(padded).view(-1), self.group, async_op=True)
        if even:
            return Pending(self, work, table)
        return _Unpadded(self, work, table.view(self.size, largest, *x.shape[1:]), counts)

    def broadcast(self, x: Tensor, source: int) -> None:
        """Rank `source` of the group sends its contiguous `x` to the others, in place."""
        if x.numel() == 0:
            return
        start = perf_counter()
        memory = _raw(x.view(-1, 1))
        dist.broadcast(memory, group=self.group, group_src=source, async_op=True).wait(
            self.deadline
        )
        self.seconds += perf_counter() - start

    def barrier(self) -> None:
        start = perf_counter()
        dist.barrier(self.group, async_op=True).wait(self.deadline)
        self.seconds += perf_counter() - start


class _Unpadded(Pending):
    def __init__(
        self, transport: ProcessGroupTransport, work: Any, table: Tensor, counts: Sequence[int]
    ) -> None:
        super().__init__(transport, work, table)
        self._counts = counts

    def wait(self) -> Tensor:
        table = super().wait()
        return torch.cat([block[:count] for block, count in zip(table, self._counts, strict=True)])


def _raw(x: Tensor) -> Tensor:
    """The same memory as rows of bytes, which every backend moves (gloo lacks some dtypes).

    A view as bytes needs a last stride of 1, and a contiguous [n, 1] may have any.
    """
    width = x.shape[1:].numel() * x.element_size()
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8).view(x.shape[0], width)
