"""A tensor that every rank of the group can address: collectives read and write it where it is.

Through private memory an all-reduce copies its input into shared buffers and the sums out of them. Here
ranks sum their part straight from all tensors into all tensors: for two ranks, 2 bytes read or written per
byte instead of 4 (counted).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import collectives
from .errors import ShapeError, UnsupportedError
from .group import ParallelGroup
from .host_slot import REDUCIBLE, HostSlot
from .layout import split_sizes
from .symmetric_memory import SymmetricMemory


class SymmetricTensor:
    """`local` [*shape] on every rank, in memory that all ranks of the group share where they can.

    Construction and all methods but `close` are collective: every rank calls them in the same order, with
    the same shapes. `local` is ordinary memory between calls: fill it, use it, view it. Without shared
    memory (`group.provider` is "none") the same calls go through the process group, with copies.

    Args:
        shape: of `local`, equal on all ranks; rows are the first dimension.
        group: whose ranks take part.
        dtype: float32, bfloat16 or float16.
    """

    def __init__(
        self, shape: Sequence[int], *, group: ParallelGroup, dtype: torch.dtype = torch.float32
    ) -> None:
        if dtype not in REDUCIBLE:
            raise UnsupportedError(f"SymmetricTensor: {dtype}; supported are {list(REDUCIBLE)}")
        self.group = group
        self._memory: SymmetricMemory | None = None
        self.local = torch.empty(tuple(shape), dtype=dtype)
        if group.memory is None or self.local.numel() == 0:
            return
        # As small as a window may be: every rank's share holds an element.
        capacity = max(self.local.nbytes, 64 * group.size)
        self._memory = group.new_memory(capacity=capacity, buffers=1)
        self.local = self._slot.view(group.rank, 0, tuple(shape), dtype)

    @property
    def _slot(self) -> HostSlot:
        assert self._memory is not None
        return self._memory.slots[0]

    def all_reduce_(self) -> Tensor:
        """`local` becomes the sum over ranks, on every rank; returns it."""
        if self._memory is None:
            return collectives.all_reduce(self.local, self.group, out=self.local)
        self.group.run("all_reduce", "host", self._all_reduce)
        return self.local

    def reduce_scatter(self, out: Tensor | None = None) -> Tensor:
        """This rank's split_sizes(R, W)[rank] rows of the sum over ranks; `local` keeps its values."""
        counts = split_sizes(self.local.shape[0], self.group.size)
        if self._memory is None:
            return collectives.reduce_scatter(self.local, self.group, out=out)
        out = self._result(out, counts[self.group.rank])
        self.group.run("reduce_scatter", "host", self._reduce_scatter, out, counts)
        return out

    def all_gather(self, rows: int | None = None, out: Tensor | None = None) -> Tensor:
        """[R, ...] of all ranks, of which `local` holds this rank's split_sizes(rows, W)[rank] in front.

        rows: default: all of `local` on every rank.
        """
        size, rank = self.group.size, self.group.rank
        rows = self.local.shape[0] * size if rows is None else rows
        counts = split_sizes(rows, size)
        if counts[rank] > self.local.shape[0]:
            raise UnsupportedError(
                f"all_gather on rank {rank}: rows={rows} give this rank {counts[rank]}, its tensor has "
                f"{self.local.shape[0]}"
            )
        if self._memory is None:
            return collectives.all_gather(self.local[: counts[rank]], self.group, rows, out=out)
        out = self._result(out, rows)
        self.group.run("all_gather", "host", self._all_gather, out, counts)
        return out

    def close(self) -> None:
        """Leave the shared memory in order; `local` stays valid, further calls raise."""
        if self._memory is not None:
            self._memory.close()

    def _result(self, out: Tensor | None, rows: int) -> Tensor:
        shape = (rows, *self.local.shape[1:])
        if out is None:
            return self.local.new_empty(shape)
        if out.shape != shape or out.dtype != self.local.dtype or not out.is_contiguous():
            raise ShapeError(
                f"out on rank {self.group.rank} is {tuple(out.shape)} {out.dtype}, strides "
                f"{out.stride()}; expected a contiguous {shape} {self.local.dtype}"
            )
        return out

    def _publish(self, operation: str, d1: int) -> None:
        """`local` as it is, as a round of its slot: peers may read it from here on."""
        self._slot.begin()
        self._slot.publish(operation, self.local.dtype, self.local.numel(), d1, 1)

    def _all_reduce(self) -> None:
        self._publish("all_reduce", 0)
        self._slot.reduce_in_place(self.local)
        self._slot.finish()

    def _reduce_scatter(self, out: Tensor, counts: Sequence[int]) -> None:
        row = self.local.shape[1:].numel()
        self._publish("reduce_scatter", 0)
        self._slot.reduce(out, sum(counts[: self.group.rank]) * row)
        self._slot.finish()
        self._slot.settle()  # the caller may write to `local` as soon as this has returned

    def _all_gather(self, out: Tensor, counts: Sequence[int]) -> None:
        rank, size = self.group.rank, self.group.size
        parts = out.split(list(counts))
        self._publish("all_gather", sum(counts))
        parts[rank].copy_(self.local[: counts[rank]])
        waiting = [(rank + step) % size for step in range(1, size)]
        while waiting:
            place, index = self._slot.wait_any(waiting)
            peer = waiting.pop(place)
            parts[peer].copy_(
                self._slot.view(peer, index, tuple(parts[peer].shape), self.local.dtype)
            )
        self._slot.finish()
        self._slot.settle()
