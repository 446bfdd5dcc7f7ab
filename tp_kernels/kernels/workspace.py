"""A workspace (see comm/workspace.py) from which kernels in Triton are launched."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import torch
import triton
from torch import Tensor

from tp_kernels.comm import workspace as data
from tp_kernels.comm.workspace import DTYPES as DTYPES
from tp_kernels.comm.workspace import OPERATIONS as OPERATIONS
from tp_kernels.comm.workspace import WorkspaceShape as WorkspaceShape
from tp_kernels.comm.workspace import check_operand as check_operand
from tp_kernels.comm.workspace import result_like as result_like
from tp_kernels.comm.workspace import tile as tile

from ._device import INTERPRETED
from ._launch import check_device

WARPS = 8  # of kernels that only move and add, see tile
# Of a thread. Without a limit ptxas makes room for more blocks per multiprocessor and spills for it, even
# out of 40 registers (seen with 12.8), but these kernels need one. 128 is too few for the largest.
MOST_REGISTERS = 160


def with_scratch(launch: Callable[..., Any], *arguments: Any, **constants: Any) -> None:
    """Call `launch` with memory for the tensor descriptors that kernels make."""
    triton.set_allocator(_scratch)
    launch(*arguments, **constants)


def _scratch(nbytes: int, alignment: int, stream: int | None) -> Tensor:
    """Memory of a launch on the current device; what comes after it in the stream may get it again."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


class Workspace(data.Workspace):
    """As tp_kernels.comm.workspace.Workspace."""

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
