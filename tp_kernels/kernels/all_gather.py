"""all_gather: the rows of all ranks, one after the other, on every rank.

Every rank writes its rows to every peer: one round. Any dtype: elements are moved, never looked at.
Rows are divided as by `tp_kernels.split_sizes`. Backward: reduce_scatter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_kernels.comm.exchanges import counts_of_all_gather

from ._gather import gather_rows
from .workspace import WARPS, Workspace, result_like, tile

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def reference(xs: list[Tensor]) -> Tensor:
    """The result for the `x` of all ranks."""
    return torch.cat(xs)


@triton.jit(do_not_specialize=["rank", "timeout"])
def gather(
    x, out, small, larger, width, part, table, record, rank, timeout,
    OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [own rows, width], out [rows, width]; see gather_rows."""
    gather_rows(
        x, out, small, larger, 1, width, part, tl.num_programs(0), table, record, rank, timeout,
        False, OPERATION, WORLD, STRIDE, DEPTH, CHUNK, LANES, BLOCK,
    )  # fmt: skip


def all_gather(
    x: Tensor, workspace: Workspace, rows: int | None = None, *, out: Tensor | None = None
) -> Tensor:
    """This rank's rows [R_r, ...] -> [R, ...] of all ranks. Collective.

    Args:
        x: any dtype; all but the first dimension and the dtype equal on all ranks.
        rows: R, of which this rank holds split_sizes(R, W)[rank]; default: all ranks hold equally many.
        out: takes the result: contiguous, apart from `x` in memory.

    Raises:
        ShapeError, UnsupportedError: before anything is sent.
        CollectiveTimeoutError: interpreted, as `Workspace.launch`.
    """
    counts = counts_of_all_gather(workspace, x, rows)
    rows, world = sum(counts), workspace.world
    out = result_like("all_gather", workspace, x, (rows, *x.shape[1:]), out)
    if world == 1:
        return out.copy_(x)
    if out.numel() == 0:
        return out
    words = _WORDS[x.element_size()]
    width = x.shape[1:].numel() * x.element_size() // words.itemsize
    block = tile(words)
    part, programs = workspace.divide(counts[0] * width, words.itemsize, block)
    workspace.launch(
        gather,
        "all_gather",
        programs,
        x.contiguous().view(-1).view(words),
        out.view(-1).view(words),
        counts[-1],
        rows % world,
        width,
        part,
        warps=WARPS,
        BLOCK=block,
    )
    return out
