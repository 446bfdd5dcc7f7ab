"""A stream that waits until a group of rows is complete: one program between a product and a collective.

See linear_signalled.py. The wait is bounded. If it expires, a record says for which group of what (RECORD in
_signals.py, where the channel is the group), and the rows are filled with NaN, since the collective behind
this kernel will send them: no rank then takes for data what was never computed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_kernels.comm.errors import CollectiveTimeoutError

from ._device import INTERPRETED, largest, narrow
from ._signals import RECORD, TILES, wait
from .workspace import OPERATIONS

LANES = 32


@triton.jit(do_not_specialize=["group", "tiles", "elements", "rank", "timeout"])
def await_group(
    counters, out, record, group, tiles, elements, rank, timeout,
    OPERATION: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Until counters[group] is `tiles`; out [elements] are the rows of the group."""
    lanes = tl.arange(0, LANES)
    alive = largest(tl.load(record + lanes * 0)) == 0
    alive = wait(
        (counters + group + lanes * 0).to(tl.int64), tiles + lanes * 0, lanes == 0,
        record, rank, group, TILES, alive, timeout, OPERATION, LANES,
    )  # fmt: skip
    if not alive:
        nothing = tl.full([LANES], float("nan"), tl.float32)
        for start in range(0, elements, LANES):
            mask = start + lanes < elements
            tl.store(out + start + lanes, narrow(nothing, out.dtype.element_ty), mask=mask)


def wait_for_group(
    operation: str,
    counters: Tensor,
    rows: Tensor,
    record: Tensor,
    *,
    group: int,
    tiles: int,
    rank: int,
    timeout: float,
) -> None:
    """Let the current stream wait until `counters[group]` is `tiles` or more.

    Args:
        operation: one of OPERATIONS, for the record.
        counters: as linear_signalled takes them.
        rows: the group's part of the buffer, contiguous.
        record: of `new_record`.
        timeout: seconds that this may last.

    Raises:
        CollectiveTimeoutError: interpreted, as `check`.
    """
    await_group[(1,)](
        counters,
        rows,
        record,
        group,
        tiles,
        rows.numel(),
        rank,
        int(timeout * 1e9),
        OPERATION=OPERATIONS[operation],
        LANES=LANES,
        num_warps=1,
    )
    if INTERPRETED:
        check(record, timeout)


def new_record(device: torch.device) -> Tensor:
    """int32 [len(RECORD)]: no wait has expired."""
    return torch.zeros(len(RECORD), dtype=torch.int32, device=device)


def check(record: Tensor, timeout: float) -> None:
    """Raise CollectiveTimeoutError if a wait has expired. Reading a GPU waits for the current stream."""
    found: dict[str, Any] = dict(zip(RECORD, record.tolist(), strict=True))
    if found["state"]:
        operation = {code: name for name, code in OPERATIONS.items()}[found["operation"]]
        raise CollectiveTimeoutError(
            f"{operation}: rank {found['rank']} waited for group {found['channel']} of its product, of "
            f"which {found['seen']} of {found['expected']} tiles were done within {timeout:g} s; results "
            "since then are undefined, and all ranks need a new group"
        )
