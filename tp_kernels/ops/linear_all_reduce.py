"""linear_all_reduce: y = all_reduce(x W^T) + b, the closing product of a tensor-parallel block.

Dual: the backward communicates nothing (dx = dy W, dW = dy^T x); `copy_linear` communicates there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tp_kernels.comm.group import ParallelGroup

from . import gemm_all_reduce
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


def linear_all_reduce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: ParallelGroup,
    activation: str | None = None,
    implementation: str = "auto",
    delay: WeightGradientQueue | None = None,
) -> Tensor:
    """Product whose input features are spread over the ranks, summed on all of them.

    Args:
        x: [..., K_r], this rank's input features; the same leading shape on every rank.
        weight: [N, K_r], this rank's columns of the unsplit [N, K] weight.
        bias: [N], equal on all ranks, added once.
        activation: "gelu", "gelu_tanh", "silu" or "relu", applied to the sum.
        implementation: "auto", or one of "reference", "chunked", "host", "triton", "cuda".
        delay: where the backward leaves the gradients of weight and bias, to be computed later.

    A weight with a `main_grad` gets its gradient added there, and none from autograd.

    Returns:
        [..., N], the same bits on every rank. dtype of x: float32, bfloat16, float16 (float64 through
        the process group). Summed in fp32 in rank order, rounded once.

    Raises:
        ShapeError, UnsupportedError: before anything is sent.
        GroupMismatchError, CollectiveTimeoutError, PeerLostError: naming the rank concerned.
    """
    if (
        not is_compiling()
        and implementation in SHORT
        and activation in ACTIVATIONS
        and type(group) is ParallelGroup
    ):
        y = group.short.linear_all_reduce(x, weight, bias)
        if y is not None:
            return y if activation is None else activate(y, activation)
    group = check_call("linear_all_reduce", group, implementation)
    own = None
    if elsewhere(weight, delay):
        if is_compiling():
            return uncompiled(
                linear_all_reduce,
                x,
                weight,
                bias,
                group=group,
                activation=activation,
                implementation=implementation,
                delay=delay,
            )
        own = Diverted("linear_all_reduce", weight, bias, delay)
        (weight,), (bias,) = own.operands, own.bias_operands or [None]
    x, (w,), biases = prepare("linear_all_reduce", group, x, weight, bias, activation)
    rows, b = rows_of(x), biases[0] if biases else None
    y = _op(rows, w, b, group.name, implementation, diverted=own)
    return finish(y, x.shape[:-1], activation)


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What the op computes, on one process with unsplit tensors."""
    return torch.nn.functional.linear(x, weight, bias)


def _forward(x: Tensor, w: Tensor, bias: Tensor | None, group_name: str, impl: str) -> Tensor:
    return _run(ParallelGroup.by_name(group_name), x, w, bias, impl)


def _run(group: ParallelGroup, x: Tensor, w: Tensor, bias: Tensor | None, impl: str) -> Tensor:
    if group.size == 1:
        return group.run("linear_all_reduce", "reference", dense, x, w, bias)
    return run(
        "linear_all_reduce",
        gemm_all_reduce.IMPLEMENTATIONS,
        group,
        impl,
        x.shape[0],
        w.shape[0],
        x,
        [x],
        [w],
        bias,
    )


def _fake(x: Tensor, w: Tensor, bias: Tensor | None, group_name: str, impl: str) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, bias, _, _ = inputs
    need_x, need_w = needed(ctx)[:2]
    own = diverted(ctx)
    need_w = need_w or bool(own and own.weights[0] is not None)
    ctx.save_for_backward(x if need_w else None, w if need_x else None)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    need_x, need_w, need_b = needed(ctx)[:3]
    dx = torch.mm(dy, w) if need_x else None
    own = diverted(ctx)
    if not own:
        dw = torch.mm(dy.t(), x) if need_w else None
    else:
        dws = weight_gradients([dy], x, own.now([need_w]), own.main_grads())
        own.later(lambda *asked: weight_gradients([dy], x, *asked), x, [dy])
        (dw,) = own.answers(dws, [need_w])
    db = bias_gradient(dy) if ctx.has_bias and need_b else None
    return dx, dw, db, None, None


_op = register(
    "linear_all_reduce",
    "(Tensor x, Tensor weight, Tensor? bias, str group, str implementation) -> Tensor",
    _forward,
    _fake,
    _setup,
    _backward,
)
