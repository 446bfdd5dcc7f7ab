"""The module tp_kernels._cuda, loaded when a kernel is first wanted, and where its kernels run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tp_kernels.comm.cuda_support import unavailable
from tp_kernels.comm.errors import UnsupportedError
from tp_kernels.comm.layout import Division
from tp_kernels.comm.workspace import OPERATIONS, Workspace


def extension() -> Any:
    """tp_kernels._cuda.

    Raises:
        UnsupportedError: it cannot be imported; says why and what helps.
    """
    try:
        return importlib.import_module("tp_kernels._cuda")
    except ImportError as error:
        raise UnsupportedError(f"kernels in CUDA C++: _cuda is {unavailable(error)}") from error


def native_division(module: Any, division: Division) -> Any:
    return module.Division(division.small, division.unit, division.larger)


def native_workspace(module: Any, workspace: Workspace, operation: str) -> Any:
    """What a kernel needs to know of `workspace`, with the name of `operation` for its record."""
    shape = workspace.shape
    return module.Workspace(
        table=workspace.table.data_ptr(),
        record=workspace.record.data_ptr(),
        stride=shape.stride,
        chunk=shape.chunk,
        timeout=int(workspace.timeout * 1e9),
        rank=workspace.rank,
        world=shape.world,
        depth=shape.depth,
        operation=OPERATIONS[operation],
    )


@contextmanager
def stream_on(where: str, device: torch.device) -> Iterator[int]:
    """The current stream of `device`, which is the current one meanwhile.

    Raises:
        UnsupportedError: `device` is no CUDA device.
    """
    if device.type != "cuda":
        raise UnsupportedError(
            f"{where}: tensors are on {device}; kernels in CUDA C++ need a CUDA device, for CPU tensors "
            "there is tp_kernels.kernels with TRITON_INTERPRET=1"
        )
    with torch.cuda.device(device):
        yield torch.cuda.current_stream().cuda_stream
