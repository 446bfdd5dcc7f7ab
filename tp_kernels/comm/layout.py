"""How a dimension is divided over ranks. One rule, used by ops, layers and checkpoints alike."""

from __future__ import annotations


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
