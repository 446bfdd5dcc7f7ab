"""all_gather_linear: y = all_gather(x) W^T + b, the opening product under sequence parallelism.

Dual: dx = reduce_scatter(dy W), hidden under dW = dy^T all_gather(x); the gathered x is kept from the
forward or gathered again in the backward, as asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from tp_kernels.comm.collectives import all_gather, row_counts
from tp_kernels.comm.errors import UnsupportedError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.dispatch import choose

from . import _peers, all_gather_gemm, gemm_reduce_scatter
from ._gemm import linear_layers, partial_product, weight_gradients
from ._op import (
    ACTIVATIONS,
    SHORT,
    activated,
    bias_gradient,
    check_call,
    device_type,
    direct,
    diverted,
    finish,
    needed,
    prepare,
    register,
    rows_of,
    run,
    transposed,
)
from ._weight_gradient import Diverted, WeightGradientQueue, elsewhere, uncompiled


def all_gather_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    group: ParallelGroup,
    rows: int | None = None,
    activation: str | None = None,
    gathered: str = "keep",
    implementation: str = "auto",
    delay: Sequence[WeightGradientQueue] | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Product whose output features are spread over the ranks, of rows that are spread too.

    Args:
        x: [R_r, ..., K], this rank's rows: R_r = split_sizes(rows, W)[rank]; any number, also zero.
        weight: [N_r, K], this rank's rows of the unsplit weight; or several (Q, K, V; gate, up), which
            then share one gather and one reduce-scatter.
        bias: [N_r] (or one per weight), this rank's part.
        rows: R, the rows of all ranks; default: every rank holds as many as this one.
        activation: applied to every output.
        gathered: "keep" holds all_gather(x) for the weight gradient; "redo" gathers again in the
            backward, which saves (W-1)/W of that memory.
        implementation: "auto", or one of "reference", "chunked", "host", "triton", "cuda".
        delay: a queue per weight; the backward leaves the gradients of weights and biases there. With
            "redo" the gather is left for later, too: all ranks have to ask for the gradients.

    A weight with a `main_grad` gets its gradient added there, and none from autograd.

    Returns:
        [R, ..., N_r], or a tuple of them for several weights.
    """
    if gathered not in ("keep", "redo"):
        raise UnsupportedError(f"all_gather_linear: gathered={gathered!r}; use 'keep' or 'redo'")
    if (
        not is_compiling()
        and implementation in SHORT
        and activation in ACTIVATIONS
        and type(group) is ParallelGroup
    ):
        short = group.short.all_gather_linear(x, weight, bias, rows)
        if short is not None:
            return activated(short, activation)
    group = check_call("all_gather_linear", group, implementation)
    single, own = isinstance(weight, Tensor), None
    if elsewhere(weight, delay):
        if is_compiling():
            return uncompiled(
                all_gather_linear,
                x,
                weight,
                bias,
                group=group,
                rows=rows,
                gathered=gathered,
                activation=activation,
                implementation=implementation,
                delay=delay,
            )
        own = Diverted("all_gather_linear", weight, bias, delay)
        weight, bias = own.operands, own.bias_operands
    x, weights, biases = prepare("all_gather_linear", group, x, weight, bias, activation)
    flat = rows_of(x)
    sizes = row_counts("all_gather_linear", flat if x.dim() == 1 else x, group, rows)
    inner = x.shape[1:-1].numel()
    counts = [size * inner for size in sizes]
    recorded = bool(own) or not direct(flat, *weights, *biases)
    keep = gathered == "keep" and group.size > 1 and recorded
    ys = _op(flat, weights, biases, counts, keep, group.name, implementation, diverted=own)
    ys = ys[:-1] if keep else ys
    leading = (sum(sizes), *x.shape[1:-1])
    outs = tuple(finish(y, leading, activation) for y in ys)
    return outs[0] if single else outs


def dense(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """What the ranks compute together, on one process with unsplit tensors."""
    return linear_layers(x, weights, biases)


def _forward(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    counts: list[int],
    keep: bool,
    group_name: str,
    impl: str,
) -> list[Tensor]:
    """[y_0, y_1, ...], and the gathered x last if `keep`."""
    group = ParallelGroup.by_name(group_name)
    if group.size == 1:
        return group.run("all_gather_linear", "reference", dense, x, weights, biases)
    ys, full = run(
        "all_gather_linear",
        all_gather_gemm.IMPLEMENTATIONS,
        group,
        impl,
        sum(counts),
        x.shape[1],
        x,
        x,
        weights,
        biases,
        counts,
        keep,
    )
    return [*ys, full] if keep else ys


def _fake(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    counts: list[int],
    keep: bool,
    group_name: str,
    impl: str,
) -> list[Tensor]:
    ys = [x.new_empty(sum(counts), w.shape[0]) for w in weights]
    return [*ys, x.new_empty(sum(counts), x.shape[1])] if keep else ys


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, ctx.counts, ctx.keep, ctx.group_name, ctx.impl = inputs
    if ctx.keep:
        ctx.mark_non_differentiable(output[-1])
    ctx.save_for_backward(output[-1] if ctx.keep else x, *weights)
    ctx.with_bias = bool(biases)


def _backward(ctx: Any, dys: list[Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    need_x, need_w, need_b = needed(ctx)[:3]
    rows = sum(ctx.counts)
    dys = [
        x.new_zeros(rows, w.shape[0]) if dy is None else dy.resolve_neg()
        for dy, w in zip(dys, weights, strict=False)
    ]
    own, name, impl = diverted(ctx), ctx.group_name, ctx.impl
    given = (dys, x, weights, ctx.counts, ctx.keep, need_x)
    if not own:
        dx, *dws = _backward_op(*given, list(need_w), name, impl)
    else:
        dx, *dws = _backward_kernel(*given, own.now(need_w), name, impl, own.main_grads())
        group, counts, kept = ParallelGroup.by_name(name), ctx.counts, ctx.keep

        def later(asked: Sequence[bool], main_grads: Sequence[Tensor | None]) -> list[Tensor]:
            whole, done = _whole_input(group, dys, x, counts, kept, asked, main_grads, impl)
            return done or weight_gradients(dys, whole, asked, main_grads)

        own.later(later, x, dys)
        dws = own.answers(dws, need_w)
    dbs = [bias_gradient(dy) if need else None for dy, need in zip(dys, need_b, strict=False)]
    return (
        dx if need_x else None,
        [dw if need else None for dw, need in zip(dws, need_w, strict=True)],
        dbs,
        None,
        None,
        None,
        None,
    )


def _backward_kernel(
    dys: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    counts: list[int],
    kept: bool,
    need_x: bool,
    need_w: list[bool],
    group_name: str,
    impl: str,
    main_grads: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """[dx, dW_0, ...]; x is the gathered input if `kept`, else this rank's rows."""
    group = ParallelGroup.by_name(group_name)
    x, dws = _whole_input(group, dys, x, counts, kept, need_w, main_grads, impl)

    def between() -> None:
        if not dws:
            dws.extend(weight_gradients(dys, x, need_w, main_grads))

    if not need_x or group.size == 1:
        between()
        dx = partial_product(dys, transposed(weights)) if need_x else dys[0].new_empty(0)
        return [dx, *dws]
    dx = run(
        "all_gather_linear.backward",
        gemm_reduce_scatter.IMPLEMENTATIONS,
        group,
        impl,
        sum(counts),
        weights[0].shape[1],
        dys[0],
        dys,
        transposed(weights),
        None,
        counts,
        between,
    )
    return [dx, *dws]


def _whole_input(
    group: ParallelGroup,
    dys: Sequence[Tensor],
    x: Tensor,
    counts: Sequence[int],
    kept: bool,
    need_w: Sequence[bool],
    main_grads: Sequence[Tensor | None] | None,
    impl: str,
) -> tuple[Tensor, list[Tensor]]:
    """x of all ranks if a weight gradient needs it; and all of these, if the gather was hidden under them."""
    if kept or group.size == 1 or not any(need_w):
        return x, []
    operation = "all_gather_linear.backward"
    choice = choose(operation, group, sum(counts), x.shape[1], x.dtype, device_type(x), impl)
    if choice.implementation == "triton":
        function = all_gather_gemm.triton_weight_gradients
        given = (group, dys, x, counts, need_w, main_grads)
        return x, group.run(operation, "triton", function, *given)
    # It has no product of 16-bit numbers that it adds to wider ones.
    if (
        choice.implementation == "cuda"
        and not any(main is not None for main in main_grads or ())
        and _peers.applies("all_gather_linear", group, x, counts, x.shape[1], 1)
    ):
        hidden = _peers.weight_gradients_of_gathered
        return x, group.run(operation, "cuda", hidden, group, dys, x, counts, need_w)
    return all_gather(x, group, counts=counts), []


def _backward_fake(
    dys: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    counts: list[int],
    kept: bool,
    need_x: bool,
    need_w: list[bool],
    group_name: str,
    impl: str,
) -> list[Tensor]:
    mine = counts[ParallelGroup.by_name(group_name).rank]
    dx = dys[0].new_empty(mine, weights[0].shape[1]) if need_x else dys[0].new_empty(0)
    return [dx] + [
        w.new_empty(w.shape if need else (0,)) for w, need in zip(weights, need_w, strict=True)
    ]


_backward_op = register(
    "all_gather_linear_backward",
    "(Tensor[] dys, Tensor x, Tensor[] weights, SymInt[] counts, bool kept, bool need_x, "
    "bool[] need_w, str group, str implementation) -> Tensor[]",
    _backward_kernel,
    _backward_fake,
)
_op = register(
    "all_gather_linear",
    "(Tensor x, Tensor[] weights, Tensor[] biases, SymInt[] counts, bool keep, str group, "
    "str implementation) -> Tensor[]",
    _forward,
    _fake,
    _setup,
    _backward,
)
