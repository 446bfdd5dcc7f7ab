"""Products on Hopper (sm_90) whose result is sent, or whose rows arrive, while they go on.

The kernels are those of csrc/cuda/gemm_sm90 in the module `_cuda`, which is loaded when the first one runs.
Signatures and results are those of the Triton kernels of the same names in tp_kernels/kernels; what cannot be
loaded or stored here raises UnsupportedError before anything is launched, and Triton takes it.

    signalled_linear          in groups of rows, which a stream waits for one by one (linear_signalled)
    awaited_linear            of rows of all ranks, which copies bring (all_gather_linear)
    awaited_weight_gradient   the gradient that belongs to it (all_gather_weight_gradient)
    linear_reduce_scatter     summed over ranks, each rank its rows (linear_reduce_scatter)

`dtype` is bfloat16 or float16 throughout; sums are float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.layout import Division
from tp_kernels.comm.row_groups import RowGroups
from tp_kernels.comm.workspace import Workspace

from . import _products
from ._extension import extension, native_division, native_workspace, stream_on
from ._products import KERNELS, MOST, TYPES, Policy, Tile

if TYPE_CHECKING:
    from tp_kernels.kernels.workspace import Workspace as ForCopies  # has the barrier of the copies

COMMON_INNER = 4096  # taken for K where ranks that differ in it have to decide alike
WAY_OUT = "implementation='triton' takes it"
ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu", "relu")  # in the order of csrc/.../arguments.h


def multiprocessors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def signalled_obstacle(xs: Sequence[Tensor], ws: Sequence[Tensor]) -> str | None:
    """Why signalled_linear does not take x_i [M, K_i] and w_i [N, K_i], or None."""
    return _products.obstacle("signal", xs, ws)


def signalled_tile(xs: Sequence[Tensor], ws: Sequence[Tensor]) -> tuple[int, int]:
    """(block_m, block_n) of signalled_linear, whose tiles counters count."""
    tile = _tile("signal", xs, ws, xs[0].shape[0], ws[0].shape[0], multiprocessors(xs[0]))
    return tile.block_m, tile.block_n


def signalled_linear(
    xs: Sequence[Tensor],
    ws: Sequence[Tensor],
    groups: RowGroups,
    out: Tensor,
    counters: Tensor,
    *,
    reserved: int,
) -> None:
    """The sum of x_i w_i^T, group by group; every tile, when it is stored, adds 1 to its group's counter.

    Args:
        xs, ws: [M, K_i] and [N, K_i]; see signalled_obstacle.
        groups: of the M rows.
        out: [M, N] of the dtype of x, contiguous, in the order of the groups.
        counters: int32 [len(groups)], zero.
        reserved: multiprocessors that are left to others.

    Raises:
        ShapeError, UnsupportedError: before anything is launched.
    """
    where = "signalled_linear"
    _check_pairs(where, "signal", xs, ws)
    x, rows, width = xs[0], xs[0].shape[0], ws[0].shape[0]
    if groups.total != rows or out.shape != (rows, width) or counters.shape != (len(groups),):
        raise ShapeError(
            f"{where}: x is {tuple(x.shape)}, w {tuple(ws[0].shape)}, with {len(groups)} groups of "
            f"{groups.total} rows; out is {tuple(out.shape)}, counters {tuple(counters.shape)}"
        )
    if out.dtype != x.dtype or counters.dtype != torch.int32:
        raise UnsupportedError(f"{where}: out is {out.dtype}, counters are {counters.dtype}")
    if not (out.is_contiguous() and counters.is_contiguous()):
        raise UnsupportedError(f"{where}: out and counters have to be contiguous")
    tile = _tile("signal", xs, ws, rows, width, multiprocessors(x))
    tiles = sum(groups.tiles(g, tile.block_m, tile.block_n, width) for g in range(len(groups)))
    blocks = _blocks(where, tiles, multiprocessors(x) - reserved)
    with stream_on(where, x.device) as stream:
        extension().signalled_product(
            kind=_kind("signal", xs, ws, tile),
            pairs=_pairs("signal", xs, ws),
            out=out.data_ptr(),
            counters=counters.data_ptr(),
            width=width,
            division=native_division(extension(), groups.division),
            size=groups.size,
            parts=groups.parts,
            tiles=tiles,
            blocks=blocks,
            stream=stream,
        )


def awaited_linear(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    workspace: ForCopies,
    *,
    counts: Sequence[int] | None = None,
    bias: Tensor | Sequence[Tensor] | None = None,
    activation: str | None = None,
    gathered: Tensor | None = None,
    outs: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], Tensor]:
    """y_i = act(all_gather(x) w_i^T + b_i), rows brought by the copy engine. Collective.

    Arguments, results and errors are those of kernels.all_gather_linear with producer="copies", so the
    workspace needs staging memory for the rows of the rank that has most.
    """
    where = f"awaited_linear on rank {workspace.rank} of {workspace.world}"
    ws = [w] if isinstance(w, Tensor) else list(w)
    biases = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
    if not ws or (biases and len(biases) != len(ws)):
        raise ShapeError(f"{where}: {len(ws)} weights and {len(biases)} biases")
    if activation not in ACTIVATIONS:
        raise UnsupportedError(f"{where}: activation={activation!r}; known are {ACTIVATIONS}")
    division, gathered = _gathered(where, x, workspace, counts, gathered)
    rows = gathered.shape[0]
    for one, its_bias in zip(ws, biases, strict=False):
        _check_bias(where, one, its_bias)
    _check_pairs(where, "await_rows", [gathered] * len(ws), ws)
    ys = _results(where, x, [(rows, one.shape[0]) for one in ws], outs)
    columns = sum(y.shape[1] for y in ys)
    tile = _tile("await_rows", [gathered] * len(ws), ws, rows, columns, multiprocessors(x))
    across = sum(-(-y.shape[1] // tile.block_n) for y in ys)
    # Turns of the order of arrival, of which those of ranks with fewer rows are left out.
    tiles = workspace.world * (-(-division.most // tile.block_m) + 1) * across
    biases = [one.contiguous() for one in biases]  # copies have to live until the launch
    places = [
        (y.data_ptr(), biases[i].data_ptr() if biases else 0, rows, y.shape[1])
        for i, y in enumerate(ys)
    ]
    _await(
        where, "await_rows", [gathered] * len(ws), ws, tile, tiles, places, x, gathered, division,
        workspace, "all_gather_linear", ACTIVATIONS.index(activation), False,
    )  # fmt: skip
    return ys, gathered


def awaited_weight_gradient(
    x: Tensor,
    other: Tensor,
    workspace: ForCopies,
    *,
    counts: Sequence[int] | None = None,
    of_gathered: bool = False,
    out: Tensor | None = None,
    accumulate_into: Tensor | None = None,
    gathered: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """other^T all_gather(x) [N, K], with of_gathered all_gather(x)^T other [K, N]. Collective.

    Arguments, results and errors are those of kernels.all_gather_weight_gradient, with rows brought by the
    copy engine; accumulate_into is contiguous and of the dtype of x.
    """
    where = f"awaited_weight_gradient on rank {workspace.rank} of {workspace.world}"
    division, gathered = _gathered(where, x, workspace, counts, gathered)
    if other.dim() != 2 or other.shape[0] != gathered.shape[0]:
        raise ShapeError(
            f"{where}: other is {tuple(other.shape)}; expected [{gathered.shape[0]}, N]"
        )
    if out is not None and accumulate_into is not None:
        raise UnsupportedError(f"{where}: out and accumulate_into; give one of them")
    a, b = (gathered.t(), other.t()) if of_gathered else (other.t(), gathered.t())
    _check_pairs(where, "await_sum", [a], [b])
    shape = (a.shape[0], b.shape[0])
    given = out if accumulate_into is None else accumulate_into
    result = _results(where, x, [shape], None if given is None else [given])[0]
    tile = _tile("await_sum", [a], [b], *shape, multiprocessors(x))
    places = [(result.data_ptr(), 0, *shape)]
    _await(
        where, "await_sum", [a], [b], tile, _products.tiles_of(tile, *shape), places, x, gathered,
        division, workspace, "all_gather_weight_gradient", 0, accumulate_into is not None,
    )  # fmt: skip
    return result, gathered


def linear_reduce_scatter(
    x: Tensor | Sequence[Tensor],
    w: Tensor | Sequence[Tensor],
    workspace: Workspace,
    *,
    counts: Sequence[int] | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """This rank's rows of the sum over ranks and pairs of x_i w_i^T, plus bias. Collective.

    Arguments, result and errors are those of kernels.linear_reduce_scatter. All ranks have to decide for this
    kernel together, since tiles travel; K_i and layouts may differ between them.
    """
    where = f"linear_reduce_scatter on rank {workspace.rank} of {workspace.world}"
    xs = [x] if isinstance(x, Tensor) else list(x)
    ws = [w] if isinstance(w, Tensor) else list(w)
    _check_pairs(where, "send", xs, ws)
    _check_bias(where, ws[0], bias)
    bias = None if bias is None else bias.contiguous()
    _check_world(where, workspace)
    rows, width = xs[0].shape[0], ws[0].shape[0]
    division = workspace.rows_of_ranks("linear_reduce_scatter", counts, rows)
    mine = division.rows(workspace.rank)
    result = _results(where, xs[0], [(mine, width)], None if out is None else [out])[0]
    tile = send_tile(where, workspace, xs, ws, division.most, width)
    tiles = _products.tiles_of(tile, division.most, width)
    blocks = _blocks(where, tiles, workspace.shape.channels)
    with stream_on(where, result.device) as stream:
        extension().sent_products(
            kind=_kind("send", xs, ws, tile),
            pairs=_pairs("send", xs, ws),
            out=result.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            width=width,
            division=native_division(extension(), division),
            workspace=native_workspace(extension(), workspace, "linear_reduce_scatter"),
            blocks=blocks,
            stream=stream,
        )
    return result


def send_tile(
    where: str,
    workspace: Workspace,
    xs: Sequence[Tensor],
    ws: Sequence[Tensor],
    rows: int,
    width: int,
) -> Tile:
    """The tile of linear_reduce_scatter, of those that the chunks have room for.

    Equal on all ranks, so it does not depend on K, which may differ between them.
    """
    known = KERNELS["send", *_layouts("send", xs, ws)]
    fitting = [t for t in known if t.block_m * t.block_n * 2 <= workspace.shape.chunk]
    if not fitting or workspace.shape.depth < 2:
        raise UnsupportedError(
            f"{where}: {workspace.shape}; a tile needs chunk="
            f"{min(t.block_m * t.block_n * 2 for t in known)} and depth=2 or more"
        )
    return _products.choose(fitting, rows, width, COMMON_INNER, workspace.shape.channels)


def _await(
    where: str,
    policy: Policy,
    xs: Sequence[Tensor],
    ws: Sequence[Tensor],
    tile: Tile,
    tiles: int,
    places: list[tuple[int, int, int, int]],
    x: Tensor,
    gathered: Tensor,
    division: Division,
    workspace: ForCopies,
    operation: str,
    activation: int,
    add: bool,
) -> None:
    """Let copies bring the rows, and launch what waits for them."""
    from tp_kernels.kernels._copies import chunk_of, gathered_by_copies

    room = workspace.staging[0].numel() if workspace.staging else 0
    needed = division.most * gathered.shape[1] * x.element_size()
    if needed > room:
        raise UnsupportedError(
            f"{where}: needs {needed} bytes of staging memory, the workspace has {room}; {WAY_OUT}"
        )
    blocks = _blocks(where, tiles, min(multiprocessors(x), workspace.programs or MOST))
    part = chunk_of(division.most * gathered.shape[1], x.element_size())
    with (
        gathered_by_copies(workspace, x.contiguous(), gathered, division),
        stream_on(where, x.device) as stream,
    ):
        extension().awaited_products(
            kind=_kind(policy, xs, ws, tile),
            pairs=_pairs(policy, xs, ws),
            outs=places,
            workspace=native_workspace(extension(), workspace, operation),
            division=native_division(extension(), division),
            width=gathered.shape[1],
            part=part,
            channels=1,  # as copies have
            activation=activation,
            add=add,
            blocks=blocks,
            stream=stream,
        )


def _gathered(
    where: str,
    x: Tensor,
    workspace: Workspace,
    counts: Sequence[int] | None,
    gathered: Tensor | None,
) -> tuple[Division, Tensor]:
    """How rows are divided, and memory for those of all ranks."""
    _check_world(where, workspace)
    if x.dim() != 2:
        raise ShapeError(f"{where}: x is {tuple(x.shape)}; expected [R_r, K]")
    division = workspace.rows_of_ranks(where, counts or [x.shape[0]] * workspace.world)
    if division.rows(workspace.rank) != x.shape[0]:
        raise ShapeError(f"{where}: x has {x.shape[0]} rows, counts={list(counts or [])}")
    shape = (division.total(workspace.world), x.shape[1])
    return division, _results(where, x, [shape], None if gathered is None else [gathered])[0]


def _check_world(where: str, workspace: Workspace) -> None:
    if workspace.world < 2:
        raise UnsupportedError(f"{where}: there is nobody to exchange with; use torch's linear")


def _check_bias(where: str, w: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        return
    if bias.shape != w.shape[:1]:
        raise ShapeError(f"{where}: bias is {tuple(bias.shape)}; expected [{w.shape[0]}]")
    if (bias.dtype, bias.device) != (w.dtype, w.device):
        raise UnsupportedError(f"{where}: bias is {bias.dtype} on {bias.device}, w {w.dtype}")


def _check_pairs(where: str, policy: Policy, xs: Sequence[Tensor], ws: Sequence[Tensor]) -> None:
    """Refuse what is not x_i [M, K_i] and w_i [N, K_i] that a kernel takes, on a GPU."""
    if len(xs) != len(ws) or not xs:
        raise ShapeError(f"{where}: {len(xs)} times x and {len(ws)} times w; expected pairs")
    for x, w in zip(xs, ws, strict=True):
        if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
            raise ShapeError(
                f"{where}: x is {tuple(x.shape)}, w {tuple(w.shape)}; expected [M, K] and [N, K]"
            )
        if x.shape[0] != xs[0].shape[0] or (
            policy in ("send", "signal") and w.shape[0] != ws[0].shape[0]
        ):
            raise ShapeError(f"{where}: pairs have {x.shape[0]} and {xs[0].shape[0]} rows")
    if why := _products.obstacle(policy, xs, ws):
        raise UnsupportedError(f"{where}: {why}; {WAY_OUT}")
    for one in (*xs, *ws):
        if one.device != xs[0].device or not on_gpu(one):
            raise UnsupportedError(f"{where}: operands are on {xs[0].device} and {one.device}")


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _results(
    where: str, x: Tensor, shapes: Sequence[tuple[int, int]], outs: Sequence[Tensor] | None
) -> list[Tensor]:
    """`outs` if they can take results of these shapes, else new tensors like x."""
    if outs is None:
        return [x.new_empty(shape) for shape in shapes]
    for out, shape in zip(outs, shapes, strict=True):
        if out.shape != shape or out.dtype != x.dtype or out.device != x.device:
            raise ShapeError(
                f"{where}: a result {tuple(out.shape)} {out.dtype} on {out.device} is given, "
                f"{shape} {x.dtype} on {x.device} is needed"
            )
        if not out.is_contiguous():
            raise UnsupportedError(f"{where}: results have to be contiguous; {WAY_OUT}")
    return list(outs)


def _layouts(policy: Policy, xs: Sequence[Tensor], ws: Sequence[Tensor]) -> tuple[bool, bool]:
    found = _products.common(policy, xs, ws)
    assert found is not None  # else it was refused
    return found


def _tile(
    policy: Policy, xs: Sequence[Tensor], ws: Sequence[Tensor], rows: int, columns: int, most: int
) -> Tile:
    known = KERNELS[policy, *_layouts(policy, xs, ws)]
    return _products.choose(known, rows, columns, xs[0].shape[1], most)


def _blocks(where: str, tiles: int, most: int) -> int:
    """Of a launch, each of which takes a multiprocessor."""
    if tiles > MOST:
        raise UnsupportedError(f"{where}: {tiles} tiles, 2^31 or more; {WAY_OUT}")
    return max(1, min(tiles, most))


def _kind(policy: Policy, xs: Sequence[Tensor], ws: Sequence[Tensor], tile: Tile) -> Any:
    return extension().ProductKind(policy, TYPES[xs[0].dtype], *_layouts(policy, xs, ws), *tile)


def _pairs(policy: Policy, xs: Sequence[Tensor], ws: Sequence[Tensor]) -> list[Any]:
    module, k_major = extension(), _layouts(policy, xs, ws)

    def matrix(x: Tensor, by_k: bool) -> Any:
        pitch = _products.layout_as(x, by_k).pitch
        return module.ProductMatrix(x.data_ptr(), x.shape[0], x.shape[1], pitch)

    return [
        module.ProductPair(matrix(x, k_major[0]), matrix(w, k_major[1]))
        for x, w in zip(xs, ws, strict=True)
    ]
