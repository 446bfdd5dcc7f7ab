"""What the tests of kernels without signals do in an interpreted process: float64, and how near it they are.

The bounds are derived, to first order. `w` = 2^-24 is the error of a float32 operation; exp is taken to have
two such errors, and the sum of n numbers n w times the sum of their magnitudes, whatever its order. What
float32 has summed up to, `inner`, is rounded once more, to the dtype. See `allowance`.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from tests.kernels.body import DTYPES
from tests.oracle import digest, lay_out

w = 2.0**-24
TINY = 2.0**-140  # float32 operations near zero, a few of them
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def module(package: str, name: str) -> Any:
    return importlib.import_module(f"{package}.{name}")


@contextmanager
def small(package: str, **sizes: int) -> Iterator[None]:
    """Tiles of a few elements, so that few numbers take many; what is not written is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    sizes = {"TILE": 32, "SUMMED": 8, "MOST_PARTS": 3} | sizes
    with ExitStack() as patches:
        for name in ("_launch", "rotary", "norm"):
            for constant, value in sizes.items():
                if hasattr(module(package, name), constant):
                    patches.enter_context(mock.patch.object(module(package, name), constant, value))
        torch.use_deterministic_algorithms(True)  # fills new memory
        try:
            assert torch.empty(3).isnan().all() and torch.ones(1).new_empty(3).isnan().all()
            yield
        finally:
            torch.use_deterministic_algorithms(before)


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int, layout: str = "plain") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return lay_out(torch.randn(shape, generator=generator).to(dtype), layout)


def allowance(dtype: torch.dtype, exact: Tensor, inner: Tensor) -> Tensor:
    """Of a result's error: a rounding to the dtype and `inner`, the error in float32 before it."""
    info = torch.finfo(dtype)
    allowed = 1.02 * (info.eps / 2 * (exact.abs() + inner) + inner)
    return allowed + info.smallest_normal * info.eps + TINY


def close(result: Tensor, exact: Tensor, inner: Tensor, *where: Any) -> None:
    """|result - exact| is at most `allowance`."""
    allowed = allowance(result.dtype, exact, inner)
    assert result.shape == exact.shape, (*where, result.shape)
    excess = (result.double() - exact).abs() - allowed
    assert bool((excess <= 0).all()), (*where, f"off by {excess.max():.3g} more than allowed")


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


def gated(package: str, activation: str, shapes: list[tuple[int, ...]], layout: str) -> list[str]:
    """Both directions, halves apart and packed. Digests of the results."""
    kernels = module(package, "gated")
    name = "swiglu" if activation == "silu" else "geglu"
    more = {"approximate": "tanh"} if activation == "gelu_tanh" else {}
    dense = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}
    digests = []
    for seed, shape in enumerate(shapes):
        for dtype in DTYPES:
            where = (name, activation, shape, dtype)
            gate, up, dy = (draw(shape, dtype, 3 * seed + i, layout) for i in range(3))
            gate = gate * 6  # also where the activation is nearly 0 or the identity
            x, factor = leaves(gate, up)
            exact = dense[activation](x) * factor
            exact.backward(dy.double())
            with small(package):
                y = getattr(kernels, name)(gate, up, **more)
                gradients = getattr(kernels, f"{name}_backward")(dy, gate, up, **more)
                packed = torch.cat((gate, up), -1)
                again = getattr(kernels, name)(packed, **more)
                (both,) = getattr(kernels, f"{name}_backward")(dy, packed, **more)
            value, slope = activation_errors(activation, x.detach())
            outer = (dy.double() * factor).abs().detach()
            close(y, exact.detach(), factor.abs().detach() * value, *where)
            close(gradients[0], x.grad, outer * slope, *where, "d_gate")
            close(gradients[1], factor.grad, dy.double().abs() * value, *where, "d_up")
            assert digest(again) == digest(y), (*where, "packed")
            assert digest(both) == digest(torch.cat(gradients, -1)), (*where, "packed gradient")
            torch.testing.assert_close(kernels.reference(gate, up, activation), y)
            digests.append(digest(y, *gradients))
    return digests


def gelu_tanh(x: Tensor) -> Tensor:
    """Without the cancellation of 1 + tanh, which leaves float64 no digit where x is below -10."""
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def activation_errors(activation: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Errors in float32 of act(x) and act'(x), each with two multiplications after it.

    With e = exp(-|x|) to 2 w, s = 1 / (1 + e) has 4 w and 1 - s = e / (1 + e) has 5 w of relative error.
    silu: x s has 5 w; 1 + x (1 - s) has 6 w of x (1 - s) and w of the sum, with s 12 w of s (1 + |x| (1 - s))
    gelu_tanh: the argument a of s has 7 w, which are 7 (1 - s) |a| w of s; the second term of the derivative,
    of seven factors, gets the errors of s, 1 - s and a polynomial. gelu: erf of an argument to 2 w is good to
    2 w absolutely, and exp(-x^2 / 2) to (x^2 / 2 + 2) w relatively.
    """
    if activation == "silu":
        s, rest = x.sigmoid(), (-x).sigmoid()
        return 7 * w * (x * s).abs() + TINY, 14 * w * s * (1 + x.abs() * rest) + TINY
    if activation == "gelu":
        s = 0.5 * torch.erfc(-x / math.sqrt(2))
        bend = (x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)).abs()
        value = w * x.abs() * (2 + 3 * s)
        return value + TINY, w * (2 + 5 * s + bend * (x * x / 2 + 10)) + TINY
    a = 2 * math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)
    s, rest, size = a.sigmoid(), (-a).sigmoid(), a.abs()
    bend = (s * rest * 2 * math.sqrt(2 / math.pi) * x * (1 + 0.134145 * x * x)).abs()
    # Where s (1 - s) is less than a normal number, so is its error, and |x| (1 + x^2) below 10^5.
    floor = 1e5 * 2.0**-126
    value = w * (x * s).abs() * (7 * rest * size + 8)
    slope = w * (s * (7 * rest * size + 8) + bend * (7 * size + 21))
    return value + floor, slope + floor


def far(package: str) -> None:
    """Where exponentials overflow: identity, zero and no NaN."""
    kernels = module(package, "gated")
    x = torch.tensor([1e4, -1e4, 1e19, -1e19, 3e38, -3e38, 0.0, -0.0])
    one = torch.ones_like(x)
    for name, more in (("swiglu", {}), ("geglu", {}), ("geglu", {"approximate": "tanh"})):
        y = getattr(kernels, name)(x, one, **more)
        d_gate, d_up = getattr(kernels, f"{name}_backward")(one, x, one, **more)
        assert torch.equal(y, x.relu()) and torch.equal(d_up, y), (name, more, y)
        assert torch.equal(d_gate[:6], (x > 0).float()[:6]), (name, more, d_gate)
        assert torch.equal(d_gate[6:], torch.full((2,), 0.5)), (name, more, d_gate)


def rotary(
    package: str, shape: tuple[int, ...], half: int, interleaved: bool, layout: str
) -> list[str]:
    """Both directions, by a table for all batches and for each, into new memory and in place."""
    kernels = module(package, "rotary")
    digests = []
    for seed, dtype in enumerate(DTYPES):
        x, dy = (draw(shape, dtype, 5 * seed + i, layout) for i in range(2))
        heads_first = x.transpose(-3, -2).contiguous().transpose(-3, -2)
        for leading in (shape[-3:-2], shape[:-2])[min(seed, 1) :]:
            where = (shape, half, interleaved, dtype, leading)
            angle = draw((*leading, half), torch.float32, seed + 9).mul(3).double()
            cos, sin = angle.cos().to(dtype), angle.sin().float()
            (wide,) = leaves(x)
            exact, sizes = turned(wide, cos.double(), sin.double(), interleaved)
            exact.backward(dy.double())
            with small(package):
                y = kernels.rotary(x, cos, sin, interleaved=interleaved)
                dx = kernels.rotary_backward(dy, cos, sin, interleaved=interleaved)
                again = kernels.rotary(heads_first, cos, sin, interleaved=interleaved)
                place = x.clone(memory_format=torch.contiguous_format)
                out = kernels.rotary(place, cos, sin, interleaved=interleaved, out=place)
            close(y, exact.detach(), 2 * w * sizes, *where)
            _, sizes = turned(dy.double(), cos.double(), sin.double(), interleaved)
            close(dx, wide.grad, 2 * w * sizes, *where, "dx")
            assert out is place and digest(out) == digest(y) == digest(again), where
            rest = slice(2 * half, None)
            assert digest(y[..., rest]) == digest(x[..., rest]), (*where, "beyond R")
            torch.testing.assert_close(kernels.reference(x, cos, sin, interleaved=interleaved), y)
            digests.append(digest(y, dx))
    return digests


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The embedding as products of 2 x 2 matrices, and the sums of the magnitudes of their terms."""
    half = cos.shape[-1]
    flat, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = flat.unflatten(-1, (half, 2) if interleaved else (2, half))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)

    def product(pairs: Tensor, matrices: Tensor) -> Tensor:
        result = torch.einsum("...tpij,...thpj->...thpi", matrices, pairs)
        result = result if interleaved else result.transpose(-1, -2)
        return torch.cat((result.flatten(-2), rest), -1)

    matrices = torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))
    return product(pairs, matrices), product(pairs.detach().abs(), matrices.abs()).abs()


def of_copy(directory: str, package: str, where: str, test: str, *args: Any) -> Any:
    """Run the function `test` of tests.kernels.`where` with the kernels of `package` in `directory`."""
    sys.path.insert(0, directory)
    try:
        importlib.invalidate_caches()
        return getattr(importlib.import_module(f"tests.kernels.{where}"), test)(package, *args)
    finally:
        sys.path.remove(directory)
