"""Rows of a product in the order in which they are computed and sent: group by group.

Group g takes, of the rows for every destination, rows [g * size, (g + 1) * size) of that part, as far as it
goes. The result lies in a buffer in this order, so that a group is contiguous there, and within it what one
destination gets:

    rows of the product    0 1 2 3 4 | 5 6 7 8        two destinations, size 2
    rows of the buffer     0 1 5 6 | 2 3 7 8 | 4      three groups

The arithmetic is that of csrc/include/tpk/order.h and kernels/linear_signalled.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .errors import ShapeError
from .layout import Division


class Piece(NamedTuple):
    """What a group takes of one destination's rows."""

    source: int  # first row, in the product
    target: int  # first row, in the buffer
    rows: int


class Tile(NamedTuple):
    """A block of the result that is computed at a time."""

    group: int
    source: int
    target: int
    rows: int
    column: int


class RowGroups:
    """The groups of a product whose rows go to several destinations.

    Args:
        counts: rows of each destination, divided as by split_sizes and then multiplied by one number;
            a single entry if all rows go one way.
        size: rows of a destination in a group, 1 or more.

    Raises:
        ShapeError: counts are divided in another way, or there is no such size.
    """

    def __init__(self, counts: Sequence[int], size: int) -> None:
        division = Division.of(counts)
        if division is None or not counts or size < 1:
            raise ShapeError(
                f"RowGroups({list(counts)}, {size}): expected row counts divided as by "
                "tp_kernels.split_sizes, and a size of 1 or more"
            )
        self.division = division
        self.parts = len(counts)
        self.size = size

    def __len__(self) -> int:
        return -(-self.division.most // self.size)

    @property
    def total(self) -> int:
        """Rows of all groups."""
        return self.division.total(self.parts)

    def rows(self, group: int, part: int) -> int:
        """Rows of destination `part` in `group`."""
        return max(0, min(self.division.rows(part) - group * self.size, self.size))

    def start(self, group: int) -> int:
        """First row of `group` in the buffer; of group len(self), the end."""
        before = group * self.size
        return sum(min(self.division.rows(part), before) for part in range(self.parts))

    def ranges(self, group: int) -> list[Piece]:
        """What `group` takes of each destination's rows."""
        pieces, target = [], self.start(group)
        for part in range(self.parts):
            rows = self.rows(group, part)
            start = min(group * self.size, self.division.rows(part))
            pieces.append(Piece(self.division.start(part) + start, target, rows))
            target += rows
        return pieces

    def row_blocks(self, group: int, block_m: int) -> int:
        """Blocks of `block_m` rows or fewer; none has rows of two destinations."""
        return sum(-(-self.rows(group, part) // block_m) for part in range(self.parts))

    def tiles(self, group: int, block_m: int, block_n: int, width: int) -> int:
        """Tiles of `group` in a result of `width` columns: what its counter has in the end."""
        return self.row_blocks(group, block_m) * -(-width // block_n)

    def tile(self, index: int, block_m: int, block_n: int, width: int) -> Tile:
        """Tile `index` of the result: by groups, in a group down the rows, then to the next column."""
        group = 0
        while index >= self.tiles(group, block_m, block_n, width):
            index -= self.tiles(group, block_m, block_n, width)
            group += 1
        blocks = self.row_blocks(group, block_m)
        block = index % blocks
        for piece in self.ranges(group):
            here = -(-piece.rows // block_m)
            if block < here:
                break
            block -= here
        down = block * block_m
        rows = min(piece.rows - down, block_m)
        column = index // blocks * block_n
        return Tile(group, piece.source + down, piece.target + down, rows, column)
