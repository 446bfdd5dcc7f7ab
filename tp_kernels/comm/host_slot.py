"""A slot of host symmetric memory as tensors: one protocol round is begin, fill, publish, read, finish.

The rules of a round are in csrc/include/tpk/signal.h. This file only adds tensors, times and names.
Limits: CPU tensors; float32, bfloat16 and float16 for reductions, any dtype for all_gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
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
    "broadcast": 32,
    "broadcast_object": 33,
    "all_gather_object": 34,
}
OPERATION_NAMES = {code: name for name, code in OPERATIONS.items()}


class HostSlot:
    """One slot: `buffers` data buffers of `capacity` bytes per rank, and their signals."""

    def __init__(self, raw: Any, segment: Any, world: int, buffers: int, timeout: float) -> None:
        self._raw = raw
        self._timeout = timeout
        self.capacity: int = raw.capacity
        self.seconds = 0.0  # spent in blocking calls: waiting and reducing
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

    # One round, step by step: what overlapped ops are made of.

    def begin(self) -> int:
        """Wait until the next buffer may be overwritten; returns its index."""
        start = perf_counter()
        index = self._raw.begin(self._timeout)
        self.seconds += perf_counter() - start
        return index

    def view(self, rank: int, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The start of buffer `index` of `rank` as a contiguous tensor."""
        key = (rank, index, shape, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) > 4096:  # shapes that change for ever must not pile up
                self._views.clear()
            numel = 1
            for size in shape:
                numel *= size
            with torch.inference_mode(False):
                view = self._bytes[rank][index][: numel * dtype.itemsize].view(dtype).view(shape)
            self._views[key] = view
        return view

    def publish(self, operation: str, dtype: torch.dtype, d0: int, d1: int, d2: int) -> None:
        """Release this round's buffer to the peers; they compare (operation, dtype, d0..d2)."""
        self._raw.publish(OPERATIONS[operation], REDUCIBLE[dtype], d0, d1, d2)

    def wait(self, peer: int) -> int:
        """Wait until `peer` has published the oldest unread round; returns its buffer index."""
        start = perf_counter()
        self._raw.wait(peer, self._timeout)
        self.seconds += perf_counter() - start
        return self._raw.round_buffer()

    def reduce(self, out: Tensor, offset: int, bias: Tensor | None = None) -> None:
        """out = sum over ranks, in rank order in fp32, of elements from `offset`, plus bias, rounded once."""
        start = perf_counter()
        address, period = (0, 0) if bias is None else (bias.data_ptr(), bias.numel())
        self._raw.reduce(
            out.data_ptr(),
            offset,
            out.numel(),
            REDUCIBLE[out.dtype],
            address,
            period,
            self._timeout,
        )
        self.seconds += perf_counter() - start

    def reduce_all(self, out: Tensor, bias: Tensor | None = None) -> None:
        """Like `reduce` of the whole round, which ends the round's data on every rank."""
        start = perf_counter()
        address, period = (0, 0) if bias is None else (bias.data_ptr(), bias.numel())
        self._raw.reduce_all(
            out.data_ptr(), out.numel(), REDUCIBLE[out.dtype], address, period, self._timeout
        )
        self.seconds += perf_counter() - start

    def finish(self) -> None:
        """Credit: this rank has read all it needs of the oldest unread round."""
        self._raw.finish()

    # Whole collectives of any length, chunked by the engine.

    def all_reduce(self, x: Tensor, out: Tensor) -> None:
        start = perf_counter()
        self._raw.all_reduce(
            x.data_ptr(),
            out.data_ptr(),
            x.numel(),
            REDUCIBLE[x.dtype],
            OPERATIONS["all_reduce"],
            self._timeout,
        )
        self.seconds += perf_counter() - start

    def reduce_scatter(self, x: Tensor, out: Tensor, counts: Sequence[int]) -> None:
        """`counts` are elements per rank; `x` holds them one after the other."""
        start = perf_counter()
        self._raw.reduce_scatter(
            x.data_ptr(),
            out.data_ptr(),
            list(counts),
            REDUCIBLE[x.dtype],
            OPERATIONS["reduce_scatter"],
            self._timeout,
        )
        self.seconds += perf_counter() - start

    def all_gather(
        self, x: Tensor, out: Tensor, counts: Sequence[int], operation: str = "all_gather"
    ) -> None:
        """`counts` are elements per rank; any dtype. `x` may be this rank's place in `out`."""
        start = perf_counter()
        code = _MOVABLE.get(x.dtype, _BYTES)
        size = x.element_size() if code == _BYTES else 1
        self._raw.all_gather(
            x.data_ptr(),
            out.data_ptr(),
            [count * size for count in counts],
            code,
            OPERATIONS[operation],
            self._timeout,
        )
        self.seconds += perf_counter() - start

    def barrier(self) -> None:
        start = perf_counter()
        self._raw.barrier(self._timeout)
        self.seconds += perf_counter() - start
