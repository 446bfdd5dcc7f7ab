"""Dense float64 arithmetic that the parity suite compares with, and how far rounding may lead away from it.

Every primitive is written down once, in plain torch, with its backward. Run with `Rounding(0)` it is exact.
Run with a small u, every result (and, in backward, every gradient) is disturbed at random by what an
arithmetic of unit roundoff u would lose there: u |y| for an element-wise result, u |a| |b| for a sum of
products, which covers the rounding of every partial sum and of the sums of single ranks. The scatter of the
outcome over several runs, divided by u, is its sensitivity to rounding, element by element and with the whole
nonlinear model behind it (the discrete stochastic arithmetic of Vignes, Math. Comput. Simul. 35, 1993).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


class Rounding:
    """Primitives over float64, disturbed by relative errors of size `u`."""

    def __init__(self, u: float = 0.0, seed: int = 0) -> None:
        self.u = u
        self.generator = torch.Generator().manual_seed(seed)

    def noise(self, magnitude: Tensor) -> Tensor:
        draw = torch.randn(magnitude.shape, generator=self.generator, dtype=torch.float64)
        return self.u * magnitude * draw

    def __call__(self, x: Tensor) -> Tensor:
        """x, rounded; so is its gradient."""
        return _Rounded.apply(x, self) if self.u else x

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """[..., M, K] @ [..., K, N] of equal leading shapes."""
        return _Product.apply(a, b, self) if self.u else a @ b

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., K] @ [N, K]^T + [N]."""
        y = self.matmul(x.flatten(0, -2), weight.t()).unflatten(0, x.shape[:-1])
        return y if bias is None else self.add(y, bias)

    def add(self, x: Tensor, vector: Tensor) -> Tensor:
        """x [..., N] + vector [N], whose gradient is a sum over rows."""
        rows = x.flatten(0, -2)
        ones = rows.new_ones(rows.shape[0], 1)
        return self(x + self.matmul(ones, vector.unsqueeze(0)).view(x.shape))

    def scale(self, x: Tensor, vector: Tensor) -> Tensor:
        """x [..., N] * vector [N], whose gradient is a sum over rows."""
        return _Scaled.apply(x, vector, self) if self.u else x * vector

    def lookup(self, table: Tensor, ids: Tensor) -> Tensor:
        """Rows of table [V, H]."""
        return self.linear(F.one_hot(ids, table.shape[0]).to(table.dtype), table.t())

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float = 1e-6) -> Tensor:
        x = self(x)
        size = self(self(x * x).mean(-1, keepdim=True))
        return self.scale(self(x * self(torch.rsqrt(size + epsilon))), weight)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float = 1e-5
    ) -> Tensor:
        x = self(x)
        x = self(x - self(x.mean(-1, keepdim=True)))
        size = self(self(x * x).mean(-1, keepdim=True))
        y = self.scale(self(x * self(torch.rsqrt(size + epsilon))), weight)
        return y if bias is None else self.add(y, bias)

    def activation(self, x: Tensor, name: str) -> Tensor:
        x = self(x)
        if name == "relu":
            return self(x.clamp_min(0))
        if name == "relu2":
            return self(x.clamp_min(0) ** 2)
        if name == "silu":
            return self(x / (1 + torch.exp(-x)))
        # Of a negative x, 1 + erf cancels, and is off by what erf was rounded to.
        if name == "gelu":
            return self(0.5 * x * self(1 + self(torch.erf(x / math.sqrt(2)))))
        assert name == "gelu_tanh"
        cubic = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return self(0.5 * x * self(1 + self(torch.tanh(cubic))))

    def weighted(self, scores: Tensor, v: Tensor, factors: Tensor | None = None) -> Tensor:
        """(softmax(scores) * factors) v of one head: [b, s, t], [b, t, D], [b, s, t] -> [b, s, D]."""
        factors = torch.ones_like(scores) if factors is None else factors
        if self.u:
            return _Weighted.apply(scores, v, factors, self)
        return (scores.softmax(-1) * factors) @ v


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, rounding: Rounding) -> Tensor:
        ctx.rounding = rounding
        return x + rounding.noise(x.abs())

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy + ctx.rounding.noise(dy.abs()), None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, rounding: Rounding) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.rounding = rounding
        return a @ b + rounding.noise(a.abs() @ b.abs())

    @staticmethod
    def backward(ctx, dy: Tensor):
        a, b = ctx.saved_tensors
        da = dy @ b.mT + ctx.rounding.noise(dy.abs() @ b.mT.abs())
        db = a.mT @ dy + ctx.rounding.noise(a.mT.abs() @ dy.abs())
        return da, db, None


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, vector: Tensor, rounding: Rounding) -> Tensor:
        ctx.save_for_backward(x, vector)
        ctx.rounding = rounding
        return x * vector + rounding.noise((x * vector).abs())

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, vector = ctx.saved_tensors
        noise, terms = ctx.rounding.noise, dy * x
        dx = dy * vector + noise((dy * vector).abs())
        rows = tuple(range(x.dim() - 1))
        return dx, terms.sum(rows) + noise(terms.abs().sum(rows)), None


class _Weighted(torch.autograd.Function):
    """Of `Rounding.weighted`. In its backward, large products cancel where few keys are seen."""

    @staticmethod
    def forward(ctx, scores: Tensor, v: Tensor, factors: Tensor, rounding: Rounding) -> Tensor:
        p = scores.softmax(-1)
        ctx.save_for_backward(p, v, factors)
        ctx.rounding = rounding
        p = p * factors
        return p @ v + rounding.noise(p @ v.abs())

    @staticmethod
    def backward(ctx, dy: Tensor):
        p, v, factors = ctx.saved_tensors
        noise = ctx.rounding.noise
        dp, size = dy @ v.mT * factors, dy.abs() @ v.abs().mT * factors
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        ds = ds + noise(p * (size + (p * size).sum(-1, keepdim=True)))
        p = p * factors
        return ds, p.mT @ dy + noise(p.mT @ dy.abs()), None, None


def sensitivity(runs: Sequence[Tensor], exact: Tensor, u: float) -> Tensor:
    """Root mean square of (run - exact) / u over the runs, element by element."""
    return torch.stack([((run - exact) / u) ** 2 for run in runs]).mean(0).sqrt()
