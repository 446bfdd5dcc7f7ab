"""gated, swiglu, geglu (Shazeer, 2020): an activation of one half of a projection times the other half.

    y = round(act(gate) * up)
    d_up = round(dy * act(gate)),  d_gate = round(dy * up * act'(gate))

In float32 (float64 for float64), rounded once. gate and up are all that backward keeps: the activation is
computed again. Nothing is communicated: under tensor parallelism gate and up are split alike.

Without gradients on the CPU, silu takes the short way of elementwise.py, which in 16-bit dtypes rounds the
activation as well, as transformers does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tp_kernels.comm.errors import ShapeError, UnsupportedError

from . import elementwise
from ._local import blocks, check_rows, choose_local, widen
from ._op import direct, register, rows_of

aten = torch.ops.aten

GATES = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


def gated(
    gate: Tensor, up: Tensor, activation: str = "silu", *, implementation: str = "auto"
) -> Tensor:
    """act(gate) * up.

    Args:
        gate, up: [...], of one shape and dtype (floating), any strides.
        activation: "silu", "gelu", "gelu_tanh", "relu" or "relu2" (the square of relu).
        implementation: "auto", "reference" or "triton", see _local.py.

    Returns:
        y like gate, contiguous.

    Raises:
        ShapeError: gate and up differ in shape or dtype.
        UnsupportedError: of dtypes, devices and activations.
    """
    check_rows("gated", gate, up=up)
    if gate.dtype != up.dtype:
        raise ShapeError(f"gated: gate is {gate.dtype}, up {up.dtype}; expected one dtype")
    if activation not in GATES:
        raise UnsupportedError(
            f"gated: activation={activation!r}; known are {', '.join(map(repr, GATES))}"
        )
    if activation == "silu" and implementation == "auto" and gate.is_cpu and direct(gate, up):
        return elementwise.swiglu(gate, up)
    return _op(gate, up, activation, implementation)


def swiglu(gate: Tensor, up: Tensor, *, implementation: str = "auto") -> Tensor:
    """silu(gate) * up; see `gated`."""
    return gated(gate, up, "silu", implementation=implementation)


def geglu(
    gate: Tensor, up: Tensor, approximate: str = "none", *, implementation: str = "auto"
) -> Tensor:
    """gelu(gate) * up, `approximate` as in torch's gelu; see `gated`."""
    if approximate not in ("none", "tanh"):
        raise UnsupportedError(f"geglu: approximate={approximate!r}; use 'none' or 'tanh'")
    form = "gelu_tanh" if approximate == "tanh" else "gelu"
    return gated(gate, up, form, implementation=implementation)


def _active(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(x)
    if activation == "relu":
        return x.relu()
    if activation == "relu2":
        return x.relu().square_()
    form = "tanh" if activation == "gelu_tanh" else "none"
    return torch.nn.functional.gelu(x, approximate=form)


def _through(dy: Tensor, x: Tensor, activation: str) -> Tensor:
    """dy * act'(x)."""
    if activation == "silu":
        return aten.silu_backward(dy, x)
    if activation == "relu":
        return torch.where(x > 0, dy, 0)
    if activation == "relu2":
        return dy * x.relu().mul_(2)
    form = "tanh" if activation == "gelu_tanh" else "none"
    return aten.gelu_backward(dy, x, approximate=form)


def _kernel(gate: Tensor, up: Tensor, activation: str, implementation: str) -> Tensor:
    if choose_local("gated", gate, implementation) == "triton":
        from tp_kernels.kernels.gated import gated as kernel

        return kernel(gate, up, activation)
    y = gate.new_empty(gate.shape)
    gates, ups, ys = rows_of(gate), rows_of(up), rows_of(y)
    for part in blocks(*ys.shape):
        ys[part] = _active(widen(gates[part]), activation).mul_(widen(ups[part]))
    return y


def _backward_kernel(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, implementation: str
) -> list[Tensor]:
    """[d_gate, d_up]."""
    if choose_local("gated", gate, implementation) == "triton":
        from tp_kernels.kernels.gated import gated_backward as kernel

        return list(kernel(dy, gate, up, activation))
    d_gate, d_up = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    dys, gates, ups, d_gates, d_ups = map(rows_of, (dy, gate, up, d_gate, d_up))
    for part in blocks(*dys.shape):
        d, x = widen(dys[part]), widen(gates[part])
        d_gates[part] = _through(d * widen(ups[part]), x, activation)
        d_ups[part] = _active(x, activation).mul_(d)
    return [d_gate, d_up]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, *ctx.how = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    gate, up = ctx.saved_tensors
    return *_backward_op(dy, gate, up, *ctx.how), None, None


_backward_op = register(
    "gated_backward",
    "(Tensor dy, Tensor gate, Tensor up, str activation, str implementation) -> Tensor[]",
    _backward_kernel,
    lambda dy, gate, up, activation, implementation: [gate.new_empty(gate.shape) for _ in "ab"],
)
_op = register(
    "gated",
    "(Tensor gate, Tensor up, str activation, str implementation) -> Tensor",
    _kernel,
    lambda gate, up, activation, implementation: gate.new_empty(gate.shape),
    _setup,
    _backward,
)
