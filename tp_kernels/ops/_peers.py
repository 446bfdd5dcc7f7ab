"""Implementation "cuda" between ranks that address each other's memory: kernels of tp_kernels.native.

Products on Hopper store tiles where their owner sums them, or begin before all rows have come. The sum of few
rows is a kernel of its own behind a plain product. `dispatch.direct_obstacle` says when, from what is equal
on all ranks; operands that only this rank cannot load (an odd width, none at all) are made loadable here,
since its peers have decided already.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tp_kernels import native
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.dispatch import direct_obstacle
from tp_kernels.native import gemm
from tp_kernels.native._products import MOST_PAIRS, TMA_BYTES, layouts_of

from ._gemm import partial_product, weight_gradients
from ._op import device_type
from ._workspace import agree, launch

LINE = TMA_BYTES // 2  # numbers of 16 bits that divide the distance of rows


def applies(
    operation: str, group: ParallelGroup, x: Tensor, counts: Sequence[int], width: int, pairs: int
) -> bool:
    """Whether `operation` on rows of `width` elements, `counts` for each rank, goes straight to the peers.

    pairs: of operands of one launch. Equal on all ranks, as are the other arguments.
    """
    rows = max(counts) * len(counts)
    obstacle = direct_obstacle(operation, group, rows, width, x.dtype, device_type(x))
    return obstacle is None and rows * width > 0 and pairs <= MOST_PAIRS


def all_reduce(
    group: ParallelGroup, xs: Sequence[Tensor], ws: Sequence[Tensor], bias: Tensor | None
) -> Tensor:
    """See gemm_all_reduce.py."""
    agree(group, "linear_all_reduce", xs[0], ws[0].shape[0], [xs[0].shape[0]])
    partial = partial_product(xs, ws)
    return launch(group, partial, "all_reduce", partial, module=native, out=partial, bias=bias)


def linear_norm(
    group: ParallelGroup,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """(y, s) [M, N] of x [M, K] and w [N, K]; see all_reduce_rms_norm.py."""
    # Another name than that of `all_reduce`: a rank that wants a gradient makes other rounds.
    agree(group, "all_reduce_rms_norm", x, w.shape[0], [x.shape[0]])
    partial = partial_product([x], [w])
    # These do not pass `prepare`.
    residual = None if residual is None else residual.resolve_neg().reshape(partial.shape)
    weight = weight.resolve_neg()
    options = {"bias": bias, "residual": residual, "epsilon": epsilon}
    return launch(group, partial, "all_reduce_rms_norm", partial, weight, module=native, **options)


def reduce_scatter(
    group: ParallelGroup,
    xs: Sequence[Tensor],
    ws: Sequence[Tensor],
    bias: Tensor | None,
    counts: Sequence[int],
) -> Tensor:
    """See gemm_reduce_scatter.py."""
    agree(group, "linear_reduce_scatter", xs[0], ws[0].shape[0], counts)
    xs, ws = [_loadable(x) for x in xs], _loadable_weights(ws)
    return launch(
        group, xs[0], "linear_reduce_scatter", xs, ws, module=gemm, counts=counts, bias=bias
    )


def all_gather(
    group: ParallelGroup,
    x: Tensor,
    ws: Sequence[Tensor],
    biases: Sequence[Tensor],
    counts: Sequence[int],
) -> tuple[list[Tensor], Tensor]:
    """See all_gather_gemm.py."""
    agree(group, "all_gather_linear", x, x.shape[1], counts)
    used = _loadable_weights([_nonempty(w) for w in ws or [x.new_empty(0, x.shape[1])]])
    added = [_nonempty(b) for b in biases] or None
    options = {"counts": counts, "bias": added}
    ys, gathered = launch(group, x, "awaited_linear", x, used, module=gemm, **options)
    outs = [  # no views: autograd would forbid to write to them
        y if w.shape[0] else y.new_empty(y.shape[0], 0) for y, w in zip(ys, ws, strict=False)
    ]
    return outs, gathered


def weight_gradients_of_gathered(
    group: ParallelGroup,
    dys: Sequence[Tensor],
    x: Tensor,
    counts: Sequence[int],
    needed: Sequence[bool],
) -> list[Tensor]:
    """See all_gather_gemm.triton_weight_gradients."""
    agree(group, "all_gather_weight_gradient", x, x.shape[1], counts)
    first = list(needed).index(True)
    dy = dys[first]
    used = _loadable(dy if dy.shape[1] else dy.new_zeros(dy.shape[0], 1))
    dw, gathered = launch(group, x, "awaited_weight_gradient", x, used, module=gemm, counts=counts)
    others = [need and index != first for index, need in enumerate(needed)]
    dws = weight_gradients(dys, gathered, others)
    dws[first] = dw if dy.shape[1] else dw.new_empty(0, dw.shape[1])
    return dws


def _loadable(x: Tensor) -> Tensor:
    """`x` [rows, columns] as kernels load rows: a copy that begins each on 16 bytes, if it is none yet."""
    rows, columns = x.shape
    if columns == 0:
        return x.new_zeros(rows, LINE)
    if any(layout.k_major for layout in layouts_of(x)):
        return x
    wide = x.new_empty(rows, -(-columns // LINE) * LINE)
    return wide[:, :columns].copy_(x)


def _loadable_weights(ws: Sequence[Tensor]) -> list[Tensor]:
    """`ws` all loadable alike: as they are if all are transposed."""
    if all(w.numel() and any(not layout.k_major for layout in layouts_of(w)) for w in ws):
        return list(ws)
    return [_loadable(w) for w in ws]


def _nonempty(w: Tensor) -> Tensor:
    """`w`, or one row of zeros for none: a rank without features still gathers with the others."""
    return w if w.shape[0] else w.new_zeros(1, *w.shape[1:])
