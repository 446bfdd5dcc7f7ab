"""Checks of the kernels that stay on one rank, which run once: values and gradients against float64, graphs.

The bounds are those of tests/kernels/elementwise_body.py and norm_body.py, wider where exp() and quotients
take part: a GPU's are approximate, see SLACK.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.gpu.runner import Check
from tests.gpu.table import DTYPES
from tests.kernels import elementwise_body as body
from tests.kernels import norm_body
from tests.oracle import copy_to, digest
from tp_kernels import kernels
from tp_kernels.ops import dropout

DEVICE = "cuda"
# One row, short ones side by side in a tile, several tiles to a row, in every layout; sizes that 16 divides.
SHAPES = (
    ((1, 19), "plain"),
    ((3, 5, 77), "offset"),
    ((33, 1000), "strided"),
    ((7, 5003), "transposed"),
    ((256, 4096), "plain"),
)
# x, and half of the rotary dimension.
HEADS = (
    ((9, 3, 20), 7, "plain"),
    ((2, 65, 12, 128), 64, "transposed"),
    ((2, 300, 8, 80), 20, "strided"),
)
# Times the errors of exp and quotients in elementwise_body.py: 2^-22 and two roundings more of the argument
# instead of 2 * 2^-24, and 2 * 2^-23 instead of 2^-24. Results below the normal numbers are zero.
SLACK, FLUSHED = 3.0, 2.0**-120

Results = tuple[Tensor, ...]


def checks(device: str = DEVICE) -> Iterator[Check]:
    for name, function in FUNCTIONS.items():
        run = partial(function, device)
        yield Check(f"local {name}", run, 60, prepare=run)


def gated_by(activation: str, device: str) -> None:
    name = "swiglu" if activation == "silu" else "geglu"
    more = {"approximate": "tanh"} if activation == "gelu_tanh" else {}
    forward, backward = getattr(kernels, name), getattr(kernels, f"{name}_backward")
    dense = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}

    def call(gate: Tensor, up: Tensor, dy: Tensor) -> Results:
        return forward(gate, up, **more), *backward(dy, gate, up, **more)

    for seed, (shape, layout) in enumerate(SHAPES):
        for dtype in DTYPES.values():
            where = (name, activation, shape, dtype)
            gate, up, dy = (body.draw(shape, dtype, 3 * seed + i, layout) for i in range(3))
            gate = gate * 6  # also where the activation is nearly 0 or the identity
            x, factor = body.leaves(gate, up)
            exact = dense.get(activation, body.gelu_tanh)(x) * factor
            exact.backward(dy.double())
            y, d_gate, d_up = run(call, device, gate, up, dy)
            value, slope = _errors(activation, x.detach())
            wide, dy = factor.detach().abs(), dy.double().abs()
            body.close(y, exact.detach(), wide * value, *where)
            body.close(d_gate, x.grad, dy * wide * slope, *where, "d_gate")
            body.close(d_up, factor.grad, dy * value, *where, "d_up")


def _errors(activation: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of the activation and its derivative, in float32 on a GPU."""
    slack = SLACK * (1 + x.abs()) if activation == "silu" else SLACK  # roundings of the argument x
    value, slope = body.activation_errors(activation, x)
    return slack * value + FLUSHED, slack * slope + FLUSHED


def turned(interleaved: bool, device: str) -> None:
    def call(x: Tensor, dy: Tensor, cos: Tensor, sin: Tensor) -> Results:
        dx = kernels.rotary_backward(dy, cos, sin, interleaved=interleaved)
        return kernels.rotary(x, cos, sin, interleaved=interleaved), dx

    for seed, (shape, half, layout) in enumerate(HEADS):
        for dtype in DTYPES.values():
            where = (shape, half, interleaved, dtype)
            x, dy = (body.draw(shape, dtype, 5 * seed + i, layout) for i in range(2))
            # A table for each batch, or for all of them.
            leading = shape[:-2] if seed == 1 else shape[-3:-2]
            angle = body.draw((*leading, half), torch.float32, seed + 9).mul(3).double()
            cos, sin = angle.cos().to(dtype), angle.sin().float()
            (wide,) = body.leaves(x)
            exact, sizes = body.turned(wide, cos.double(), sin.double(), interleaved)
            exact.backward(dy.double())
            _, d_sizes = body.turned(dy.double(), cos.double(), sin.double(), interleaved)
            y, dx = run(call, device, x, dy, cos, sin)
            body.close(y, exact.detach(), 2 * body.w * sizes, *where)
            body.close(dx, wide.grad, 2 * body.w * d_sizes, *where, "dx")
            rest = slice(2 * half, None)
            assert digest(y[..., rest]) == digest(x[..., rest]), (*where, "beyond R")


def normed(name: str, device: str) -> None:
    centered = name == "layer_norm"
    for seed, (shape, layout) in enumerate(SHAPES):
        for dtype in DTYPES.values():
            x, residual, dy, ds = (body.draw(shape, dtype, 7 * seed + i, layout) for i in range(4))
            weight, bias = (body.draw(shape[-1:], dtype, 7 * seed + 4 + i) for i in range(2))
            more = bool(seed % 2)
            biased = more and centered
            call = partial(_norm, name, more, biased)
            y, s, *rest = run(call, device, x, weight, dy, residual, ds, bias)
            saved, slopes = rest[: 1 + centered], rest[1 + centered :]
            added = bias if biased else torch.zeros_like(bias)
            expected = x if not more else (x.float() + residual.float()).to(dtype)
            where = (name, shape, dtype, layout)
            assert digest(s) == digest(expected), (*where, "s")
            norm_body.check(s, weight, added, dy, ds if more else None, saved, (y, *slopes), where)


def _norm(
    name: str, more: bool, biased: bool, x: Tensor, weight: Tensor, dy: Tensor, residual: Tensor,
    ds: Tensor, bias: Tensor,
) -> Results:  # fmt: skip
    forward, backward = getattr(kernels, name), getattr(kernels, f"{name}_backward")
    given = {"residual": residual} if more else {}
    given |= {"bias": bias} if biased else {}
    y, s, *saved = forward(x, weight, epsilon=norm_body.EPSILON, **given)
    return y, s, *saved, *backward(dy, s, weight, *saved, **({"ds": ds} if more else {}))


def dropped(device: str) -> None:
    """The mask of the CPU, also of indexes beyond 32 bits; a sum may be rounded once less."""
    p, key = 0.3, torch.tensor(0x1234_5678_9ABC_DEF0)
    for seed, (shape, layout) in enumerate(SHAPES):
        for dtype in DTYPES.values():
            x, residual = (body.draw(shape, dtype, 11 * seed + i, layout) for i in range(2))
            place: dict[str, Any] = {"dim": 0, "start": 1 << 34, "size": (1 << 34) + shape[0]}

            def call(x: Tensor, residual: Tensor, key: Tensor, place: Any = place) -> Results:
                how = {"key": key, "implementation": "triton"} | place
                return dropout(x, p, **how), dropout(x, p, residual=residual, **how)

            plain, added = run(call, device, x, residual, key)
            where = (shape, dtype, layout)
            exact = dropout(x, p, key=key, **place)
            assert digest(plain) == digest(exact), where
            scaled = torch.where(exact != 0, x.double() / (1 - p), 0.0)
            total = scaled + residual.double()
            body.close(added, total, body.w * (2 * scaled.abs() + total.abs()), *where)


def run(call: Callable[..., Results], device: str, *tensors: Tensor) -> Results:
    """Results for tensors like these on the device, where a captured call has to have the same bits."""
    moved = [copy_to(t, device) for t in tensors]
    results = tuple(t.cpu() for t in call(*moved))
    if device != "cpu":
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            again = call(*moved)
        for _ in range(2):
            captured.replay()
        assert digest(*(t.cpu() for t in again)) == digest(*results), "a graph has other bits"
    return results


FUNCTIONS: dict[str, Callable[[str], Any]] = {
    **{f"gated {name}": partial(gated_by, name) for name in body.ACTIVATIONS},
    "rotary half-split": partial(turned, False),
    "rotary interleaved": partial(turned, True),
    "dropout": dropped,
    **{name: partial(normed, name) for name in ("rms_norm", "layer_norm")},
}
