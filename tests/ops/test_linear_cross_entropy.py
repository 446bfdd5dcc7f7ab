"""linear_cross_entropy: against float64 with every gradient, bits alike, tiles, memory, what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.loss_body import Case, run_linear, variants

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
