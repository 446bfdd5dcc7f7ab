"""barrier: what follows in the stream of any rank comes after what precedes in the streams of all.

One round of channel 0 without data: flags only. Graphs: see _signals.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._signals import CREDIT, READY, enter, leave, observe, publish
from .workspace import Workspace


@triton.jit(do_not_specialize=["rank", "timeout"])
def meet(
    table, record, rank, timeout,
    OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0).to(tl.int64)
    epoch, alive = enter(table, record, rank, channel, STRIDE, LANES)
    epoch += 1
    publish(table, rank, channel, READY, epoch, alive, WORLD, STRIDE, LANES)
    alive = observe(
        table, record, rank, channel, READY, epoch, alive, timeout,
        OPERATION, WORLD, STRIDE, LANES,
    )  # fmt: skip
    publish(table, rank, channel, CREDIT, epoch, alive, WORLD, STRIDE, LANES)
    leave(table, rank, channel, epoch, alive, STRIDE)


def barrier(workspace: Workspace) -> None:
    """Wait, on the device, until every rank has come here. Collective.

    Raises:
        CollectiveTimeoutError: interpreted, as `Workspace.launch`.
    """
    if workspace.world > 1:
        workspace.launch(meet, "barrier", 1, warps=1)
