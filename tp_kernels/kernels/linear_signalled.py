"""linear_signalled: a product whose rows are finished, and signalled, group by group.

    out[row of the buffer] = round(x_0[row] W_0^T + x_1[row] W_1^T + ...)     accumulated in float32

One launch computes all tiles, in the order of `RowGroups`; the buffer has the rows of a group side by side.
Each tile that is stored adds 1 to the counter of its group. Whoever waits for a group (wait_for_group.py)
then sends it while the next ones are computed: with any collective, since that begins on another stream of
the host and knows nothing of the product. No peer is involved, so there is nothing to be agreed.

Programs never wait, so they need not be resident; they leave some multiprocessors to the collective.

Graphs: the counters are zeroed by a launch of their own, before this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import copy_context

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.row_groups import RowGroups

from ._device import device_function, narrow
from ._gemm import REGISTERS, Tiling, check_rows, choose, operands, pairs_of, place, product, tma
from ._launch import DTYPES, check_device
from ._rounds import start_of
from .workspace import with_scratch


def reference(xs: Sequence[Tensor], ws: Sequence[Tensor], groups: RowGroups) -> Tensor:
    """The buffer."""
    total = sum(x.float() @ w.float().t() for x, w in zip(xs, ws, strict=True))
    assert isinstance(total, Tensor)
    pieces = [piece for group in range(len(groups)) for piece in groups.ranges(group)]
    rows = [total[piece.source : piece.source + piece.rows] for piece in pieces]
    return torch.cat([total[:0], *rows]).to(xs[0].dtype)


@device_function
def rows_in(group, rows, size):
    """Rows of a part of `rows` that are in `group`."""
    return tl.maximum(tl.minimum(rows - group * size, size), 0)


@device_function
def tiles_of(
    group, small, larger, unit, destinations, size, column_blocks, BLOCK_M: tl.constexpr
):  # fmt: skip
    """(row blocks of `group` in a longer part, in a shorter one, tiles of the group)."""
    longer = tl.cdiv(rows_in(group, small + unit, size), BLOCK_M)
    shorter = tl.cdiv(rows_in(group, small, size), BLOCK_M)
    return longer, shorter, (larger * longer + (destinations - larger) * shorter) * column_blocks


@device_function
def group_of(
    tile, small, larger, unit, destinations, size, column_blocks, BLOCK_M: tl.constexpr
):  # fmt: skip
    """(group, which of its tiles) of `tile`.

    Groups are alike as long as every part fills them; then at most one in which shorter parts end; then
    those of the longer parts only.
    """
    full = small // size
    _, _, each = tiles_of(0, size, 0, 0, destinations, size, column_blocks, BLOCK_M)
    _, _, mixed = tiles_of(full, small, larger, unit, destinations, size, column_blocks, BLOCK_M)
    _, _, rest = tiles_of(0, size, 0, 0, tl.maximum(larger, 1), size, column_blocks, BLOCK_M)
    after = tile - full * each
    beyond = after - mixed
    group = tl.where(
        after < 0,
        tile // each,
        tl.where(beyond < 0, full, full + 1 + tl.maximum(beyond, 0) // rest),
    )
    index = tl.where(after < 0, tile % each, tl.where(beyond < 0, after, beyond % rest))
    return group, index


@device_function
def tile_at(
    tile, small, larger, unit, destinations, size, column_blocks, BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """(group, first row in x, first row in out, rows, column block) of `tile`."""
    group, index = group_of(tile, small, larger, unit, destinations, size, column_blocks, BLOCK_M)
    longer, shorter, tiles = tiles_of(
        group, small, larger, unit, destinations, size, column_blocks, BLOCK_M
    )
    block, column_block = place(index, tiles // column_blocks, column_blocks, GROUP)
    in_longer = block < larger * longer
    height = tl.maximum(tl.where(in_longer, longer, shorter), 1)
    block = tl.where(in_longer, block, block - larger * longer)
    part = tl.where(in_longer, 0, larger) + block // height
    down = block % height * BLOCK_M
    of_longer, of_shorter = rows_in(group, small + unit, size), rows_in(group, small, size)
    rows = tl.where(in_longer, of_longer, of_shorter) - down
    before = group * size  # rows of each part in the groups before, if it has so many
    target = larger * tl.minimum(small + unit, before)
    target += (destinations - larger) * tl.minimum(small, before)
    target += tl.minimum(part, larger) * of_longer + tl.maximum(part - larger, 0) * of_shorter
    source = start_of(part, small, larger, unit) + before
    return group, source + down, target + down, tl.minimum(rows, BLOCK_M), column_block


@triton.jit(do_not_specialize=["small", "larger", "unit", "destinations", "size", "tiles"])
def multiply_by_groups(
    operands, out, counters, small, larger, unit, destinations, size, tiles, width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """x_i [rows, K_i] and w_i [width, K_i] in `operands`; out [rows, width], counters [groups].

    small, larger, unit: rows of the `destinations`, see start_of. size: rows of each in a group.
    """
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    column_blocks = tl.cdiv(width, BLOCK_N)
    tile = tl.program_id(0)
    while tile < tiles:
        group, source, target, rows, column_block = tile_at(
            tile, small, larger, unit, destinations, size, column_blocks, BLOCK_M, GROUP
        )
        right = column_block * BLOCK_N
        value = product(
            operands, source, rows, right, width - right, BLOCK_M, BLOCK_N, BLOCK_K, TMA
        )
        tl.store(
            out + (target + m).to(tl.int64)[:, None] * width + (right + n)[None, :],
            narrow(value, out.dtype.element_ty),
            mask=(m < rows)[:, None] & (right + n < width)[None, :],
        )
        tl.debug_barrier()  # one thread releases for the whole block
        tl.atomic_add(counters + group, 1, sem="release", scope="gpu")
        tile += tl.num_programs(0)


def linear_signalled(
    x: Tensor | Sequence[Tensor],
    w: Tensor | Sequence[Tensor],
    groups: RowGroups,
    out: Tensor,
    counters: Tensor,
    *,
    reserved: int = 0,
    tiling: Tiling | None = None,
) -> None:
    """Start the product of x [R, K] and w [N, K]; `counters` say which groups of `out` are complete.

    Args:
        x, w: of one dtype, float32, bfloat16 or float16; any strides. Or several x_i [R, K_i] and
            w_i [N, K_i], whose products are summed before they are rounded.
        groups: of the R rows.
        out: [R, N], contiguous: rows in the order of `groups`.
        counters: [len(groups)] int32, zero by now. That of group g comes to
            `groups.tiles(g, tiling.block_m, tiling.block_n, N)`.
        reserved: multiprocessors that are left to others.
        tiling: instead of `tiling_of(x, groups)`.

    Raises:
        ShapeError, UnsupportedError: before the launch.
    """
    xs, ws = pairs_of("linear_signalled", x, w, None)
    _check(xs[0], ws[0].shape[0], groups, out, counters)
    width = ws[0].shape[0]
    tiling = tiling or tiling_of(xs[0], groups)
    tiles = sum(
        groups.tiles(group, tiling.block_m, tiling.block_n, width) for group in range(len(groups))
    )
    if tiles == 0:
        return
    constants = tiling.constants(out.element_size())
    del constants["BLOCK"]  # of kernels that sum
    copy_context().run(
        with_scratch,
        multiply_by_groups[(min(tiles, programs_of(tiling, out.device, reserved)),)],
        operands(xs, ws),
        out,
        counters,
        *groups.division.scaled(1),
        groups.parts,
        min(groups.size, groups.division.most),
        tiles,
        width,
        **constants,
        TMA=tma(tiling, xs, ws),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        maxnreg=REGISTERS,
    )


def tiling_of(x: Tensor, groups: RowGroups) -> Tiling:
    """How the product of x [R, K] is cut by default."""
    return choose(x, min(groups.size, groups.division.most))


def programs_of(tiling: Tiling, device: torch.device, reserved: int) -> int:
    """One for each multiprocessor but `reserved` ones."""
    most = tiling.programs
    if device.type == "cuda":
        most = min(most, torch.cuda.get_device_properties(device).multi_processor_count)
    return max(1, most - reserved)


def _check(x: Tensor, width: int, groups: RowGroups, out: Tensor, counters: Tensor) -> None:
    check_device("linear_signalled", x.device)
    if x.dtype not in DTYPES:
        raise UnsupportedError(
            f"linear_signalled: {x.dtype}; supported are {', '.join(map(str, DTYPES))}"
        )
    if groups.total != x.shape[0]:
        raise ShapeError(f"linear_signalled: groups of {groups.total} rows, x has {x.shape[0]}")
    check_rows("linear_signalled", groups.total)
    for name, t, shape, dtype in (
        ("out", out, (groups.total, width), x.dtype),
        ("counters", counters, (len(groups),), torch.int32),
    ):
        if (tuple(t.shape), t.dtype, t.device) != (shape, dtype, x.device) or not t.is_contiguous():
            raise ShapeError(
                f"linear_signalled: {name} is {tuple(t.shape)} {t.dtype} on {t.device} with strides "
                f"{t.stride()}; expected {shape} {dtype} on {x.device}, contiguous"
            )
