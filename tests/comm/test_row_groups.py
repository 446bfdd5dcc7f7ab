"""Groups of rows, by counting them one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_kernels import ShapeError, split_sizes
from tp_kernels.comm.row_groups import RowGroups, Tile

# How rows are divided over ranks: rows, ranks, and the number by which all counts are multiplied.
DIVIDED = st.builds(
    lambda rows, world, unit: [unit * count for count in split_sizes(rows, world)],
    st.integers(0, 40),
    st.integers(1, 6),
    st.sampled_from([1, 3, 20]),
)


@given(DIVIDED, st.integers(1, 50))
def test_every_row_comes_once(counts, size):
    groups = RowGroups(counts, size)
    order = []  # of rows of the product, as they are in the buffer
    for group in range(len(groups)):
        pieces = groups.ranges(group)
        assert len(pieces) == len(counts) and groups.start(group) == len(order)
        for part, piece in enumerate(pieces):
            assert piece.target == len(order)
            assert piece.rows == groups.rows(group, part) <= size
            order += range(piece.source, piece.source + piece.rows)
            first = sum(counts[:part])
            assert first <= piece.source <= piece.source + piece.rows <= first + counts[part]
        assert any(piece.rows == size for piece in pieces) or group == len(groups) - 1
    assert sorted(order) == list(range(sum(counts)))
    assert groups.total == groups.start(len(groups)) == sum(counts)


@given(DIVIDED, st.integers(1, 50), st.sampled_from([1, 4, 16]), st.integers(1, 40))
def test_every_element_is_in_one_tile(counts, size, block_m, width):
    block_n = 8
    groups = RowGroups(counts, size)
    source_of = {
        piece.target + i: piece.source + i
        for group in range(len(groups))
        for piece in groups.ranges(group)
        for i in range(piece.rows)
    }
    seen = []
    index = 0
    for group in range(len(groups)):
        for _ in range(groups.tiles(group, block_m, block_n, width)):
            tile = groups.tile(index, block_m, block_n, width)
            assert tile.group == group and 1 <= tile.rows <= block_m
            assert groups.start(group) <= tile.target
            assert tile.target + tile.rows <= groups.start(group + 1)
            for i in range(tile.rows):
                assert source_of[tile.target + i] == tile.source + i
                columns = range(tile.column, min(tile.column + block_n, width))
                seen += [(tile.target + i, column) for column in columns]
            index += 1
    assert sorted(seen) == [(r, c) for r in range(sum(counts)) for c in range(width)]


def test_tiles_go_down_the_rows_of_a_group_first():
    groups = RowGroups([5, 4], 2)
    assert [groups.tile(index, 2, 8, 9) for index in (0, 1, 2, 4, 8, 9)] == [
        Tile(0, 0, 0, 2, 0),
        Tile(0, 5, 2, 2, 0),
        Tile(0, 0, 0, 2, 8),
        Tile(1, 2, 4, 2, 0),
        Tile(2, 4, 8, 1, 0),
        Tile(2, 4, 8, 1, 8),
    ]


def test_without_columns_there_are_no_tiles():
    assert RowGroups([5, 4], 2).tiles(0, 2, 8, 0) == 0


@pytest.mark.parametrize(("counts", "size"), [([1, 2], 1), ([3, 2, 1], 1), ([], 1), ([2, 2], 0)])
def test_what_is_no_division_is_refused(counts, size):
    with pytest.raises(ShapeError, match="split_sizes, and a size of 1 or more"):
        RowGroups(counts, size)
