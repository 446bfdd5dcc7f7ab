"""linear_cross_entropy: against float64 with every gradient, bits alike, tiles, memory, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.ops.loss_body import (
    Case,
    linear_module,
    main_gradients,
    run_linear,
    variants,
)
from tp_kernels import ParallelGroup, copy_linear
from tp_kernels.bench.allocation import peak_bytes
from tp_kernels.ops import linear_cross_entropy, vocab_parallel_cross_entropy

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def alike(results: list) -> None:
    assert all(result == results[0] for result in results), "ranks have different bits"


def linear_variants(base: Case) -> list[Case]:
    """Those of the loss, and of rows, tiles and what needs gradients."""
    cases = [
        replace(case, chunk_rows=(None, 1, 4, 1000)[index % 4], biased=index % 3 > 0)
        for index, case in enumerate(variants(base))
    ]
    by_rows = [
        replace(case, sequence_parallel=True, seed=case.seed + 100)
        for case in cases
        if case.leading
    ]
    frozen = [replace(base, frozen=names, smoothing=0.1) for names in ("h", "w", "b", "wb", "hwb")]
    return cases + by_rows[::2] + frozen + [replace(frozen[1], sequence_parallel=True)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(world, size, dtype):
    provider = "none" if dtype == torch.float64 else "auto"
    alike(world(size).run(run_linear, linear_variants(Case(dtype=dtype)), provider))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_tiles_of_few_words(world, size, dtype):
    """3 rows and 2 words at a time: loss and gradients are merged from many tiles."""
    base = Case(dtype=dtype, chunk_rows=3, smoothing=0.1, z_loss=0.01, vocab=23)
    cases = [
        base,
        replace(base, sequence_parallel=True, reduction="none"),
        replace(base, padded=True, cap=4.0),
        replace(base, vocab=2, biased=False),
        replace(base, leading=(3, 2), reduction="sum", frozen="h"),
    ]
    alike(world(size).run(run_linear, cases, "auto", 24))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_main_grad(world, dtype):
    """A buffer in float32 collects the weight's gradient of several micro-batches."""
    cases = [Case(dtype=dtype, chunk_rows=rows, smoothing=0.1, biased=True) for rows in (None, 4)]
    world(2).run(main_gradients, cases)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_memory(world, dtype):
    """Beyond inputs and gradients, an eighth of the logits in float32, of which there never is more."""
    for fused, materialised in world(2).run(peaks, dtype):
        logits = 512 * 8000 * 4
        assert fused <= logits / 8, fused / logits
        assert materialised >= logits * dtype.itemsize / 4, (
            materialised / logits
        )  # or it measures nothing


def peaks(dtype: torch.dtype) -> tuple[int, int]:
    rows, vocab, width = 512, 16000, 64
    with (
        patch.object(linear_module, "TILE_BYTES", 1 << 19),
        ParallelGroup(timeout=60) as group,
    ):
        g = torch.Generator().manual_seed(0)
        labels = torch.randint(0, vocab, (rows,), generator=g)
        shapes = ((rows, width), (vocab // 2, width))
        options: dict[str, Any] = {"group": group, "vocab_size": vocab}

        def fused(h: Tensor, w: Tensor) -> Tensor:
            return linear_cross_entropy(h, w, labels, soft_cap=30.0, **options)

        def materialised(h: Tensor, w: Tensor) -> Tensor:
            logits = copy_linear(h, w, group=group)
            return vocab_parallel_cross_entropy(logits, labels, soft_cap=30.0, **options)

        results = []
        for loss in (fused, materialised):
            h, w = (torch.randn(s, generator=g).to(dtype).requires_grad_() for s in shapes)
            bytes_ = peak_bytes(lambda loss=loss, h=h, w=w: loss(h, w).backward())
            results.append(bytes_ - h.grad.nbytes - w.grad.nbytes)
    return tuple(results)
