"""Which products share a tiling, and which tilings are worth a try: data.

A tuner may choose among the candidates of a product because all of them give the same bits:

- An element of the result is one chain of float32 accumulations, of one program: K is never split over
  programs, warps or stages. BLOCK_M, BLOCK_N, GROUP and the number of programs decide which program
  computes an element and when, warps which of its threads, and stages how early operands are loaded.
- The chain adds slices of K in ascending order. A slice is what one matrix instruction takes (K = 16 of
  16-bit elements), or one fused multiply-add in float32. Instructions of one kind differ in M and N by block
  and warps: M and N are the number of independent chains, K is what is summed inside. So all candidates for
  a product use one kind of instruction with one K, no mma.sync where others use wgmma
  (tests/kernels/aot_candidates.py reads it from the machine code).
- BLOCK_K is that of the built-in choice, always. The hardware's chain may not depend on it, but the
  interpreter's does, and so would a compiler's that sums a block before it adds it to the rest.

Nobody documents the order inside an instruction. So the argument is not all there is: the tuner runs every
candidate on the device and drops those whose bits are not those of the built-in choice (tuner.py).

Programs: kernels that gather rows set some apart for that, `senders`; the others communicate from every
program. On a GPU all should be resident, which bounds them by what registers and shared memory allow
(tests/kernels/aot_candidates.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.layout import split_sizes
from tp_kernels.kernels._gemm import FEW_ROWS, INTERPRETER, TILINGS, Tiling
from tp_kernels.kernels.workspace import WorkspaceShape

from .hardware import INTERPRETED, Hardware

# Ranks send each other rows of x in these, parts of the sum in others.
GATHERING = ("all_gather_linear", "all_gather_weight_gradient")
OPERATIONS = (*GATHERING, "linear_all_reduce", "linear_reduce_scatter")

# Of a candidate: BLOCK_M, BLOCK_N, warps, stages, programs, group.
Sizes = tuple[int, int, int, int, int, int]

# Enough to show how tuning works.
INTERPRETED_SIZES: tuple[Sizes, ...] = (
    (32, 16, 1, 1, 65535, 2),
    (16, 32, 1, 1, 65535, 2),
    (32, 32, 1, 1, 65535, 1),
)

# What may be tried instead of the built-in choice, by family, bytes of an element, and rows. Tiles of at most
# 64 KiB, the chunk of a workspace unless told otherwise; 80 stays within the 99 KiB of shared memory of 8.6,
# 8.9 and 12.0. Few rows are bound by the reading of W: narrow tiles give every multiprocessor some, deep
# pipelines and two programs for each multiprocessor keep more loads in flight. Many rows are bound by the
# matrix units.
SIZES: dict[tuple[int, int, str], tuple[Sizes, ...]] = {
    (80, 2, "few"): (
        (16, 64, 4, 5, 216, 8),
        (16, 128, 8, 4, 108, 8),
        (32, 64, 4, 5, 108, 8),
        (32, 128, 8, 4, 108, 8),
        (64, 64, 8, 4, 108, 8),
        (64, 128, 8, 3, 108, 8),
    ),
    (80, 2, "many"): (
        (128, 128, 8, 4, 108, 4),
        (128, 128, 8, 5, 108, 8),
        (64, 128, 8, 4, 108, 8),
        (64, 256, 8, 3, 108, 8),
        (256, 64, 8, 3, 108, 8),
        (128, 64, 4, 3, 216, 8),
    ),
    (80, 2, "gradient"): (
        (64, 128, 8, 4, 108, 8),
        (128, 64, 8, 4, 108, 8),
        (128, 128, 8, 3, 108, 8),
    ),
    (80, 4, "few"): (
        (16, 32, 4, 4, 216, 8),
        (16, 64, 8, 3, 108, 8),
        (16, 128, 8, 3, 108, 8),
        (32, 64, 8, 3, 108, 8),
        (32, 128, 8, 3, 108, 8),
    ),
    (80, 4, "many"): (
        (64, 64, 8, 3, 108, 4),
        (64, 64, 8, 4, 108, 8),
        (32, 128, 8, 3, 108, 8),
        (64, 32, 8, 3, 108, 8),
        (128, 32, 8, 3, 108, 8),
    ),
    (80, 4, "gradient"): (
        (32, 64, 8, 3, 108, 8),
        (64, 32, 8, 3, 108, 8),
        (64, 64, 8, 4, 108, 8),
    ),
    (90, 2, "few"): (
        (64, 32, 4, 6, 264, 8),
        (64, 64, 4, 4, 264, 8),
        (64, 64, 4, 6, 132, 8),
        (64, 128, 8, 5, 132, 8),
        (64, 256, 8, 4, 132, 8),
    ),
    (90, 2, "many"): (
        (128, 256, 8, 3, 132, 4),
        (128, 256, 8, 3, 132, 16),
        (128, 128, 8, 4, 132, 8),
        (64, 256, 8, 4, 132, 8),
        (256, 128, 8, 3, 132, 8),
        (64, 128, 8, 4, 132, 8),
    ),
    (90, 2, "gradient"): (
        (128, 64, 8, 4, 132, 8),
        (64, 128, 8, 4, 132, 8),
        (64, 256, 8, 4, 132, 8),
    ),
    (90, 4, "few"): (
        (16, 32, 4, 4, 264, 8),
        (16, 64, 8, 3, 132, 8),
        (16, 128, 8, 3, 132, 8),
        (32, 64, 8, 3, 132, 8),
        (32, 128, 8, 3, 132, 8),
    ),
    (90, 4, "many"): (
        (64, 64, 8, 3, 132, 4),
        (64, 64, 8, 4, 132, 8),
        (32, 128, 8, 3, 132, 8),
        (64, 32, 8, 3, 132, 8),
        (128, 32, 8, 3, 132, 8),
    ),
    (90, 4, "gradient"): (
        (32, 64, 8, 3, 132, 8),
        (64, 32, 8, 3, 132, 8),
        (64, 64, 8, 4, 132, 8),
    ),
    (100, 2, "few"): (
        (64, 32, 4, 6, 296, 8),
        (64, 64, 4, 4, 296, 8),
        (64, 64, 4, 6, 148, 8),
        (64, 128, 8, 5, 148, 8),
        (64, 256, 8, 4, 148, 8),
    ),
    (100, 2, "many"): (
        (128, 256, 8, 3, 148, 4),
        (128, 256, 8, 3, 148, 16),
        (128, 128, 8, 4, 148, 8),
        (64, 256, 8, 4, 148, 8),
        (256, 128, 8, 3, 148, 8),
        (64, 128, 8, 4, 148, 8),
    ),
    (100, 2, "gradient"): (
        (64, 256, 8, 3, 148, 8),
        (64, 128, 8, 4, 148, 8),
        (128, 128, 8, 3, 148, 8),
    ),
    (100, 4, "few"): (
        (16, 32, 4, 4, 296, 8),
        (16, 64, 8, 3, 148, 8),
        (16, 128, 8, 3, 148, 8),
        (32, 64, 8, 3, 148, 8),
        (32, 128, 8, 3, 148, 8),
    ),
    (100, 4, "many"): (
        (64, 64, 8, 3, 148, 4),
        (64, 64, 8, 4, 148, 8),
        (32, 128, 8, 3, 148, 8),
        (64, 32, 8, 3, 148, 8),
        (128, 32, 8, 3, 148, 8),
    ),
    (100, 4, "gradient"): (
        (32, 64, 8, 3, 148, 8),
        (64, 32, 8, 3, 148, 8),
        (64, 64, 8, 4, 148, 8),
    ),
}

# Programs that gather, besides those of the built-in choice: a few are enough for slow links.
SENDERS = (4, 8, 32)


@dataclass(frozen=True, order=True)
class ShapeClass:
    """Products that share a tiling. Its fields are equal on all ranks, as what they are made from.

    Args:
        operation: one of OPERATIONS.
        shots: of linear_all_reduce, 1 or 2, as it chooses with a workspace of depth 4; of others 1.
        itemsize: bytes of an element.
        world: ranks.
        rows, width, inner: the largest M, N, K of the class, powers of two; more than half of each is in it.
            Rows are those that `choose` in kernels/_gemm.py sees, so no class is on both sides of FEW_ROWS.
            Of all_gather_weight_gradient M and K are those of the forward product, whose rows are summed.
    """

    operation: str
    shots: int
    itemsize: int
    world: int
    rows: int
    width: int
    inner: int

    @staticmethod
    def of(
        operation: str, rows: int | Sequence[int], n: int, k: int, dtype: torch.dtype, world: int
    ) -> ShapeClass:
        """Of x [rows, k] times w [n, k] transposed on every one of `world` ranks, or its gradient of w.

        rows: all, divided over the ranks by split_sizes where they are divided; or how many each rank has.

        Raises:
            ShapeError: a size below 1; nothing is multiplied.
            UnsupportedError: no such operation.
        """
        if operation not in OPERATIONS:
            raise UnsupportedError(f"{operation}: tilings are for {', '.join(OPERATIONS)}")
        counts = split_sizes(rows, world) if isinstance(rows, int) else rows
        if min(sum(counts), n, k) < 1:
            raise ShapeError(f"{operation}: {rows} x {n} x {k} on {world} ranks is no product")
        total, most, shots = sum(counts), max(counts), 1
        if operation == "linear_all_reduce":
            shots = 1 if total <= FEW_ROWS or world == 2 else 2
            most = total if shots == 1 else most
        return ShapeClass(operation, shots, dtype.itemsize, world, *map(_bucket, (most, n, k)))

    @property
    def kind(self) -> str:
        """Of rows, as in TILINGS."""
        if self.operation == "all_gather_weight_gradient":
            return "gradient"
        return "few" if self.rows <= FEW_ROWS else "many"

    def __str__(self) -> str:
        shots = f" in {self.shots} shots" * (self.shots > 1)
        return (
            f"{self.operation}{shots}, {8 * self.itemsize} bits, {self.world} ranks, "
            f"M <= {self.rows}, N <= {self.width}, K <= {self.inner}"
        )


def _bucket(size: int) -> int:
    return 1 << (size - 1).bit_length()


def candidates(hardware: Hardware, shape: ShapeClass) -> tuple[Tiling, ...]:
    """The built-in choice for `shape`, and then what may be faster."""
    if hardware.family == INTERPRETED:
        built_in, sizes = INTERPRETER, INTERPRETED_SIZES
    else:
        key = (hardware.family, shape.itemsize, shape.kind)
        built_in, sizes = TILINGS[key], SIZES[key]
    others = (
        replace(
            built_in,
            block_m=m,
            block_n=n,
            warps=warps,
            stages=stages,
            programs=programs,
            group=group,
        )
        for m, n, warps, stages, programs, group in sizes
    )
    found = [built_in, *others]
    if built_in.tma:
        found.append(replace(built_in, tma=False))
    if shape.operation in GATHERING:
        found += [replace(built_in, senders=senders) for senders in SENDERS]
    return tuple(dict.fromkeys(found))


def workspace_shape(
    choices: Sequence[Tiling], dtype: torch.dtype, world: int, most_channels: int = 1024
) -> WorkspaceShape:
    """The smallest workspace in which every one of `choices` runs with all of its programs."""
    return WorkspaceShape(
        world,
        channels=min(most_channels, max(one.programs for one in choices)),
        chunk=max(one.chunk(dtype) for one in choices),
        depth=4,  # for two shots
    )
