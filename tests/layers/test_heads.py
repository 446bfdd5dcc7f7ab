"""The division of attention heads, against all divisions there are."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_kernels.comm import ShapeError, UnsupportedError
from tp_kernels.layers.heads import kv_head, partition_heads


@given(st.data())
def test_partition_is_the_best_of_all(data):
    heads = data.draw(st.integers(1, 9))
    kv_heads = data.draw(st.integers(1, heads))
    world = data.draw(st.integers(1, heads))
    shards = partition_heads(heads, kv_heads, world)
    assert [shard.q[0] for shard in shards] == [0, *(shard.q[1] for shard in shards[:-1])]
    assert shards[-1].q[1] == heads

    def loads(cuts):
        bounds = [0, *cuts, heads]
        result = []
        for start, stop in pairwise(bounds):
            used = {kv_head(q, heads, kv_heads) for q in range(start, stop)}
            result.append(2 * (stop - start) + 2 * len(used))
        return max(result), sum(result)

    best = min(loads(cuts) for cuts in combinations(range(1, heads), world - 1))
    mine = [2 * shard.num_heads + 2 * shard.num_kv_heads for shard in shards]
    assert (max(mine), sum(mine)) == best


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 16))
def test_kv_heads_are_those_of_the_local_queries(per_kv, kv_heads, world):
    heads = per_kv * kv_heads
    for shard in partition_heads(heads, kv_heads, min(world, heads)):
        used = [q // per_kv for q in range(*shard.q)]
        assert shard.kv == (used[0], used[-1] + 1)
        assert shard.kv_of_query() == [kv - shard.kv[0] for kv in used]
        counts = {used.count(kv) for kv in used}
        assert shard.uniform == (len(counts) == 1)
        places, place_of = shard.padded_queries()
        size = len(places) // shard.num_kv_heads
        assert [places[place] for place in place_of] == list(range(shard.num_heads))
        assert all(shard.kv_of_query()[query] == at // size for at, query in enumerate(places))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "world", "error"),
    [
        (0, 1, 1, ShapeError),
        (4, 0, 1, ShapeError),
        (2, 3, 1, ShapeError),
        (3, 1, 4, UnsupportedError),
    ],
)
def test_refusals(heads, kv_heads, world, error):
    with pytest.raises(error):
        partition_heads(heads, kv_heads, world)
