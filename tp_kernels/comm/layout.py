"""How a dimension is divided over ranks. One rule, used by ops, layers and checkpoints alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def split_sizes(total: int, world: int) -> list[int]:
    """Sizes of `world` contiguous parts of `total`; the first `total % world` parts get one more.

    Any total works, also fewer than ranks and zero: `split_sizes(3, 4) == [1, 1, 1, 0]`.
    """
    small, larger = total // world, total % world  # torch.compile knows no divmod
    return [small + 1 if rank < larger else small for rank in range(world)]


def split_range(total: int, world: int, rank: int) -> tuple[int, int]:
    """Half-open range of part `rank` in `split_sizes(total, world)`."""
    small, larger = total // world, total % world
    start = rank * small + min(rank, larger)
    return start, start + small + (1 if rank < larger else 0)


@dataclass(frozen=True)
class Division:
    """Rows divided over ranks: `small` each, and the first `larger` ranks `unit` more.

    What kernels compute with, see start_of in kernels/_rounds.py.
    """

    small: int
    larger: int
    unit: int

    @staticmethod
    def of(counts: Sequence[int]) -> Division | None:
        """The division with these rows of each rank, None if there is none."""
        small, most = (counts[-1], counts[0]) if counts else (0, 0)
        larger = list(counts).count(most) if most > small else 0
        division = Division(small, larger, most - small)
        rows = [division.rows(rank) for rank in range(len(counts))]
        return division if small >= 0 and rows == list(counts) else None

    @property
    def most(self) -> int:
        """Rows of the rank that has most."""
        return self.small + self.unit * (self.larger > 0)

    def start(self, rank: int) -> int:
        return self.small * rank + self.unit * min(rank, self.larger)

    def rows(self, rank: int) -> int:
        return self.small + self.unit * (rank < self.larger)

    def total(self, world: int) -> int:
        return self.small * world + self.unit * self.larger

    def scaled(self, width: int) -> tuple[int, int, int]:
        """(small, larger, unit) in elements of rows of `width`."""
        return self.small * width, self.larger, self.unit * width
