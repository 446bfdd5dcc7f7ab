"""sum_parts: what a collective has brought from all ranks, summed in rank order, with bias, rounded once.

As `ordered_sum` of comm/process_group.py, in one launch and one pass over memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ._device import narrow, widen
from ._launch import TILE, launch

# Elements of a program: one access of 16 bytes per thread in 16-bit types. Twice as many would be spilled.
BLOCK = TILE // 2


@triton.jit(do_not_specialize=["start"])
def add_in_order(x, bias, out, count, start, width, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """x [WORLD, count], out [count]; element i has the bias [width] of column (start + i) % width."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = first + tl.arange(0, BLOCK)
    inside = offsets < count
    total = widen(tl.load(x + offsets, mask=inside, other=0.0))
    for source in range(1, WORLD):
        place = offsets + tl.cast(count, tl.int64) * source
        total += widen(tl.load(x + place, mask=inside, other=0.0))
    if bias is not None:
        column = (((first + start) % width).to(tl.int32) + tl.arange(0, BLOCK)) % width
        total += widen(tl.load(bias + column, mask=inside, other=0.0))
    tl.store(out + offsets, narrow(total, out.dtype.element_ty), mask=inside)


def sum_parts(parts: Tensor, bias: Tensor | None, out: Tensor, start: int = 0) -> Tensor:
    """out = round(parts[0] + parts[1] + ... + bias), in float32.

    Args:
        parts: [W, ...], float32, bfloat16 or float16, contiguous.
        bias: [N] of the dtype of parts; element i of a part is in column (start + i) % N.
        out: contiguous, with as many elements as a part; takes the result and is returned.
    """
    count = out.numel()
    launch(
        add_in_order,
        "sum_parts",
        triton.cdiv(count, BLOCK),
        parts,
        None if bias is None else bias.contiguous(),
        out,
        count,
        start,
        1 if bias is None else bias.numel(),
        WORLD=parts.shape[0],
        BLOCK=BLOCK,
    )
    return out
