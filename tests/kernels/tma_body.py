"""What ranks do in the tests of loads by the tensor memory accelerator; see body.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.runtime import _allocation

from tests.kernels.body import DTYPES, Kernels, kernels
from tests.kernels.gemm_body import CHUNK, run
from tests.oracle import digest

OPERATIONS = (
    "linear_reduce_scatter", "linear_all_reduce", "linear_all_reduce_2", "all_gather_linear",
    "all_gather_weight_gradient",
)  # fmt: skip


def same_bits(package: str) -> None:
    """With and without it, where operands allow it and where they do not, also with several pairs."""
    with kernels(package, chunk=CHUNK, depth=4) as k:
        for seed, operation in enumerate(OPERATIONS):
            for turn, layout in enumerate(("inner inner", "inner rows", "")):
                dtype = DTYPES[(seed + turn) % len(DTYPES)]
                aligned = 16 // dtype.itemsize
                inner = 3 * aligned if layout else aligned + 1
                plain, _ = call(k, operation, inner, layout, dtype, seed, False)
                result, layouts = call(k, operation, inner, layout, dtype, seed, True)
                if operation.endswith("gradient") and layout:
                    layout = "rows rows"
                where = operation, dtype, inner, layout, k.group.rank
                k.expect(layouts == [layout], *where, layouts)
                k.expect(plain == result, *where)


def call(
    k: Kernels, operation: str, inner: int, layout: str, dtype: torch.dtype, seed: int, tma: bool
) -> tuple[str, list[str]]:
    """(digest of the result, layouts that the kernel was launched for)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator).to(dtype)

    tiling = replace(k.module("_gemm").INTERPRETER, tma=tma)
    x = draw(21, inner)
    w = draw(inner, 24).t() if layout == "inner rows" else draw(24, inner)
    seen, allocator = [], _allocation._allocator.get()
    real = k.workspace.launch

    def launch(*args: Any, **constants: Any) -> None:
        seen.append(constants["TMA"])
        real(*args, **constants)

    with mock.patch.object(k.workspace, "launch", launch):
        if operation == "all_gather_linear":
            function = k.module(operation).all_gather_linear
            (y,), _ = function(x, w, k.workspace, tiling=tiling)
        elif operation == "all_gather_weight_gradient":
            function = k.module(operation).all_gather_weight_gradient
            other = draw(21 * k.group.size, 24 if layout else 23)
            y, _ = function(x, other, k.workspace, tiling=tiling)
        else:
            y = run(k, operation, [x, x], [w, w], tiling=tiling)
    assert _allocation._allocator.get() is allocator, "not that of other kernels any more"
    return digest(y), seen
