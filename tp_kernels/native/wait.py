"""A stream that waits for a flag, and one that writes it: between kernels and collectives of a library."""

from __future__ import annotations

import torch
from torch import Tensor

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.workspace import OPERATIONS, RECORD

from ._extension import extension, stream_on


def wait_for(
    flag: Tensor,
    expected: int,
    record: Tensor,
    *,
    timeout: float,
    operation: str,
    rank: int = 0,
    group: int = 0,
    peer: int = 0,
) -> None:
    """Let the current stream go on when `flag` is at least `expected`, or when a record says why not.

    One thread waits. Counters wrap: what is less than 2^31 ahead is later. What was stored before the flag
    was, is there for what follows in the stream. After a wait that expired, what follows goes on without
    it: see `record` before results are used.

    Args:
        flag: one int32, or a view of one.
        record: int32 [len(RECORD)], zero before; filled once, and then no later wait of it waits.
        timeout: seconds that this may last.
        operation: one of OPERATIONS; rank, group (of rows), peer: for the record.

    Raises:
        ShapeError, UnsupportedError: before anything is launched.
        RuntimeError: CUDA refused the launch.
    """
    _check("wait_for", "flag", flag, 1)
    _check("wait_for", "record", record, len(RECORD))
    if record.device != flag.device:
        raise UnsupportedError(f"wait_for: flag is on {flag.device}, record on {record.device}")
    if operation not in OPERATIONS:
        raise UnsupportedError(
            f"wait_for: operation={operation!r}; use one of {', '.join(OPERATIONS)}"
        )
    module = extension()
    with stream_on("wait_for", flag.device) as stream:
        module.wait_for(
            flag=flag.data_ptr(),
            expected=_int32(expected),
            record=record.data_ptr(),
            timeout=int(timeout * 1e9),
            wait=module.Wait(rank, OPERATIONS[operation], group, 0, peer),
            stream=stream,
        )


def write_flag(flag: Tensor, value: int) -> None:
    """Store `value` to `flag` (one int32) when all before it in the current stream is done.

    Who sees it sees what was stored before, also on another device. Takes no multiprocessor where the driver
    can do it.

    Raises:
        ShapeError, UnsupportedError: before anything is launched.
        RuntimeError: CUDA refused the launch.
    """
    _check("write_flag", "flag", flag, 1)
    with stream_on("write_flag", flag.device) as stream:
        extension().write_flag(flag=flag.data_ptr(), value=_int32(value), stream=stream)


def _check(where: str, name: str, tensor: Tensor, count: int) -> None:
    if tensor.dtype != torch.int32 or tensor.numel() != count or not tensor.is_contiguous():
        raise ShapeError(
            f"{where}: {name} is {tuple(tensor.shape)} {tensor.dtype}, expected {count} int32 in a row"
        )


def _int32(value: int) -> int:
    """A counter that wraps, as int32."""
    return (value + 2**31) % 2**32 - 2**31
