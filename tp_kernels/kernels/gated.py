"""swiglu and geglu (Shazeer, 2020): an activation of one half of a projection times the other half.

    y = round(act(gate) * up)
    d_up = round(dy * act(gate)),  d_gate = round(dy * up * act'(gate))

    silu:       act(x) = x s(x)                                       with s(x) = 1 / (1 + exp(-x))
    gelu:       act(x) = x (1 + erf(x / sqrt(2))) / 2
    gelu_tanh:  act(x) = x (1 + tanh(z)) / 2 = x s(2 z)               with z = sqrt(2 / pi) (x + 0.044715 x^3)
    relu:       act(x) = max(x, 0);                                   relu2 is its square

In float32, rounded once; torch's `silu(gate) * up` rounds the activation as well. Like torch's, gelu by erf
has few correct digits far below zero, where it is next to nothing. Backward needs gate and up only: the
activation is computed again. Nothing is communicated: under tensor parallelism gate and up are split alike.

Limits: packed means [gate | up], not interleaved. Graphs: see _launch.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_kernels.comm.errors import ShapeError, UnsupportedError

from ._activation import value_and_slope
from ._device import narrow, widen
from ._launch import check_alike, launch, rows_of, tile_at, tiles, tiling

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


def reference(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """y, differentiable."""
    wide = gate.float()
    if activation == "silu":
        active = torch.nn.functional.silu(wide)
    elif activation in ("relu", "relu2"):
        active = wide.relu() if activation == "relu" else wide.relu().square()
    else:
        form = "tanh" if activation == "gelu_tanh" else "none"
        active = torch.nn.functional.gelu(wide, approximate=form)
    return (active * up.float()).to(gate.dtype)


@triton.jit
def forward(
    gate, up, y, rows, width, gate_row, up_row,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """gate, up [rows, width] with rows gate_row and up_row apart; y [rows, width]."""
    row, column, mask = tile_at(rows, width, ROWS, COLUMNS)
    x = widen(tl.load(gate + row * gate_row + column, mask=mask, other=0.0))
    factor = widen(tl.load(up + row * up_row + column, mask=mask, other=0.0))
    value, _slope = value_and_slope(x, ACTIVATION)
    tl.store(y + row * width + column, narrow(value * factor, y.dtype.element_ty), mask=mask)


@triton.jit
def backward(
    gate, up, dy, d_gate, d_up, rows, width, gate_row, up_row, dy_row, d_row,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """As forward; dy, d_gate, d_up [rows, width] with rows dy_row, d_row and d_row apart."""
    TYPE: tl.constexpr = d_gate.dtype.element_ty
    row, column, mask = tile_at(rows, width, ROWS, COLUMNS)
    x = widen(tl.load(gate + row * gate_row + column, mask=mask, other=0.0))
    factor = widen(tl.load(up + row * up_row + column, mask=mask, other=0.0))
    gradient = widen(tl.load(dy + row * dy_row + column, mask=mask, other=0.0))
    value, slope = value_and_slope(x, ACTIVATION)
    at = row * d_row + column
    tl.store(d_gate + at, narrow(gradient * factor * slope, TYPE), mask=mask)
    tl.store(d_up + at, narrow(gradient * value, TYPE), mask=mask)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up.

    Args:
        gate: [..., N], or without `up` both, packed: [..., 2 N]; float32, bfloat16 or float16, any strides.
        up: [..., N] of the dtype of gate.

    Returns:
        [..., N].

    Raises:
        ShapeError: gate and up differ in shape, or an odd width is to be packed.
        UnsupportedError: of dtypes and devices; CPU tensors without the interpreter.
    """
    return _forward("swiglu", "silu", gate, up)


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor | None = None) -> tuple[Tensor, ...]:
    """(d_gate, d_up) for the gradient dy [..., N] of `swiglu(gate, up)`; packed, ([..., 2 N],)."""
    return _backward("swiglu", "silu", dy, gate, up)


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """gelu(gate) * up; arguments, result and errors of `swiglu`, `approximate` of torch's gelu."""
    return _forward("geglu", _form(approximate), gate, up)


def geglu_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None = None, *, approximate: str = "none"
) -> tuple[Tensor, ...]:
    """As swiglu_backward."""
    return _backward("geglu", _form(approximate), dy, gate, up)


def gated(gate: Tensor, up: Tensor | None = None, activation: str = "silu") -> Tensor:
    """act(gate) * up for one of ACTIVATIONS; otherwise as `swiglu`."""
    return _forward("gated", _known(activation), gate, up)


def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None = None, activation: str = "silu"
) -> tuple[Tensor, ...]:
    """As swiglu_backward."""
    return _backward("gated", _known(activation), dy, gate, up)


def _known(activation: str) -> str:
    if activation not in ACTIVATIONS:
        raise UnsupportedError(
            f"gated: activation={activation!r}; known are {', '.join(ACTIVATIONS)}"
        )
    return activation


def _form(approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise UnsupportedError(f"geglu: approximate={approximate!r}; use 'none' or 'tanh'")
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def _halves(operation: str, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is None:
        if gate.dim() == 0 or gate.shape[-1] % 2:
            raise ShapeError(f"{operation}: packed is {tuple(gate.shape)}, expected [..., 2 N]")
        gate, up = gate.chunk(2, dim=-1)
    check_alike(operation, gate, up=(up, gate.shape))
    if gate.dim() == 0 or up.dtype != gate.dtype:
        raise ShapeError(
            f"{operation}: gate is {tuple(gate.shape)} {gate.dtype}, up {up.dtype}; expected "
            "[..., N] of one dtype"
        )
    return gate, up


def _forward(operation: str, activation: str, gate: Tensor, up: Tensor | None) -> Tensor:
    gate, up = _halves(operation, gate, up)
    y = gate.new_empty(gate.shape)
    gates, ups = rows_of(gate), rows_of(up)
    rows, width = gates.shape
    tile = tiling(width)
    launch(
        forward, operation, tiles(rows, width, **tile),
        gates, ups, y, rows, width, gates.stride(0), ups.stride(0),
        ACTIVATION=activation, **tile,
    )  # fmt: skip
    return y


def _backward(
    operation: str, activation: str, dy: Tensor, gate: Tensor, up: Tensor | None
) -> tuple[Tensor, ...]:
    packed = up is None
    gate, up = _halves(operation, gate, up)
    check_alike(f"{operation}_backward", gate, dy=(dy, gate.shape))
    width = gate.shape[-1]
    result: tuple[Tensor, ...]
    if packed:
        result = (gate.new_empty((*gate.shape[:-1], 2 * width)),)
        d_gate, d_up = rows_of(result[0]).chunk(2, dim=-1)
    else:
        result = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
        d_gate, d_up = map(rows_of, result)
    gates, ups, dys = rows_of(gate), rows_of(up), rows_of(dy)
    tile = tiling(width)
    launch(
        backward, operation, tiles(len(gates), width, **tile),
        gates, ups, dys, d_gate, d_up, len(gates), width,
        gates.stride(0), ups.stride(0), dys.stride(0), d_gate.stride(0),
        ACTIVATION=activation, **tile,
    )  # fmt: skip
    return result
