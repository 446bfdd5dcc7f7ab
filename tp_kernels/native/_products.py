"""Which of the Hopper products of `_cuda` takes which operands, and why others are not taken.

Pure functions of shapes, strides and addresses. The kernels are those of csrc/cuda/gemm_sm90; they load
operands with the tensor memory accelerator (TMA), whose rules are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Policy = Literal["signal", "await_rows", "await_sum", "send"]

TYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
BLOCK_K = 64  # of a stage; csrc/cuda/gemm_sm90/operands.h
MOST_PAIRS = 4  # csrc/cuda/gemm_sm90/arguments.h
TMA_BYTES = 16  # that divide addresses and distances of rows
MOST = 2**31 - 1  # rows, columns, tiles: coordinates of TMA are int32
MOST_PITCH = 2**40  # bytes from one row to the next, below


class Tile(NamedTuple):
    """A block of the result that one or two warpgroups multiply."""

    block_m: int
    block_n: int
    teams: int  # 1: two warpgroups share the tile; 2: each has its own, in turns


LARGE, SMALL, SMALL_SHARED = Tile(128, 256, 1), Tile(128, 128, 2), Tile(128, 128, 1)

# Clocks of a multiprocessor for a stage of a tile, and those of a tile that nothing hides: filling the
# pipeline, storing. The matrix units make 4096 multiplications with additions of 16-bit numbers in 2 clocks.
# What the small tiles lose to the L2 cache, and the second numbers, are guesses.
CLOCKS = {LARGE: (1024, 3000), SMALL: (590, 600), SMALL_SHARED: (590, 1800)}

# By policy and by whether K is contiguous in a and in b; as _cuda.product_kinds() has them.
KERNELS: dict[tuple[Policy, bool, bool], tuple[Tile, ...]] = {
    ("signal", True, True): (LARGE, SMALL),
    ("signal", True, False): (LARGE, SMALL),
    ("await_rows", True, True): (LARGE, SMALL),
    ("await_rows", True, False): (LARGE, SMALL),
    ("await_sum", False, False): (LARGE, SMALL),
    ("send", True, True): (LARGE, SMALL_SHARED),
    ("send", True, False): (LARGE, SMALL_SHARED),
}


class Layout(NamedTuple):
    """How TMA sees a matrix [rows, k]: one dimension contiguous, lines of the other `pitch` numbers apart."""

    k_major: bool
    pitch: int


def layouts(
    shape: Sequence[int], strides: Sequence[int], address: int, itemsize: int
) -> list[Layout]:
    """Both, one or none of the ways to load a matrix; that with K contiguous first."""
    found = []
    for k_major in (True, False):
        inner, outer = (1, 0) if k_major else (0, 1)
        pitch = strides[outer]
        if shape[outer] == 1:  # never used, but it has to be a valid one
            line = TMA_BYTES // itemsize
            pitch = -(-shape[inner] // line) * line
        if (
            (strides[inner] == 1 or shape[inner] == 1)
            and pitch >= shape[inner]  # lines that overlap are no tensor to it
            and pitch * itemsize % TMA_BYTES == 0
            and pitch * itemsize < MOST_PITCH
            and address % TMA_BYTES == 0
        ):
            found.append(Layout(k_major, pitch))
    return found


def layouts_of(x: Tensor) -> list[Layout]:
    return layouts(x.shape, x.stride(), x.data_ptr(), x.element_size())


def matrix_obstacle(name: str, x: Tensor) -> str | None:
    """Why no kernel loads `x`, whatever it is multiplied with."""
    if x.dtype not in TYPES:
        return f"{name} is {x.dtype}: Hopper products take bfloat16 and float16"
    if x.dim() != 2:
        return f"{name} has {x.dim()} dimensions: Hopper products take matrices"
    if min(x.shape) == 0:
        return f"{name} is {tuple(x.shape)}: there is nothing to load"
    if max(x.shape) > MOST:
        return f"{name} is {tuple(x.shape)}: coordinates of TMA are below 2^31"
    if not layouts_of(x):
        return (
            f"{name} of shape {tuple(x.shape)} has strides {x.stride()} and an address of "
            f"{x.data_ptr() % TMA_BYTES} modulo {TMA_BYTES}: TMA needs one dimension contiguous, the "
            f"other in steps of {TMA_BYTES} bytes, and a base on {TMA_BYTES} bytes"
        )
    return None


def obstacle(policy: Policy, xs: Sequence[Tensor], ws: Sequence[Tensor]) -> str | None:
    """Why the products of x_i [M, K_i] and w_i [N, K_i] have no kernel, or None."""
    if len(xs) > MOST_PAIRS:
        return f"{len(xs)} pairs of operands: Hopper products take {MOST_PAIRS} at most"
    for i, (x, w) in enumerate(zip(xs, ws, strict=True)):
        for name, one in ((f"x[{i}]", x), (f"w[{i}]", w)):
            if why := matrix_obstacle(name, one):
                return why
        if x.dtype != w.dtype:
            return f"x[{i}] is {x.dtype}, w[{i}] {w.dtype}: Hopper products take one dtype"
    if common(policy, xs, ws) is None:
        known = [_named(k) for p, *k in KERNELS if p == policy]
        return (
            f"no Hopper product for these layouts: of x and w, contiguous are {' or '.join(known)}"
        )
    return None


def _named(k_major: Sequence[bool]) -> str:
    return "(" + ", ".join("K" if one else "rows" for one in k_major) + ")"


def common(policy: Policy, xs: Sequence[Tensor], ws: Sequence[Tensor]) -> tuple[bool, bool] | None:
    """Whether K is contiguous in x and in w, of a kernel that can load all pairs."""
    for known, *k_major in KERNELS:
        if known == policy and all(
            any(layout.k_major == wanted for layout in layouts_of(one))
            for ones, wanted in zip((xs, ws), k_major, strict=True)
            for one in ones
        ):
            return k_major[0], k_major[1]
    return None


def layout_as(x: Tensor, k_major: bool) -> Layout:
    """That of `layouts_of` with or without K contiguous."""
    return next(layout for layout in layouts_of(x) if layout.k_major == k_major)


def tiles_of(tile: Tile, rows: int, columns: int) -> int:
    return -(-rows // tile.block_m) * -(-columns // tile.block_n)


def choose(tiles: Sequence[Tile], rows: int, columns: int, inner: int, blocks: int) -> Tile:
    """The tile with which `blocks` multiprocessors are done first, of a result [rows, columns].

    A model: every block takes as many tiles as the busiest one, each for its stages and what nothing hides.
    """

    def clocks(tile: Tile) -> int:
        turns = -(-tiles_of(tile, rows, columns) // blocks)
        stage, exposed = CLOCKS[tile]
        return turns * (-(-inner // BLOCK_K) * stage + exposed)

    return min(tiles, key=clocks)
