"""Attention heads over ranks: any number of query heads on any number of ranks that is not larger.

Query head q of n attends with KV head q * n_kv // n, which is the usual q // (n / n_kv) where n_kv divides
n, and groups as even as they can be where it does not. Each rank gets a contiguous run of query heads and
every KV head that they attend with. A KV head whose query heads fall on several ranks is held by each of
them; its gradient is summed over exactly those.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from tp_kernels.comm.errors import ShapeError, UnsupportedError


@dataclass(frozen=True)
class HeadShard:
    """Half-open ranges of query heads and KV heads of one rank."""

    q: tuple[int, int]
    kv: tuple[int, int]
    heads: int
    kv_heads: int

    @property
    def num_heads(self) -> int:
        return self.q[1] - self.q[0]

    @property
    def num_kv_heads(self) -> int:
        return self.kv[1] - self.kv[0]

    @property
    def uniform(self) -> bool:
        """Every local KV head serves equally many local query heads."""
        return self.num_heads % self.num_kv_heads == 0 and all(
            index // (self.num_heads // self.num_kv_heads) == kv
            for index, kv in enumerate(self.kv_of_query())
        )

    def kv_of_query(self) -> list[int]:
        """Local KV head of each local query head."""
        return [kv_head(q, self.heads, self.kv_heads) - self.kv[0] for q in range(*self.q)]

    def padded_queries(self) -> tuple[list[int], list[int]]:
        """Equal groups for kernels that want them: (query head of each place, place of each query).

        Every KV head gets as many places as the busiest one; places left over repeat a query, whose
        result is dropped: cheaper than to copy the keys and values of all tokens so far.
        """
        groups: list[list[int]] = [[] for _ in range(self.num_kv_heads)]
        for query, kv in enumerate(self.kv_of_query()):
            groups[kv].append(query)
        size = max(map(len, groups))
        places = [query for group in groups for query in group + group[-1:] * (size - len(group))]
        return places, [places.index(query) for query in range(self.num_heads)]


def kv_head(query: int, heads: int, kv_heads: int) -> int:
    """The KV head that query head `query` attends with."""
    return query * kv_heads // heads


@lru_cache
def partition_heads(heads: int, kv_heads: int, world: int) -> tuple[HeadShard, ...]:
    """Divide heads so that the most loaded rank holds as little as possible, then the sum.

    Load counts weights: 2 per query head (q and o projections) and 2 per KV head (k and v). Exact, by
    dynamic programming over cut points; with 9 query and 3 KV heads on 4 ranks it cuts 3+3+2+1 rather
    than 3+2+2+2, which would hold one more KV head for the same slowest rank.
    """
    if heads < 1 or kv_heads < 1:
        raise ShapeError(f"{heads} query heads and {kv_heads} KV heads: both must be at least 1")
    if kv_heads > heads:
        raise ShapeError(f"{kv_heads} KV heads for {heads} query heads: some would never be used")
    if world > heads:
        raise UnsupportedError(
            f"{world} ranks for {heads} query heads: a rank without a head has no attention to do; "
            f"use at most {heads} ranks"
        )

    def kv_range(start: int, stop: int) -> tuple[int, int]:
        return kv_head(start, heads, kv_heads), kv_head(stop - 1, heads, kv_heads) + 1

    def load(start: int, stop: int) -> int:
        first, last = kv_range(start, stop)
        return 2 * (stop - start) + 2 * (last - first)

    # best[stop] for the current number of ranks: (largest load, sum of loads, cut points)
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, (0,))}
    for rank in range(1, world + 1):
        step: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for stop in range(rank, heads - (world - rank) + 1):
            step[stop] = min(
                (max(largest, load(start, stop)), total + load(start, stop), (*cuts, stop))
                for start, (largest, total, cuts) in best.items()
                if start < stop
            )
        best = step
    cuts = best[heads][2]
    return tuple(
        HeadShard((start, stop), kv_range(start, stop), heads, kv_heads)
        for start, stop in itertools.pairwise(cuts)
    )
