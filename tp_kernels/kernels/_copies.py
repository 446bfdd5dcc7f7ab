"""Rows of all ranks on every rank by the copy engine, which takes no multiprocessor from a product.

Every rank puts its rows where all can read them (`Workspace.staging`), and after a barrier copies those of
its peers, chunk by chunk, on a stream of its own. After each chunk, of every peer, a write ordered in that
stream raises the flag that a product waits for, see _gather.py: one channel, whose round is a chunk. A second
barrier lets the next call write to the staging memory.

Worth it for many rows only: two barriers, and W copies for each chunk. In host memory, where kernels are
interpreted, everything is there before the product begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tp_kernels.comm.layout import Division

from ._gather import Plan
from ._gemm import Tiling
from ._signals import DONE
from .barrier import barrier
from .workspace import Workspace

CHUNKS = 8  # of a rank's rows: enough for a product to begin early, few enough for large copies
LINE = 16  # bytes that divide a chunk
# Of the rank that has most, from which copies are taken unasked. Not measured.
COPY_BYTES = 4 << 20


def chunk_of(elements: int, itemsize: int) -> int:
    """Elements that are copied from a rank at a time, if it has `elements`."""
    line = LINE // itemsize
    return -(-elements // (CHUNKS * line)) * line


def plan_products(
    workspace: Workspace, division: Division, width: int, itemsize: int, tiling: Tiling, tiles: int
) -> Plan:
    """How rows of `width` elements come to `tiles` tiles of products with `tiling`, without programs."""
    programs = min(tiles, tiling.programs, workspace.programs or tiling.programs)
    return Plan(chunk_of(division.most * width, itemsize), 1, max(1, programs), 0)


@contextmanager
def gathered_by_copies(
    workspace: Workspace, x: Tensor, gathered: Tensor, division: Division
) -> Iterator[None]:
    """Inside, x [R_r, K] of all ranks comes to `gathered` [R, K]: the product is to be launched there.

    Collective, as is leaving.
    """
    width, to = x.shape[1], gathered.view(-1)
    staging = [part.view(x.dtype) for part in workspace.staging]
    most = division.most * width
    part = chunk_of(most, x.element_size())
    staging[workspace.rank][: x.numel()].copy_(x.view(-1))
    # Not on the other stream: a copy within a device may need a multiprocessor, and the product takes all.
    mine = division.start(workspace.rank) * width
    to[mine : mine + x.numel()].copy_(x.view(-1))
    barrier(workspace)
    with _beside(workspace):
        for chunk, begin in enumerate(range(0, most, part)):
            for step in range(1, workspace.world):  # not all from the same rank at once
                owner = (workspace.rank + step) % workspace.world
                length = min(division.rows(owner) * width - begin, part)
                if length > 0:
                    first = division.start(owner) * width + begin
                    source = staging[owner][begin : begin + length]
                    to[first : first + length].copy_(source, non_blocking=True)
            _raise_flag(workspace.local, chunk + 1)
    yield
    if workspace.local.is_cuda:
        torch.cuda.current_stream().wait_stream(workspace.copy_stream())
    barrier(workspace)


@contextmanager
def _beside(workspace: Workspace) -> Iterator[None]:
    """On the stream for copies, after what the current one has been given."""
    if workspace.local.is_cpu:
        yield
        return
    stream = workspace.copy_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def _raise_flag(local: Tensor, value: int) -> None:
    """DONE of channel 0, ordered after the copies of the current stream."""
    flags, index = local.view(torch.uint32), DONE.value // 4
    if local.is_cpu:
        flags[index] = value
        return
    memory = torch._C._distributed_c10d._SymmetricMemory
    if torch.cuda.is_current_stream_capturing():
        memory.memset32(flags, offset=index, val=value, count=1)
    else:  # the driver orders it after everything before, for the whole system
        memory.stream_write_value32(flags, offset=index, val=value)
