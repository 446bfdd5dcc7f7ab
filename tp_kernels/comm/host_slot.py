"""A slot of host symmetric memory as tensors: one protocol round is begin, fill, publish, read, finish.

The rules of a round are in csrc/include/tpk/signal.h. This file only adds tensors, times and names.
Limits: CPU tensors; float32, bfloat16 and float16 for reductions, any dtype for all_gather.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

REDUCIBLE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MOVABLE = REDUCIBLE | {torch.int64: 4}  # ranks find out when they differ in one of these
_BYTES = 3  # dtype code of an opaque copy

# Operation codes in round descriptors; 1..15 belong to the engine's own collectives.
OPERATIONS = {
    "barrier": 1,
    "all_reduce": 2,
    "reduce_scatter": 3,
    "all_gather": 4,
    "linear_all_reduce": 16,
    "linear_reduce_scatter": 17,
    "all_gather_linear": 18,
    "kernel linear_all_reduce": 24,
    "kernel linear_reduce_scatter": 25,
    "kernel all_gather_linear": 26,
    "kernel all_gather_weight_gradient": 27,
    "kernel all_reduce_rms_norm": 28,
    "kernel vocab_parallel_cross_entropy": 29,
    "broadcast": 32,
    "broadcast_object": 33,
    "all_gather_object": 34,
}
OPERATION_NAMES = {code: name for name, code in OPERATIONS.items()}


class HostSlot:
    """One slot: `buffers` data buffers of `capacity` bytes per rank, and their signals."""

    def __init__(self, raw: Any, segment: Any, world: int, buffers: int, timeout: float) -> None:
        self.raw = raw
        self._timeout = timeout
        self.capacity: int = raw.capacity
        self.piece: int = raw.piece  # bytes that an all-reduce moves in one round
        with torch.inference_mode(False):  # or training could not write to what inference made
            self._bytes = [
                [
                    torch.frombuffer(
                        segment,
                        dtype=torch.uint8,
                        count=raw.capacity,
                        offset=raw.buffer_address(rank, index) - segment.address,
                    )
                    for index in range(buffers)
                ]
                for rank in range(world)
            ]
        self._views: dict[tuple[Any, ...], Tensor] = {}

    @property
    def seconds(self) -> float:
        """Spent in calls of this slot: waiting and reducing."""
        return self.raw.seconds

    def reset_seconds(self) -> None:
        self.raw.reset_seconds()

    def fits(self, x: Tensor) -> bool:
        """Whether one buffer can hold `x`."""
        return x.nbytes <= self.capacity

    def rows_of(self, width: int, dtype: torch.dtype) -> int:
        """Rows of `width` elements that one buffer can hold."""
        return self.capacity // max(1, width * dtype.itemsize)

    # One round, step by step: what overlapped ops are made of.

    def begin(self) -> int:
        """Wait until the next buffer may be overwritten; returns its index."""
        return self.raw.begin(self._timeout)

    def view(self, rank: int, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The start of buffer `index` of `rank` as a contiguous tensor."""
        key = (rank, index, shape, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) > 4096:  # shapes that change for ever must not pile up
                self._views.clear()
            with torch.inference_mode(False):
                nbytes = math.prod(shape) * dtype.itemsize
                view = self._bytes[rank][index][:nbytes].view(dtype).view(shape)
            self._views[key] = view
        return view

    def fill(self, source: Tensor, kept: int, kept_end: int) -> None:
        """Copy to the buffer what peers read; elements [kept, kept_end) are this rank's alone.

        `source` must not change before the round is finished.
        """
        self.raw.fill(source.data_ptr(), source.numel(), REDUCIBLE[source.dtype], kept, kept_end)

    def fill_summands(self, source: Tensor) -> None:
        """`fill` for a sum of the whole round, on every rank."""
        self.raw.fill_summands(source.data_ptr(), source.numel(), REDUCIBLE[source.dtype])

    def publish(self, operation: str, dtype: torch.dtype, d0: int, d1: int, d2: int) -> None:
        """Release this round's buffer to the peers; they compare (operation, dtype, d0..d2)."""
        self.raw.publish(OPERATIONS[operation], REDUCIBLE[dtype], d0, d1, d2)

    def wait_any(self, peers: Sequence[int]) -> tuple[int, int]:
        """Wait for the first of `peers` to publish the oldest unread round: (its place, buffer index)."""
        place = self.raw.wait_any(peers, self._timeout)
        return place, self.raw.round_buffer()

    def reduce(self, out: Tensor, offset: int, bias: Tensor | None = None) -> None:
        """out = sum over ranks, in rank order in fp32, of elements from `offset`, plus bias, rounded once."""
        address, period = (0, 0) if bias is None else (bias.data_ptr(), bias.numel())
        self.raw.reduce(
            out.data_ptr(),
            offset,
            out.numel(),
            REDUCIBLE[out.dtype],
            address,
            period,
            self._timeout,
        )

    def reduce_in_place(self, x: Tensor) -> None:
        """Sums of the round into the buffers of all ranks, where their summands are; `x` is this rank's."""
        self.raw.reduce_in_place(x.numel(), REDUCIBLE[x.dtype], self._timeout)

    def finish(self) -> None:
        """Credit: this rank has read all it needs of the oldest unread round."""
        self.raw.finish()

    def settle(self) -> None:
        """Wait until all peers have finished what this rank has: nobody reads its buffers any more."""
        self.raw.settle(self._timeout)

    def complete(
        self, operation: str, d0: int, d1: int, d2: int, out: Tensor, bias: Tensor | None
    ) -> None:
        """publish, sum the round on every rank and finish: what a short message spends its time on."""
        address, period = (0, 0) if bias is None else (bias.data_ptr(), bias.numel())
        self.raw.complete(
            OPERATIONS[operation],
            REDUCIBLE[out.dtype],
            d0,
            d1,
            d2,
            out.data_ptr(),
            out.numel(),
            address,
            period,
            self._timeout,
        )

    def linear(
        self, operation: str, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        """out [M, N] = all_reduce(x [M, K] @ w [N, K]^T) + bias: a whole round, for few rows (_gemm.py)."""
        self.raw.linear(
            OPERATIONS[operation],
            REDUCIBLE[x.dtype],
            *out.shape,
            x.shape[1],
            x.data_ptr(),
            x.stride(0),
            w.data_ptr(),
            w.stride(0),
            out.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            self._timeout,
        )

    def complete_rms_norm(
        self,
        operation: str,
        d0: int,
        d1: int,
        total: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        weight: Tensor,
        out: Tensor,
        epsilon: float,
    ) -> None:
        """`complete` of [..., N] into `total`, then total += residual and out = rms_norm(total) * weight."""
        self.raw.complete_rms_norm(
            OPERATIONS[operation],
            REDUCIBLE[out.dtype],
            d0,
            d1,
            total.numel() // total.shape[-1],
            total.shape[-1],
            total.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            epsilon,
            self._timeout,
        )

    # The same on the engine's own thread, while the caller computes. `out` must live until `join` or
    # `abandon` has returned.

    def reduce_later(self, out: Tensor, offset: int | None, bias: Tensor | None = None) -> None:
        """`reduce` from `offset`, or the whole round on every rank if None, and `finish` of that round."""
        address, period = (0, 0) if bias is None else (bias.data_ptr(), bias.numel())
        self.raw.reduce_later(
            out.data_ptr(),
            out.numel(),
            REDUCIBLE[out.dtype],
            offset,
            address,
            period,
            self._timeout,
        )

    def join(self) -> None:
        """Return when everything asked of `reduce_later` is done."""
        self.raw.join()

    def abandon(self, reason: str) -> None:
        """Give up what `reduce_later` has not done, and this rank with it; the peers learn `reason`."""
        self.raw.abandon(reason[:180])

    # Whole collectives of any length, chunked by the engine.

    def all_reduce(self, x: Tensor, out: Tensor) -> None:
        source = x.data_ptr()
        target = source if out is x else out.data_ptr()
        self.raw.all_reduce(source, target, x.numel(), REDUCIBLE[x.dtype])

    def all_reduce_rows(self, operation: str, x: Tensor, bias: Tensor | None) -> None:
        """x [M, N] becomes its sum over ranks, plus bias [N]."""
        address, period = (0, 0) if bias is None else (bias.data_ptr(), bias.numel())
        source = x.data_ptr()
        self.raw.all_reduce(
            source,
            source,
            x.numel(),
            REDUCIBLE[x.dtype],
            OPERATIONS[operation],
            self._timeout,
            0,
            address,
            period,
            x.shape[1],
        )

    def reduce_scatter(
        self,
        x: Tensor,
        out: Tensor,
        counts: Sequence[int],
        row: int = 1,
        operation: str = "reduce_scatter",
        bias: Tensor | None = None,
    ) -> None:
        """`counts` are rows per rank, of `row` elements like bias; `x` holds them one after the other."""
        self.raw.reduce_scatter(
            x.data_ptr(),
            out.data_ptr(),
            counts,
            REDUCIBLE[x.dtype],
            OPERATIONS[operation],
            self._timeout,
            row,
            0 if bias is None else bias.data_ptr(),
        )

    def all_gather(
        self,
        x: Tensor,
        out: Tensor,
        counts: Sequence[int],
        row: int = 1,
        operation: str = "all_gather",
    ) -> None:
        """`counts` are rows per rank, of `row` elements; any dtype. `x` may be its place in `out`."""
        code = _MOVABLE.get(x.dtype, _BYTES)
        self.raw.all_gather(
            x.data_ptr(),
            out.data_ptr(),
            counts,
            code,
            OPERATIONS[operation],
            self._timeout,
            row * x.element_size() if code == _BYTES else row,
        )

    def barrier(self) -> None:
        self.raw.barrier(self._timeout)
