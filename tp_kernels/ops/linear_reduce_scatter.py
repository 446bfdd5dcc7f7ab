"""linear_reduce_scatter: y = reduce_scatter(x W^T) + b, the closing product under sequence parallelism.

Dual: dx = all_gather(dy) W, and dW = all_gather(dy)^T x from the same gathered dy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.layout import split_sizes

from . import all_gather_gemm, gemm_reduce_scatter
from ._gemm import weight_gradients
from ._op import (
    ACTIVATIONS,
    SHORT,
    activate,
    bias_gradient,
    check_call,
    diverted,
    finish,
    needed,
    prepare,
    register,
    rows_of,
    run,
)
from ._weight_gradient import Diverted, WeightGradientQueue, elsewhere, uncompiled


def linear_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: ParallelGroup,
    activation: str | None = None,
    implementation: str = "auto",
    delay: WeightGradientQueue | None = None,
) -> Tensor:
    """Product whose input features are spread over the ranks; each rank keeps its rows of the sum.

    Args:
        x: [R, ..., K_r], this rank's input features of all R rows (the first dimension; any number).
        weight: [N, K_r], this rank's columns of the unsplit [N, K] weight.
        bias: [N], equal on all ranks, added once to every row. Its gradient is complete on every rank.
        activation: applied to the sum.
        implementation: "auto", or one of "reference", "chunked", "host", "triton", "cuda".
        delay: where the backward leaves the gradients of weight and bias, to be computed later; until then
            the gathered gradient is kept.

    A weight with a `main_grad` gets its gradient added there, and none from autograd.

    Returns:
        [split_sizes(R, W)[rank], ..., N]. Summed in fp32 in rank order, rounded once.
    """
    if (
        not is_compiling()
        and implementation in SHORT
        and activation in ACTIVATIONS
        and type(group) is ParallelGroup
    ):
        y = group.short.linear_reduce_scatter(x, weight, bias)
        if y is not None:
            return y if activation is None else activate(y, activation)
    group = check_call("linear_reduce_scatter", group, implementation)
    own = None
    if elsewhere(weight, delay):
        if is_compiling():
            return uncompiled(
                linear_reduce_scatter,
                x,
                weight,
                bias,
                group=group,
                activation=activation,
                implementation=implementation,
                delay=delay,
            )
        own = Diverted("linear_reduce_scatter", weight, bias, delay)
        (weight,), (bias,) = own.operands, own.bias_operands or [None]
    x, (w,), biases = prepare("linear_reduce_scatter", group, x, weight, bias, activation)
    rows, b = rows_of(x), biases[0] if biases else None
    first = x.shape[0] if x.dim() > 1 else 1
    inner = x.shape[1:-1].numel()
    sizes = split_sizes(first, group.size)
    counts = [size * inner for size in sizes]
    y = _op(rows, w, b, counts, group.name, implementation, diverted=own)
    return finish(y, (sizes[group.rank], *x.shape[1:-1]), activation)


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What the ranks compute together, on one process with unsplit tensors."""
    return torch.nn.functional.linear(x, weight, bias)


def _forward(
    x: Tensor, w: Tensor, bias: Tensor | None, counts: list[int], group_name: str, impl: str
) -> Tensor:
    group = ParallelGroup.by_name(group_name)
    if group.size == 1:
        return group.run("linear_reduce_scatter", "reference", dense, x, w, bias)
    return run(
        "linear_reduce_scatter",
        gemm_reduce_scatter.IMPLEMENTATIONS,
        group,
        impl,
        x.shape[0],
        w.shape[0],
        x,
        [x],
        [w],
        bias,
        counts,
    )


def _fake(
    x: Tensor, w: Tensor, bias: Tensor | None, counts: list[int], group_name: str, impl: str
) -> Tensor:
    return x.new_empty(counts[ParallelGroup.by_name(group_name).rank], w.shape[0])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, bias, ctx.counts, ctx.group_name, ctx.impl = inputs
    ctx.save_for_backward(x, w)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    need_x, need_w, need_b = needed(ctx)[:3]
    dy = dy.resolve_neg()  # kernels see memory only
    need_b = ctx.has_bias and need_b
    own, rest = diverted(ctx), (ctx.group_name, ctx.impl)
    if not own:
        dx, dw, db = _backward_op(dy, x, w, ctx.counts, need_x, need_w, need_b, *rest)
    else:
        dx, gathered = _gathered(dy, w, ctx.counts, need_x, *rest)
        db = bias_gradient(gathered) if need_b else None
        dws = weight_gradients([gathered], x, own.now([need_w]), own.main_grads())
        own.later(lambda *asked: weight_gradients([gathered], x, *asked), x, [gathered])
        (dw,) = own.answers(dws, [need_w])
    return (
        dx if need_x else None,
        dw if need_w else None,
        db if need_b else None,
        None,
        None,
        None,
    )


def _backward_kernel(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    counts: list[int],
    need_x: bool,
    need_w: bool,
    need_b: bool,
    group_name: str,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    empty = x.new_empty(0)
    if not (need_x or need_w or need_b):
        return empty, empty.clone(), empty.clone()
    dx, gathered = _gathered(dy, w, counts, need_x, group_name, impl)
    return (
        empty if dx is None else dx,
        torch.mm(gathered.t(), x) if need_w else empty.clone(),
        bias_gradient(gathered) if need_b else empty.clone(),
    )


def _gathered(
    dy: Tensor, w: Tensor, counts: list[int], need_x: bool, group_name: str, impl: str
) -> tuple[Tensor | None, Tensor]:
    """dx if needed, and dy of all ranks."""
    group = ParallelGroup.by_name(group_name)
    if group.size == 1:
        return torch.mm(dy, w) if need_x else None, dy
    dxs, gathered = run(
        "linear_reduce_scatter.backward",
        all_gather_gemm.IMPLEMENTATIONS,
        group,
        impl,
        sum(counts),
        dy.shape[1],
        dy,
        dy,
        [w.t()] if need_x else [],
        [],
        counts,
        True,
    )
    return dxs[0] if need_x else None, gathered


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    counts: list[int],
    need_x: bool,
    need_w: bool,
    need_b: bool,
    group_name: str,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape if need_x else (0,)),
        w.new_empty(w.shape if need_w else (0,)),
        w.new_empty(w.shape[:1] if need_b else (0,)),
    )


_backward_op = register(
    "linear_reduce_scatter_backward",
    "(Tensor dy, Tensor x, Tensor weight, SymInt[] counts, bool need_x, bool need_w, bool need_b, "
    "str group, str implementation) -> (Tensor, Tensor, Tensor)",
    _backward_kernel,
    _backward_fake,
)
_op = register(
    "linear_reduce_scatter",
    "(Tensor x, Tensor weight, Tensor? bias, SymInt[] counts, str group, str implementation) "
    "-> Tensor",
    _forward,
    _fake,
    _setup,
    _backward,
)
