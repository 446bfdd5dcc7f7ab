"""VocabParallelEmbedding: the bits of nn.Embedding, whole or by rows, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.oracle import digest
from tp_kernels import ParallelGroup, ShapeError
from tp_kernels.layers import VocabParallelEmbedding

WIDTH = 3


def compare(vocab: int, leading: tuple[int, ...], options: dict[str, Any]) -> list[str]:
    """Values and gradients against nn.Embedding, to the bit."""
    digests = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        provider = "none" if dtype == torch.float64 else "auto"
        with ParallelGroup(timeout=30, provider=provider) as group:
            torch.manual_seed(7)
            padding_idx = options.get("padding_idx")
            dense = nn.Embedding(vocab, WIDTH, padding_idx, dtype=dtype)
            layer = VocabParallelEmbedding(vocab, WIDTH, group=group, dtype=dtype, **options)
            layer.load_dense(dense.weight)
            ids = torch.randint(0, vocab, leading)
            # Small whole numbers, of which no sum is rounded: the order of summands does not matter.
            weight = torch.randint(-2, 3, (*leading, WIDTH)).to(dtype)
            y, wanted = layer(ids), dense(ids)
            if "scale" in options:
                wanted = wanted * options["scale"]
            (wanted * weight).sum().backward()
            if options.get("sequence_parallel"):
                dim = int(layer.batch_first)
                wanted, weight = (
                    t.tensor_split(group.size, dim)[group.rank] for t in (wanted, weight)
                )
            assert torch.equal(y, wanted), (group, dtype)
            (y * weight).sum().backward()
            whole = layer.placements["weight"].gather(layer.weight.grad)
            assert torch.equal(whole, dense.weight.grad), (group, dtype)
            digests.append(digest(whole))
            if not options.get("sequence_parallel"):
                digests.append(digest(y))
    return digests


CASES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((4, 5), {"padding_idx": 0}),
    ((7,), {"scale": 2.0}),
    ((), {}),
    ((0, 3), {}),
    ((5, 2), {"sequence_parallel": True, "padding_idx": 1}),
    ((2, 5), {"sequence_parallel": True, "batch_first": True, "scale": 0.5}),
    ((1, 2), {"sequence_parallel": True}),
    ((5,), {"sequence_parallel": True}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_of_the_unsplit_lookup(world, case):
    for size in (1, 2, 3, 4):
        for vocab in (2, 13):
            results = world(size).run(compare, vocab, *case)
            assert all(result == results[0] for result in results), "ranks have different bits"


def test_refusals():
    group = ParallelGroup()
    layer = VocabParallelEmbedding(4, 2, group=group)
    for ids in ([4], [-1], [0, 3, 99]):
        with pytest.raises(ShapeError, match=r"outside the vocabulary 0\.\.3"):
            layer(torch.tensor(ids))
    layer = VocabParallelEmbedding(4, 2, group=group, sequence_parallel=True)
    with pytest.raises(ShapeError, match="no sequence to divide"):
        layer(torch.tensor(1))
    layer = VocabParallelEmbedding(4, 2, group=group, sequence_parallel=True, batch_first=True)
    with pytest.raises(ShapeError, match="no sequence to divide"):
        layer(torch.tensor([1]))
