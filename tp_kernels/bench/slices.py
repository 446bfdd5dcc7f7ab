"""What a rank of any contestant does, ours or a peer's: known inputs, timed calls, a checked result.

Imports numpy only, and torch for `Buffers`: peers load this file into an interpreter that does not have this
package.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

_BLOCK = 1 << 20  # elements of a check at a time: what it needs besides the tensors is bounded
_BITS = {"float32": 24, "bfloat16": 8, "float16": 11}


def pattern(rank: int, start: int, stop: int) -> Any:
    """Elements [start, stop) of the tensor of `rank`, as float32, exact in every dtype.

    Multiples of 1/64 from -2 to 2 without a period that a misplaced piece could fit into.
    """
    index = np.arange(start, stop, dtype=np.uint32)
    mixed = (index + np.uint32(rank * 7919 + 1)) * np.uint32(2654435761)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(2246822519)
    return ((mixed >> np.uint32(24)).astype(np.float32) - np.float32(128)) / np.float32(64)


@dataclass
class Work:
    """What a rank does in one case: a call to time, a check of what it computed.

    check: returns the error in units of what rounding explains. It may make more calls, the same on
    every rank.
    before: what a rank has to do before every call, not timed.
    """

    call: Callable[[], Any]
    check: Callable[[], float]
    before: Callable[[], Any] = lambda: None


def timed_calls(work: Work, calls: int, warm: int, meet: Callable[[], Any]) -> list[float]:
    """Seconds of each of `calls` calls, after `warm` more.

    meet: a barrier. Every call follows one, and a rank's clock runs from there to the end of its call.
    """
    before, call, seconds = work.before, work.call, []
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(warm + calls):
            before()
            # Ranks are not done with `before` at the same time: 60 to 200 us apart after a copy of 16 MiB,
            # which the early ones would count as a slow call. They leave a barrier within 0.2 us, ours and
            # the peers' (2 ranks, medians): the same as they leave one call for the next.
            meet()
            start = perf_counter()
            call()
            seconds.append(perf_counter() - start)
    finally:
        if enabled:
            gc.enable()
    return seconds[warm:]


def split_sizes(total: int, world: int) -> list[int]:
    """Sizes of `world` contiguous parts of `total`; the first ones get one more."""
    return [total // world + (rank < total % world) for rank in range(world)]


def collective_sizes(
    op: str, numel: int, world: int, rank: int, width: int = 1
) -> tuple[int, int, list[int]]:
    """Elements of the input and of the output of `rank`, and of the part of each rank.

    width: elements of a row, which is not divided.
    """
    counts = [rows * width for rows in split_sizes(numel // width, world)]
    if op == "all_reduce":
        return numel, numel, counts
    if op == "reduce_scatter":
        return numel, counts[rank], counts
    return counts[rank], numel, counts


class Buffers:
    """Input and output of a collective on this rank, as torch tensors; one tensor if it works in place.

    All contestants have theirs from here, so that all of them write the input in the same way.

    Args:
        case: op, dtype, bytes of the whole, and width if rows are not to be divided.
    """

    def __init__(self, case: Mapping[str, Any], rank: int, world: int, *, in_place: bool) -> None:
        import torch  # not in a peer that has no tensors

        self.op, self.dtype, self.width = case["op"], case["dtype"], case.get("width", 1)
        self.rank, self.world = rank, world
        dtype = getattr(torch, self.dtype)
        self.numel = case["bytes"] // dtype.itemsize
        inputs, outputs, self.counts = collective_sizes(
            self.op, self.numel, world, rank, self.width
        )
        self.x = torch.empty(inputs, dtype=dtype)
        self.out = self.x if in_place else torch.empty(outputs, dtype=dtype)
        self._values = torch.from_numpy(pattern(rank, 0, inputs)).to(dtype)

    def write(self) -> None:
        """Write the input, as the product before a collective does.

        Where it stays the same from call to call, a library that reads a peer's input finds it in its own
        cache, as it never does in a model: an all-gather of 256 KiB in Open MPI takes 11 us instead of 26.
        """
        self.x.copy_(self._values)

    def work(self, call: Callable[[], Any]) -> Work:
        """`call`, with the input written before it, and a check that this is so."""

        def check() -> float:
            timed = self._error()  # of the last timed call
            self.x.fill_(float("nan"))
            self.out.fill_(float("nan"))
            work.before()
            call()
            return max(timed, self._error())

        work = Work(call, check, self.write)
        return work

    def _error(self) -> float:
        return collective_error(
            self.op,
            self.numel,
            self.world,
            self.rank,
            self.dtype,
            lambda start, stop: self.out[start:stop].float().numpy(),
            self.width,
        )


def collective_error(
    op: str,
    numel: int,
    world: int,
    rank: int,
    dtype: str,
    got: Callable[[int, int], Any],
    width: int = 1,
) -> float:
    """Largest error of a collective of `pattern`, against float64, in units of what rounding explains.

    got(start, stop): those elements of the result, as float32. More than 1 is a wrong result.
    """
    _, size, counts = collective_sizes(op, numel, world, rank, width)
    if op == "all_gather":
        worst, position = 0.0, 0
        for owner, count in enumerate(counts):
            for start, stop in _blocks(count):
                found = got(position + start, position + stop)
                same = np.array_equal(found, pattern(owner, start, stop))
                worst = max(worst, 0.0 if same else np.inf)  # nothing is rounded
            position += count
        return worst
    first = sum(counts[:rank]) if op == "reduce_scatter" else 0
    return max(
        (
            sum_error(
                got(start, stop),
                [pattern(other, first + start, first + stop) for other in range(world)],
                dtype,
            )
            for start, stop in _blocks(size)
        ),
        default=0.0,
    )


def sum_error(found: Any, parts: Sequence[Any], dtype: str) -> float:
    """Largest error of `found` as the sum of `parts`, one rounding per addend allowed."""
    exact = np.zeros(found.shape, np.float64)
    magnitude = np.zeros(found.shape, np.float64)
    for part in parts:
        exact += part
        magnitude += np.abs(part)
    allowed = len(parts) * 2.0 ** -_BITS[dtype] * magnitude
    return error_ratio(found, exact, allowed)


def error_ratio(found: Any, exact: Any, allowed: Any) -> float:
    """Largest |found - exact| / allowed; infinite where a value is not a number."""
    error = np.abs(np.asarray(found, np.float64) - exact)
    if not np.isfinite(error).all():
        return float("inf")
    ratio = np.divide(
        error, allowed, out=np.where(error > 0, np.inf, 0.0), where=np.asarray(allowed) > 0
    )
    return float(ratio.max(initial=0.0))


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, _BLOCK):
        yield start, min(start + _BLOCK, count)
