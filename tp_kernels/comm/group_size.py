"""How many rows travel at a time while a product goes on: a model of the pipeline, and its numbers.

The product finishes its groups of rows one after the other, and each is sent when it is finished and the one
before has been sent. With G equal groups, a product that takes P and bytes that take C on the link,

    T = max(P + C/G + L, P/G + C + G L)

L being what a group costs whatever its size: a wait, the start of its collectives, a sum. The first is a
product that hides all but the last group, the second a link that is busy from the first group on. More
groups leave less exposed and cost more; the best G is near sqrt(min(P, C) / L). `seconds` goes through the
groups as they are instead: uneven, of whole tiles, which finish in waves of one for each multiprocessor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .layout import split_sizes
from .regions import region_obstacle
from .row_groups import RowGroups

if TYPE_CHECKING:
    from .group import ParallelGroup

TILE = 128  # rows and columns of a tile; groups have whole ones
MOST_GROUPS = 32
INTERPRETED_ROWS = 16  # of a group, where nothing is hidden: one tile
# Crossings of the link for each row: to the rank that sums, and from there to all.
CROSSINGS = {"linear_all_reduce": 2, "copy_linear": 2}


GATHERS = ("all_gather_linear", "linear_reduce_scatter.backward")


@dataclass(frozen=True)
class Rates:
    """What the model rests on; equal on all ranks.

    Args:
        flops: of all multiprocessors together, per second.
        multiprocessors: of the device; those left to the collectives are not taken off.
        link: bytes that a rank sends per second.
        latency: seconds that a group costs beside its bytes.
    """

    flops: float
    multiprocessors: int
    link: float
    latency: float


# By architecture, operations per second in 16 and in 32 bits, and multiprocessors. Guesses, none is measured:
# 0.8 of what data sheets say of A100, H100 and B200.
COMPUTE = {80: (250e12, 15e12, 108), 90: (790e12, 50e12, 132), 100: (1800e12, 60e12, 148)}
NVLINK, NETWORK = 200e9, 20e9  # guesses: of ranks that address each other's memory, and of others
LATENCY = 40e-6  # a guess: two collectives of NCCL, and three short kernels
# Inner size of a product times ranks, by the width of what travels. A guess: 1 after an attention, 3 to 4 in
# an MLP. The true one differs between ranks where a dimension is divided unevenly, and group sizes must not.
INNER = 3


def seconds(
    groups: RowGroups, n: int, k: int, itemsize: int, crossings: float, rates: Rates
) -> float:
    """From the start of x [groups.total, k] times w [n, k] to the arrival of its last group.

    crossings: of the link, for each byte of the result.
    """
    # One tile on one multiprocessor.
    wave = 2 * TILE * TILE * k * rates.multiprocessors / rates.flops
    tiles, sent = 0, 0.0
    for group in range(len(groups)):
        tiles += groups.tiles(group, TILE, TILE, n)
        finished = -(-tiles // rates.multiprocessors) * wave
        nbytes = (groups.start(group + 1) - groups.start(group)) * n * itemsize
        sent = max(sent, finished) + rates.latency + nbytes * crossings / rates.link
    return sent


def group_size(
    counts: Sequence[int], n: int, k: int, itemsize: int, crossings: float, rates: Rates
) -> int:
    """Rows of each of `counts` in a group, for the least `seconds`; of equally good ones the most."""
    return min(
        candidates(max(counts)),
        key=lambda size: seconds(RowGroups(counts, size), n, k, itemsize, crossings, rates),
    )


def candidates(most: int) -> list[int]:
    """Sizes in whole tiles that make at most MOST_GROUPS groups of `most` rows, from one group on."""
    blocks = max(1, -(-most // TILE))
    return sorted({TILE * -(-blocks // g) for g in range(1, MOST_GROUPS + 1)}, reverse=True)


def rows_of_group(
    group: ParallelGroup,
    operation: str,
    counts: Sequence[int],
    width: int,
    dtype: torch.dtype,
    device: str,
) -> int:
    """Rows of each of `counts` in a group of `operation`, the same on all ranks.

    As planning/groups.py has measured them for `group`, or else by the model.
    """
    measured = group.group_sizes.get(measured_key(operation, counts, width, dtype, device))
    if measured is not None:
        return measured
    if device == "cpu":
        return INTERPRETED_ROWS
    crossings = crossings_of(operation)
    key = ("rows_of_group", crossings, tuple(counts), width, dtype)
    size: int | None = group.decisions.get(key)
    if size is None:
        fraction = (group.size - 1) / group.size
        size = group_size(
            counts,
            width,
            INNER * width // group.size,
            dtype.itemsize,
            crossings * fraction,
            rates_of(group, dtype),
        )
        group.decisions[key] = size
    return size


def measured_key(
    operation: str, counts: Sequence[int], width: int, dtype: torch.dtype, device: str
) -> tuple[object, ...]:
    """What a measured size is kept by: of an operation, its crossings and whether rows come or go."""
    return crossings_of(operation), operation in GATHERS, tuple(counts), width, dtype, device


def crossings_of(operation: str) -> int:
    return CROSSINGS.get(operation.removesuffix(".backward"), 1)


def counts_of(operation: str, rows: int, world: int) -> list[int]:
    """How `rows` of all ranks are divided in `operation`, if nothing else is known of them."""
    alike = operation.removesuffix(".backward") in CROSSINGS
    return [rows] if alike else split_sizes(rows, world)


def rates_of(group: ParallelGroup, dtype: torch.dtype) -> Rates:
    """Of the slowest architecture among the ranks."""
    oldest = min(support.capability or 0 for support in group.triton_support)
    known = max([one for one in COMPUTE if one <= oldest], default=min(COMPUTE))
    half, single, multiprocessors = COMPUTE[known]
    link = NETWORK if region_obstacle(group, "cuda") else NVLINK
    return Rates(single if dtype == torch.float32 else half, multiprocessors, link, LATENCY)
