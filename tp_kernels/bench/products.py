"""Operands of the linear benchmarks, and products checked against float64.

Imports numpy and torch only: peers load this file into an interpreter that does not have this package.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

SAMPLED_ROWS = 32


def random(seed: int, *shape: int) -> Tensor:
    """Standard normal float32; the same on every rank and in every interpreter."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def product_error(found: Tensor, a: Tensor, b: Tensor) -> float:
    """Largest error of `found` as a [R, K] @ b [K, C], in units of what rounding explains.

    Some rows are compared element by element with the product in float64, all rows by a product with a
    vector of random signs, which costs 1/C of that and hides no element that is wrong by more than noise.
    More than 1 is a wrong result.
    """
    if found.shape != (a.shape[0], b.shape[1]) or not bool(torch.isfinite(found).all()):
        return math.inf
    if found.numel() == 0:
        return 0.0
    generator = torch.Generator().manual_seed(found.numel())
    rows = torch.randperm(found.shape[0], generator=generator)[:SAMPLED_ROWS]
    signs = torch.randint(0, 2, (b.shape[1],), generator=generator).double() * 2 - 1
    a, b = a.double(), b.double()
    # Rounding errors of K summands add up like a random walk.
    unit = 8 * torch.finfo(found.dtype).eps * math.sqrt(max(1, a.shape[1]))
    some, absolute = a[rows], b.abs()
    errors = (found[rows].double() - some @ b).abs()
    worst = _ratio(errors, unit * (some.abs() @ absolute))
    errors = (found.double() @ signs - a @ (b @ signs)).abs()
    spread = a.abs() @ absolute.sum(1) / math.sqrt(b.shape[1])
    return max(worst, _ratio(errors, unit * spread))


def column_sum_error(found: Tensor, a: Tensor) -> float:
    """Largest error of `found` [C] as the sum over the rows of a [R, C], in the same units."""
    if found.shape != a.shape[1:]:
        return math.inf
    unit = 8 * torch.finfo(found.dtype).eps * math.sqrt(max(1, a.shape[0]))
    errors = (found.double() - a.double().sum(0)).abs()
    return _ratio(errors, unit * a.double().abs().sum(0))


def _ratio(errors: Tensor, allowed: Tensor) -> float:
    ratio: Any = torch.where(errors > 0, errors / allowed, 0.0).max()
    return float(ratio) if bool(torch.isfinite(ratio)) else math.inf
