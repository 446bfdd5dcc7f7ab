"""copy_linear: y = x W^T + b with x equal on all ranks, the opening product of a tensor-parallel block.

Dual: the forward communicates nothing; the backward is dx = all_reduce(dy W), hidden under dW = dy^T x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from tp_kernels.comm.group import ParallelGroup

from . import gemm_all_reduce
from ._gemm import linear_layers, partial_product, products, weight_gradients
from ._op import (
    ACTIVATIONS,
    SHORT,
    activated,
    bias_gradient,
    check_call,
    diverted,
    needed,
    prepare,
    register,
    rows_of,
    run,
    transposed,
)
from ._weight_gradient import Diverted, WeightGradientQueue, elsewhere, uncompiled


def copy_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    group: ParallelGroup,
    activation: str | None = None,
    implementation: str = "auto",
    delay: Sequence[WeightGradientQueue] | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Product whose output features are spread over the ranks, of an input that all ranks hold.

    Args:
        x: [..., K], equal on all ranks.
        weight: [N_r, K], this rank's rows of the unsplit weight; or several (Q, K, V; gate, up), which
            then share one collective in the backward.
        bias: [N_r] (or one per weight), this rank's part.
        activation: applied to every output.
        implementation: "auto", or one of "reference", "chunked", "host", "triton", "cuda"; it matters in
            the backward.
        delay: a queue per weight; the backward leaves the gradients of weights and biases there.

    A weight with a `main_grad` gets its gradient added there, and none from autograd.

    Returns:
        [..., N_r], or a tuple of them for several weights. The gradient of x has equal bits on all ranks.
    """
    if (
        not is_compiling()
        and implementation in SHORT
        and activation in ACTIVATIONS
        and type(group) is ParallelGroup
    ):
        short = group.short.copy_linear(x, weight, bias)
        if short is not None:
            return activated(short, activation)
    group = check_call("copy_linear", group, implementation)
    single, own = isinstance(weight, Tensor), None
    if elsewhere(weight, delay):
        if is_compiling():
            return uncompiled(
                copy_linear,
                x,
                weight,
                bias,
                group=group,
                activation=activation,
                implementation=implementation,
                delay=delay,
            )
        own = Diverted("copy_linear", weight, bias, delay)
        weight, bias = own.operands, own.bias_operands
    x, weights, biases = prepare("copy_linear", group, x, weight, bias, activation)
    ys = tuple(_op(x, weights, biases, group.name, implementation, diverted=own))
    return activated(ys[0] if single else ys, activation)


def _forward(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], group_name: str, impl: str
) -> list[Tensor]:
    group = ParallelGroup.by_name(group_name)
    function = dense if group.size == 1 else products
    return group.run("copy_linear", "local", function, x, weights, biases)


def dense(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """What the op computes on one process with unsplit weights."""
    return linear_layers(x, weights, biases)


def _fake(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], group_name: str, impl: str
) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], w.shape[0]) for w in weights]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, ctx.group_name, ctx.impl = inputs
    ctx.save_for_backward(x, *weights)
    ctx.count, ctx.with_bias = len(weights), bool(biases)


def _backward(ctx: Any, dys: list[Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    need_x, need_w, need_b = needed(ctx)[:3]
    dys = [
        x.new_zeros(*x.shape[:-1], w.shape[0]) if dy is None else dy.resolve_neg()
        for dy, w in zip(dys, weights, strict=True)
    ]
    own, rest = diverted(ctx), (ctx.group_name, ctx.impl)
    if not own:
        dx, *dws = _backward_op(dys, x, weights, need_x, list(need_w), *rest)
    else:
        now = own.now(need_w)
        dx, *dws = _backward_kernel(dys, x, weights, need_x, now, *rest, own.main_grads())
        rows = [rows_of(dy) for dy in dys]
        own.later(lambda *asked: weight_gradients(rows, rows_of(x), *asked), x, rows)
        dws = own.answers(dws, need_w)
    dbs = [
        bias_gradient(rows_of(dy)) if need else None for dy, need in zip(dys, need_b, strict=False)
    ]
    return (
        dx if need_x else None,
        [dw if need else None for dw, need in zip(dws, need_w, strict=True)],
        dbs,
        None,
        None,
    )


def _backward_kernel(
    dys: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    need_x: bool,
    need_w: list[bool],
    group_name: str,
    impl: str,
    main_grads: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """[dx, dW_0, dW_1, ...]; what is not needed is an empty tensor."""
    group = ParallelGroup.by_name(group_name)
    rows, dys = rows_of(x), [rows_of(dy) for dy in dys]
    dws: list[Tensor] = []

    def between() -> None:
        dws.extend(weight_gradients(dys, rows, need_w, main_grads))

    if not need_x or group.size == 1:
        between()
        dx = partial_product(dys, transposed(weights)).view(x.shape) if need_x else x.new_empty(0)
        return [dx, *dws]
    dx = run(
        "copy_linear.backward",
        gemm_all_reduce.IMPLEMENTATIONS,
        group,
        impl,
        rows.shape[0],
        rows.shape[1],
        x,
        dys,
        transposed(weights),
        None,
        between,
    )
    return [dx.view(x.shape), *dws]


def _backward_fake(
    dys: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    need_x: bool,
    need_w: list[bool],
    group_name: str,
    impl: str,
) -> list[Tensor]:
    dx = x.new_empty(x.shape if need_x else (0,))
    return [dx] + [
        w.new_empty(w.shape if need else (0,)) for w, need in zip(weights, need_w, strict=True)
    ]


_backward_op = register(
    "copy_linear_backward",
    "(Tensor[] dys, Tensor x, Tensor[] weights, bool need_x, bool[] need_w, str group, "
    "str implementation) -> Tensor[]",
    _backward_kernel,
    _backward_fake,
)
_op = register(
    "copy_linear",
    "(Tensor x, Tensor[] weights, Tensor[] biases, str group, str implementation) -> Tensor[]",
    _forward,
    _fake,
    _setup,
    _backward,
)
