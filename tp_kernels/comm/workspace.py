"""The memory through which kernels of different ranks exchange data: its shape, addresses and failures.

Of every rank, in memory that all of them can address (see kernels/_signals.py for what happens in it):

    channel 0 | channel 1 | ...
    channel:  ready, credit and epoch words | buffer 0 | buffer 1 | ...        stride bytes
    buffer:   chunk from rank 0 | chunk from rank 1 | ...                      world * chunk bytes

A workspace serves one operation after the other, in the same order on all ranks; two that may run at the
same time, on two streams, need a workspace each. Nothing here depends on the size of a message: longer ones
go through the same buffers in more rounds, so nothing ever grows.

Kernels in Triton (kernels/) and in CUDA C++ (native/) take turns in one workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .devices import MOST_RANKS
from .errors import CollectiveTimeoutError, ShapeError, UnsupportedError
from .layout import Division, split_sizes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that kernels add

# Byte offsets in a channel: a word per peer, the epoch, and flags between programs of this rank (see
# kernels/_gather.py; FINISHED of channel 0 only). Each kind has a line of its own.
READY, CREDIT, EPOCH, DONE, FINISHED = 0, 128, 256, 320, 384
SIGNAL_BYTES = 512  # the buffers come after it

MOST_CHUNK = 1 << 30  # kernels count lines of 16 bytes of all ranks in 32 bits

# int32 words of the record of a wait that expired.
RECORD = ("state", "rank", "operation", "channel", "signal", "peer", "expected", "seen")

# How the record of a failed wait names the operation. Codes are those of nothing else.
OPERATIONS = {
    "all_reduce": 1,
    "reduce_scatter": 2,
    "all_gather": 3,
    "all_reduce_rms_norm": 4,
    "linear_reduce_scatter": 5,
    "linear_all_reduce": 6,
    "all_gather_linear": 7,
    "all_gather_weight_gradient": 8,
    "cross_entropy": 9,
    "barrier": 10,
    "pipeline": 11,
}


def tile(dtype: torch.dtype) -> int:
    """Elements that 256 threads move at a time: 16 bytes each, the widest access."""
    return 256 * 16 // dtype.itemsize


@dataclass(frozen=True)
class WorkspaceShape:
    """What a workspace holds; the same on all ranks.

    Args:
        world: ranks, 1 to 32.
        channels: programs that a launch may have. On a GPU all of them should be resident at once.
        chunk: bytes that one rank sends another in one round of a channel; a multiple of 16, at most 1 GiB.
        depth: rounds that a rank may be ahead of its slowest reader; a power of two.
    """

    world: int
    channels: int = 32
    chunk: int = 1 << 16
    depth: int = 2

    def __post_init__(self) -> None:
        for holds, name, what in (
            (1 <= self.world <= MOST_RANKS, "world", f"1 to {MOST_RANKS}"),
            (1 <= self.channels <= 65535, "channels", "1 to 65535"),
            (
                0 < self.chunk <= MOST_CHUNK and self.chunk % 16 == 0,
                "chunk",
                "a positive multiple of 16, at most 1 GiB",
            ),
            (self.depth in (1, 2, 4, 8), "depth", "1, 2, 4 or 8"),
        ):
            if not holds:
                raise ShapeError(f"WorkspaceShape({name}={getattr(self, name)}): expected {what}")

    @property
    def stride(self) -> int:
        """Bytes from one channel to the next."""
        return SIGNAL_BYTES + self.depth * self.world * self.chunk

    @property
    def nbytes(self) -> int:
        """Bytes of every rank's region."""
        return self.channels * self.stride


class Workspace:
    """This rank's view of a workspace.

    Construction is local, but no rank may launch a kernel before all ranks have constructed theirs.

    Args:
        shape: sizes, equal on all ranks.
        rank: this rank.
        local: [>= shape.nbytes] uint8, this rank's region, 16-byte aligned and all zero.
        addresses: of the region of every rank, as this rank's kernels reach them.
        timeout: seconds a wait of a kernel may last.
        name: for messages.
        programs: that a launch may have, also of those that have no channel; equal on all ranks. For ranks
            that share a GPU; else a kernel knows how many are of use.
        epoch: rounds that are taken to have been made already; for tests.
        multicast: address that stands for the regions of all ranks, 0 where there is none.
        staging: of every rank, uint8 memory that this rank can read, its own to write to: for rows that
            the copy engine gathers. Equally long everywhere, or none.
    """

    def __init__(
        self,
        shape: WorkspaceShape,
        rank: int,
        local: Tensor,
        addresses: Sequence[int],
        *,
        timeout: float = 60.0,
        name: str = "workspace",
        programs: int | None = None,
        epoch: int = 0,
        multicast: int = 0,
        staging: Sequence[Tensor] = (),
    ) -> None:
        if local.dtype != torch.uint8 or local.dim() != 1 or local.numel() < shape.nbytes:
            raise ShapeError(
                f"{name} on rank {rank}: the region is {tuple(local.shape)} {local.dtype}, {shape} "
                f"needs {shape.nbytes} bytes of uint8"
            )
        if len(addresses) != shape.world or any(address % 16 for address in addresses):
            raise ShapeError(
                f"{name} on rank {rank}: expected the addresses of {shape.world} regions, 16-byte "
                f"aligned, not {[hex(address) for address in addresses]}"
            )
        self.shape, self.rank, self.name, self.timeout = shape, rank, name, timeout
        self.multicast, self.staging = multicast, tuple(staging)
        self._copy_stream: torch.cuda.Stream | None = None
        self.programs = programs
        self.local = local  # kept alive; kernels reach it through `table` only
        self.table = torch.tensor(addresses, dtype=torch.int64, device=local.device)
        self.record = torch.zeros(len(RECORD), dtype=torch.int32, device=local.device)
        if epoch:
            signals = local[: shape.nbytes].view(shape.channels, shape.stride)
            for word, count in (
                (READY, MOST_RANKS),
                (CREDIT, MOST_RANKS),
                (EPOCH, 1),
            ):
                flags = signals[:, word : word + 4 * count]  # not DONE, which counts from 0
                flags.copy_(torch.full((count,), epoch, dtype=torch.int32).view(torch.uint8))

    @property
    def world(self) -> int:
        return self.shape.world

    def copy_stream(self) -> torch.cuda.Stream:
        """For copies that go on beside a kernel."""
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(self.local.device)
        return self._copy_stream

    def rows_of_ranks(
        self, operation: str, counts: Sequence[int] | None, rows: int | None = None
    ) -> Division:
        """`counts`, or split_sizes(rows, W), as kernels compute them.

        Raises:
            ShapeError: `counts` are not a row count for each rank, divided as by split_sizes and then
                multiplied by one number, or not `rows` together.
        """
        counts = split_sizes(rows or 0, self.world) if counts is None else list(counts)
        division = Division.of(counts)
        if division is None or len(counts) != self.world:
            raise ShapeError(
                f"{operation} on rank {self.rank} of {self.world}: counts={counts}; expected "
                f"{self.world} numbers, divided as by tp_kernels.split_sizes"
            )
        if rows is not None and sum(counts) != rows:
            raise ShapeError(
                f"{operation} on rank {self.rank} of {self.world}: counts={counts} are {sum(counts)} "
                f"rows, the operand has {rows}"
            )
        return division

    def divide(
        self, elements: int, itemsize: int, block: int, most: int | None = None
    ) -> tuple[int, int]:
        """(elements of a chunk, programs) for a message of which every rank sends a peer `elements`.

        As many channels as have a tile of `block` elements each, and `most`; then whole tiles up to full
        chunks.
        """
        channels = self.shape.channels if most is None else most
        wanted = -(-elements // channels)
        part = min(self.shape.chunk // itemsize, -(-wanted // block) * block)
        return part, min(channels, -(-elements // part))

    def check(self) -> None:
        """Raise if a kernel has given up a wait; what it and later kernels had to write is then undefined.

        The workspace stays unusable. On a GPU this copies the record, which waits for the current stream.
        """
        record = dict(zip(RECORD, self.record.tolist(), strict=True))
        if record["state"]:
            operation = {code: name for name, code in OPERATIONS.items()}[record["operation"]]
            awaited = {
                READY: f"data of rank {record['peer']}",
                CREDIT: f"credit of rank {record['peer']}",
                DONE: f"the rows that its own program {record['peer']} gathers",
            }[record["signal"]]
            raise CollectiveTimeoutError(
                f"{operation}: rank {record['rank']} waited for {awaited} "
                f"(slot '{self.name}', channel {record['channel']}, expected epoch "
                f"{record['expected']}, seen {record['seen']}), which did not arrive within "
                f"{self.timeout:g} s; all ranks need a new workspace, of an op a new group"
            )


def check_operand(
    operation: str, workspace: Workspace, x: Tensor, dtypes: Sequence[torch.dtype] | None = DTYPES
) -> None:
    """Refuse what kernels cannot read, before anything is sent."""
    where = f"{operation} on rank {workspace.rank} of {workspace.world}"
    if dtypes is not None and x.dtype not in dtypes:
        raise UnsupportedError(f"{where}: {x.dtype}; supported are {', '.join(map(str, dtypes))}")
    if x.device != workspace.table.device:
        raise UnsupportedError(
            f"{where}: x is on {x.device}, the workspace on {workspace.table.device}"
        )


def result_like(
    operation: str, workspace: Workspace, x: Tensor, shape: Sequence[int], out: Tensor | None
) -> Tensor:
    """`out` if it can take a result of this shape, else a new tensor."""
    if out is None:
        return x.new_empty(tuple(shape))
    if out.shape != tuple(shape) or out.dtype != x.dtype or out.device != x.device:
        raise ShapeError(
            f"{operation} on rank {workspace.rank}: out is {tuple(out.shape)} {out.dtype} on "
            f"{out.device}, the result is {tuple(shape)} {x.dtype} on {x.device}"
        )
    if not out.is_contiguous():
        raise ShapeError(
            f"{operation} on rank {workspace.rank}: out has strides {out.stride()}; it must be "
            "contiguous"
        )
    return out
