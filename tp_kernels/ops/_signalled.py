"""Implementation "cuda": a product whose row groups travel by the process group as they are finished.

    current stream    counters = 0 | product: group 0, 1, 2, ...             | between
    another stream                 | wait 0, send 0 | wait 1, send 1 | ...

"wait" is a kernel of one program (kernels/wait_for_group.py), "send" whatever collective an op makes of the
rows: torch's own, so it works between any ranks that have a process group. The product leaves some
multiprocessors to it. The second stream begins after what the first one has been given, and the first goes on
after the second, both by events: a graph can capture all of it, and memory of either serves the other.

Launches are in an order that also works where all streams share a hardware queue: the product first.

CPU tensors have no streams; kernels are interpreted one after the other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import TypeAlias

import torch
from torch import Tensor

from tp_kernels.comm.cuda_support import native_obstacle
from tp_kernels.comm.errors import UnsupportedError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.group_size import rows_of_group
from tp_kernels.comm.row_groups import Piece, RowGroups

from ._gemm import Between
from ._op import device_type
from ._workspace import import_together, layout_of

# Multiprocessors that a product leaves to the collectives. A guess: NCCL takes 16 to 32 blocks on an H100, of
# which two fit on one.
RESERVED = 16


# Parts [W, ...] of a sum, bias [N] or None, out, start: as `sum_parts` of tp_kernels.kernels.
Add: TypeAlias = Callable[[Tensor, Tensor | None, Tensor, int], Tensor]


class Signals:
    """What a group needs for it on one kind of device. Construction is collective.

    Raises:
        UnsupportedError: on all ranks, if one of them cannot import the kernels.
    """

    def __init__(self, group: ParallelGroup, like: Tensor) -> None:
        if like.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"rank {group.rank}: the first op that runs 'cuda' makes what a graph cannot capture; "
                "call it once before"
            )
        self.add: Add = import_together(group, not like.is_cuda, "'cuda'").sum_parts
        self._hopper: ModuleType | None = None
        if like.is_cuda and native_obstacle(group.cuda_support, "gemm") is None:
            self._hopper = importlib.import_module("tp_kernels.native.gemm")
        self._product = importlib.import_module("tp_kernels.kernels.linear_signalled")
        self._waiting = importlib.import_module("tp_kernels.kernels.wait_for_group")
        self._timeout, self._rank = group.timeout, group.rank
        self._record: Tensor = self._waiting.new_record(like.device)
        self._stream: torch.cuda.Stream | None = None
        # Copied after every product, so that looking at it waits for nothing.
        self._last_record = self._record
        if like.is_cuda:
            self._stream = torch.cuda.Stream(like.device, priority=-1)
            self._last_record = self._record.cpu().pin_memory()

    @contextmanager
    def forked(self) -> Iterator[AbstractContextManager[object]]:
        """A context for launches on the other stream, which follow what the current one has by now.

        What the current stream is given after leaving follows both.

        Raises:
            CollectiveTimeoutError: a wait has expired, as far as this rank has heard.
        """
        if self._last_record[0]:
            self.check()
        if self._stream is None:
            yield nullcontext()
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            yield torch.cuda.stream(self._stream)
        finally:
            with torch.cuda.stream(self._stream):
                self._last_record.copy_(self._record, non_blocking=True)
            self.join()

    def join(self) -> None:
        """Let the current stream follow what the other one has by now."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def start(
        self,
        xs: Sequence[Tensor],
        ws: Sequence[Tensor],
        groups: RowGroups,
        buffer: Tensor,
        counters: Tensor,
    ) -> list[int]:
        """Launch the product; what the counters come to.

        Ranks may take different kernels: nobody else sees the tiles.
        """
        hopper = self._hopper
        if hopper is not None and hopper.signalled_obstacle(xs, ws) is None:
            block_m, block_n = hopper.signalled_tile(xs, ws)
            hopper.signalled_linear(xs, ws, groups, buffer, counters, reserved=RESERVED)
        else:
            tiling = self._product.tiling_of(xs[0], groups)
            block_m, block_n = tiling.block_m, tiling.block_n
            self._product.linear_signalled(
                xs, ws, groups, buffer, counters, reserved=RESERVED, tiling=tiling
            )
        width = buffer.shape[1]
        return [groups.tiles(index, block_m, block_n, width) for index in range(len(groups))]

    def wait(self, operation: str, counters: Tensor, rows: Tensor, group: int, tiles: int) -> None:
        """Let the current stream wait for the group whose part of the buffer is `rows`."""
        self._waiting.wait_for_group(
            operation,
            counters,
            rows,
            self._record,
            group=group,
            tiles=tiles,
            rank=self._rank,
            timeout=self._timeout,
        )

    def check(self) -> None:
        """Raise CollectiveTimeoutError if a wait has expired; waits for the current stream."""
        self._waiting.check(self._record, self._timeout)

    def close(self) -> None:
        """Nothing is shared with other ranks."""


def signals_of(group: ParallelGroup, like: Tensor) -> Signals:
    """Those of the group for the device of `like`; the first call is collective."""
    name = f"signals {device_type(like)}"
    own: Signals | None = group.workspaces.get(name)
    if own is None:
        with torch.inference_mode(False):  # or training could not write to what inference made
            own = group.workspaces[name] = Signals(group, like)
    return own


def groups_of(
    group: ParallelGroup, operation: str, like: Tensor, counts: Sequence[int], width: int
) -> RowGroups:
    """In which groups rows of `width` elements, `counts` for each destination, travel. Collective.

    Raises:
        GroupMismatchError: ranks differ in this, as far as ProcessGroupTransport compares.
    """
    group.transport.agree(f"{operation} cuda", like, sum(counts), width, layout_of(counts))
    size = rows_of_group(group, operation, counts, width, like.dtype, device_type(like))
    return RowGroups(counts, size)


def send_by_groups(
    group: ParallelGroup,
    operation: str,
    xs: Sequence[Tensor],
    ws: Sequence[Tensor],
    counts: Sequence[int],
    send: Callable[[Tensor, Sequence[Piece], Add], None],
    between: Between,
) -> None:
    """The product sum_i x_i W_i^T, and `send(rows, pieces, add)` of each group of it in turn. Collective.

    Args:
        xs, ws: [R, K_i] and [N, K_i].
        counts: of the R rows for each destination, or [R] if they all go one way.
        send: gets rows [.., N] of the group, by destination, where they are in the product, and what sums
            parts in one launch.
        between: called when all is on its way.
    """
    width = ws[0].shape[0]
    groups = groups_of(group, operation, xs[0], counts, width)
    with torch.cuda.device_of(xs[0]):
        own = signals_of(group, xs[0])
        buffer = xs[0].new_empty(groups.total, width)
        counters = xs[0].new_zeros(len(groups), dtype=torch.int32)
        with own.forked() as beside:
            tiles = own.start(xs, ws, groups, buffer, counters)
            with beside:
                for index in range(len(groups)):
                    rows = buffer[groups.start(index) : groups.start(index + 1)]
                    own.wait(operation, counters, rows, index, tiles[index])
                    send(rows, groups.ranges(index), own.add)
            if between:
                between()
