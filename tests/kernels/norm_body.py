"""What the tests of rms_norm and layer_norm do in an interpreted process; see elementwise_body.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.kernels.body import DTYPES
from tests.kernels.elementwise_body import close, draw, leaves, module, small, w
from tests.oracle import digest

EPSILON = 1e-5


def norm(
    package: str,
    operation: str,
    shapes: list[tuple[int, ...]],
    layout: str = "plain",
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    offset: float = 0.0,
) -> list[str]:
    """Both directions; every second case with a residual and a bias. Digests of the results."""
    kernels, centered = module(package, "norm"), operation == "layer_norm"
    digests = []
    for seed, shape in enumerate(shapes):
        for dtype in dtypes:
            x, residual, dy, ds = (draw(shape, dtype, 7 * seed + i, layout) for i in range(4))
            weight, bias = (draw(shape[-1:], dtype, 7 * seed + 4 + i) for i in range(2))
            x = x + offset
            given: dict[str, Any] = {"epsilon": EPSILON}
            back: dict[str, Any] = {}
            if seed % 2:
                given |= {"residual": residual}
                back = {"ds": ds}
            if centered and seed % 2:
                given["bias"] = bias
            with small(package):
                y, s, *saved = getattr(kernels, operation)(x, weight, **given)
                results = getattr(kernels, f"{operation}_backward")(dy, s, weight, *saved, **back)
            where = (operation, shape, dtype, layout)
            expected, expected_s = kernels.reference(x, weight, centered=centered, **given)
            torch.testing.assert_close(expected, y)
            assert digest(expected_s) == digest(s), (*where, "s")
            added = bias if "bias" in given else torch.zeros_like(bias)
            check(s, weight, added, dy, ds if back else None, saved, (y, *results), where)
            digests.append(digest(y, s, *saved, *results))
    return digests


def check(
    s: Tensor,
    weight: Tensor,
    bias: Tensor,
    dy: Tensor,
    ds: Tensor | None,
    saved: list[Tensor],
    results: tuple[Tensor, ...],
    where: tuple[Any, ...],
) -> None:
    """Values and gradients of float64, with errors in float32 of:

    mean:   n w mean(|s|)                                             (`center`)
    rstd:   half of that of mean((s - mean)^2), which is (n + 4) w relatively and center^2 absolutely, and
            2 w for root and quotient                                 (`scale`, relative)
    u:      rstd * (center + w |s - mean|) + |u| (scale + w)          (`unit`)
    g = dy * weight: w |g|; its mean: (n + 1) w mean(|g|); mean(g u): mean(|g| unit) + (n + 2) w mean(|g u|)
    dx:     rstd * (errors of its three terms + 3 w (their magnitudes)), and the error of rstd; w |ds|
    d_weight: sum(|dy| unit) + R w sum(|dy u|),  d_bias: R w sum(|dy|)
    """
    centered, n, rows = len(saved) == 2, s.shape[-1], max(1, s[..., 0].numel())
    wide, scales, shift = leaves(s, weight, bias)
    mean = wide.mean(-1, keepdim=True) if centered else torch.zeros_like(wide[..., :1])
    rstd = ((wide - mean).square().mean(-1, keepdim=True) + EPSILON).rsqrt()
    u = (wide - mean) * rstd
    exact = u * scales + shift
    torch.autograd.backward(exact, dy.double())

    with torch.no_grad():
        center = n * w * wide.abs().mean(-1, keepdim=True) * centered
        scale = (n + 4) * w / 2 + 2 * w + (center * rstd).square() / 2
        unit = rstd * (center + w * (wide - mean).abs()) + u.abs() * (scale + w)
        y, dx, d_weight, *d_bias = results
        close(y, exact, unit * scales.abs() + 2 * w * (u * scales).abs() + w * shift.abs(), *where)
        close(saved[-1], rstd.squeeze(-1), (scale * rstd).squeeze(-1), *where, "rstd")
        if centered:
            close(saved[0], mean.squeeze(-1), center.squeeze(-1), *where, "mean")

        gradient, size = wide.grad, (dy.double() * scales).abs()
        along = (size * u.abs()).mean(-1, keepdim=True)
        slope = (size * unit).mean(-1, keepdim=True) + (n + 2) * w * along
        level = size.mean(-1, keepdim=True) * centered
        terms = size + level + u.abs() * along
        inner = w * size + (n + 1) * w * level + u.abs() * slope + unit * along + 3 * w * terms
        inner = rstd * (inner + terms * (scale + w))
        if ds is not None:
            gradient = gradient + ds.double()
            inner = inner + w * ds.double().abs()
        close(dx, gradient, inner, *where, "dx")

        flat = dy.double().abs().reshape(-1, n)
        parts, units = unit.reshape(-1, n), u.abs().reshape(-1, n)
        inner = (flat * parts).sum(0) + rows * w * (flat * units).sum(0)
        close(d_weight, scales.grad, inner, *where, "d_weight")
        for result in d_bias:
            close(result, shift.grad, rows * w * flat.sum(0), *where, "d_bias")


def mixed_dtypes(package: str) -> None:
    """Weights in float32 with rows in 16 bits, as mixed precision keeps them."""
    kernels = module(package, "norm")
    x, dy = draw((5, 7), torch.bfloat16, 0), draw((5, 7), torch.bfloat16, 1)
    weight, bias = draw((7,), torch.float32, 2), draw((7,), torch.float32, 3)
    with small(package):
        y, s, mean, rstd = kernels.layer_norm(x, weight, bias, epsilon=EPSILON)
        results = kernels.layer_norm_backward(dy, s, weight, mean, rstd)
    assert s is x and [t.dtype for t in results] == [x.dtype, weight.dtype, weight.dtype]
    check(s, weight, bias, dy, None, [mean, rstd], (y, *results), ("mixed",))
