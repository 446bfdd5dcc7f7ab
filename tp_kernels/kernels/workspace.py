"""The memory through which kernels of different ranks exchange data: its shape, addresses and failures.

Of every rank, in memory that all of them can address (see _signals.py for what happens in it):

    channel 0 | channel 1 | ...
    channel:  ready, credit and epoch words | buffer 0 | buffer 1 | ...        STRIDE bytes
    buffer:   chunk from rank 0 | chunk from rank 1 | ...                      WORLD * CHUNK bytes

A workspace serves one operation after the other, in the same order on all ranks; two that may run at the
same time, on two streams, need a workspace each. Nothing here depends on the size of a message: longer ones
go through the same buffers in more rounds, so nothing ever grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from tp_kernels.comm.errors import CollectiveTimeoutError, ShapeError, UnsupportedError
from tp_kernels.comm.layout import Division, split_sizes

from ._device import INTERPRETED
from ._launch import DTYPES, check_device
from ._signals import CREDIT, DONE, EPOCH, MOST_RANKS, READY, RECORD, SIGNAL_BYTES

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
}

WARPS = 8  # of kernels that only move and add
# Of a thread. Without a limit ptxas makes room for more blocks per multiprocessor and spills for it, even
# out of 40 registers (seen with 12.8), but these kernels need one. 128 is too few for the largest.
MOST_REGISTERS = 160


def tile(dtype: torch.dtype) -> int:
    """Elements that a program of WARPS warps moves at a time: 16 bytes per thread, the widest access."""
    return 32 * WARPS * 16 // dtype.itemsize


def with_scratch(launch: Callable[..., Any], *arguments: Any, **constants: Any) -> None:
    """Call `launch` with memory for the tensor descriptors that kernels make."""
    triton.set_allocator(_scratch)
    launch(*arguments, **constants)


def _scratch(nbytes: int, alignment: int, stream: int | None) -> Tensor:
    """Memory of a launch on the current device; what comes after it in the stream may get it again."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


@dataclass(frozen=True)
class WorkspaceShape:
    """What a workspace holds; the same on all ranks.

    Args:
        world: ranks, 1 to 32.
        channels: programs that a launch may have. On a GPU all of them should be resident at once.
        chunk: bytes that one rank sends another in one round of a channel; a multiple of 16.
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
            (self.chunk > 0 and self.chunk % 16 == 0, "chunk", "a positive multiple of 16"),
            (self.depth in (1, 2, 4, 8), "depth", "1, 2, 4 or 8"),
        ):
            if not holds:
                raise ShapeError(f"WorkspaceShape({name}={getattr(self, name)}): expected {what}")

    @property
    def stride(self) -> int:
        """Bytes from one channel to the next."""
        return SIGNAL_BYTES.value + self.depth * self.world * self.chunk

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
                (READY.value, MOST_RANKS),
                (CREDIT.value, MOST_RANKS),
                (EPOCH.value, 1),
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

    def launch(
        self,
        kernel: Any,
        operation: str,
        programs: int,
        *arguments: Any,
        warps: int,
        registers: int = MOST_REGISTERS,
        **constants: Any,
    ) -> None:
        """Run `kernel` on `programs` channels, with `arguments`, what every kernel needs and `constants`.

        Interpreted kernels have ended, well or not, when this returns. On a GPU it neither waits nor
        checks, so it can be captured in a graph: call `check` before results leave the device.

        Raises:
            CollectiveTimeoutError: an interpreted kernel of this workspace gave up a wait.
            UnsupportedError: kernels are compiled for GPUs and the workspace is in host memory.
        """
        if INTERPRETED:
            self.check()
        else:
            check_device(f"{operation} on rank {self.rank}", self.table.device)
        # In a context of its own, or a caller's other kernels would get their memory from here as well.
        copy_context().run(
            with_scratch,
            kernel[(programs,)],
            *arguments,
            self.table,
            self.record,
            self.rank,
            int(self.timeout * 1e9),
            OPERATION=OPERATIONS[operation],
            WORLD=self.world,
            STRIDE=self.shape.stride,
            DEPTH=self.shape.depth,
            CHUNK=self.shape.chunk,
            LANES=32 * warps,
            **constants,
            num_warps=warps,
            maxnreg=registers,
        )
        if INTERPRETED:
            self.check()

    def check(self) -> None:
        """Raise if a kernel has given up a wait; what it and later kernels had to write is then undefined.

        The workspace stays unusable. On a GPU this copies the record, which waits for the current stream.
        """
        record = dict(zip(RECORD, self.record.tolist(), strict=True))
        if record["state"]:
            operation = {code: name for name, code in OPERATIONS.items()}[record["operation"]]
            awaited = {
                READY.value: f"data of rank {record['peer']}",
                CREDIT.value: f"credit of rank {record['peer']}",
                DONE.value: f"the rows that its own program {record['peer']} gathers",
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
