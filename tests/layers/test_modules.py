"""Single layers: against their dense counterparts, their options, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tp_kernels.comm import ParallelGroup, ShapeError, UnsupportedError
from tp_kernels.layers import (
    ColumnParallelLinear,
    ParallelLMHead,
    ParallelMLP,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    placements,
)


def gathered_weights(size: int) -> dict[str, Tensor]:
    """Unsplit weights of freshly initialised layers: equal seeds must give equal weights."""
    with ParallelGroup(timeout=30) as group:
        torch.manual_seed(11)
        layers = nn.ModuleDict(
            {
                "column": ColumnParallelLinear(5, 7, group=group),
                "row": RowParallelLinear(7, 5, group=group),
                "embedding": VocabParallelEmbedding(11, 4, group=group),
                "qkv": QKVParallelLinear(12, 6, 2, group=group, bias=True),
                "mlp": ParallelMLP(6, 9, gated=False, activation="gelu_tanh", group=group),
            }
        )
        return {name: place.gather(p) for name, p, place in placements(layers)}


def test_initialisation_does_not_depend_on_the_world_size(world):
    (single,) = world(1).run(gathered_weights, 1)
    for size in (2, 3):
        for rank in world(size).run(gathered_weights, size):
            assert rank.keys() == single.keys()
            assert all(torch.equal(rank[name], single[name]) for name in single)


def column_outputs(sequence_parallel: bool) -> dict[str, Tensor]:
    with ParallelGroup(timeout=30) as group:
        torch.manual_seed(3)
        dense = nn.Linear(6, 7)
        x = torch.randn(5, 2, 6)
        column = ColumnParallelLinear(
            6, 7, group=group, gather_output=True, sequence_parallel=sequence_parallel
        )
        column.load_dense(dense.weight, dense.bias)
        rows = 5 if sequence_parallel else None
        mine = torch.tensor_split(x, group.size)[group.rank] if sequence_parallel else x
        head = ParallelLMHead(6, 7, group=group)
        head.load_dense(dense.weight)
        return {
            "dense": dense(x),
            "column": column(mine, rows),
            "dense_head": nn.functional.linear(x, dense.weight),
            "head": head(x),
        }


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gathered_output(world, sequence_parallel):
    for rank in world(3).run(column_outputs, sequence_parallel):
        torch.testing.assert_close(rank["column"], rank["dense"], rtol=0, atol=1e-6)
        torch.testing.assert_close(rank["head"], rank["dense_head"], rtol=0, atol=1e-6)


def mlp_errors(activation: str, gated: bool) -> float:
    """Largest output error of a sharded MLP against plain float64."""
    with ParallelGroup(timeout=30, provider="none") as group:
        torch.manual_seed(4)
        options = {"activation": activation, "gated": gated, "bias": True, "dtype": torch.float64}
        mlp = ParallelMLP(6, 7, group=group, **options)
        torch.manual_seed(4)
        whole = ParallelMLP(6, 7, group=_alone(), **options)
        full = {name: p for name, p, _ in placements(whole)}
        x = torch.randn(3, 6, dtype=torch.float64)
        act = {
            "gelu": nn.GELU(),
            "gelu_tanh": nn.GELU(approximate="tanh"),
            "silu": nn.SiLU(),
            "relu": nn.ReLU(),
        }[activation]
        up = nn.functional.linear(x, full["up_proj.weight"], full["up_proj.bias"])
        if gated:
            gate = nn.functional.linear(x, full["gate_proj.weight"], full["gate_proj.bias"])
            up = act(gate) * up
        else:
            up = act(up)
        y = nn.functional.linear(up, full["down_proj.weight"], full["down_proj.bias"])
        return float((mlp(x) - y).abs().max())


def _alone() -> ParallelGroup:
    """A group of this process only, beside the world's."""
    import torch.distributed as dist

    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return ParallelGroup(groups[dist.get_rank()])


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu"])
@pytest.mark.parametrize("gated", [False, True])
def test_mlp_activations(world, activation, gated):
    assert max(world(2).run(mlp_errors, activation, gated)) < 1e-14


def embeddings(vocabulary: int) -> list[bool]:
    """Lookups and gradients have the exact bits of nn.Embedding."""
    with ParallelGroup(timeout=30) as group:
        torch.manual_seed(7)
        dense = nn.Embedding(vocabulary, 3, padding_idx=0)
        layer = VocabParallelEmbedding(vocabulary, 3, padding_idx=0, group=group)
        layer.load_dense(dense.weight)
        ids = torch.randint(0, vocabulary, (4, 5))
        y, expected = layer(ids), dense(ids)
        weight = torch.randn_like(y)
        (y * weight).sum().backward()
        (expected * weight).sum().backward()
        whole = layer.placements["weight"].gather(layer.weight.grad)
        return [torch.equal(y, expected), torch.equal(whole, dense.weight.grad)]


@pytest.mark.parametrize("vocabulary", [2, 7, 50])
def test_embedding_bits(world, vocabulary):
    for size in (1, 2, 3):
        assert world(size).run(embeddings, vocabulary) == [[True, True]] * size


def test_refusals():
    group = ParallelGroup()
    with pytest.raises(ShapeError, match="outside the vocabulary"):
        VocabParallelEmbedding(4, 2, group=group)(torch.tensor([4]))
    with pytest.raises(UnsupportedError, match="activation='swish'"):
        ParallelMLP(8, 8, activation="swish", group=group)
    with pytest.raises(UnsupportedError, match="rows="):
        ColumnParallelLinear(4, 4, group=group)(torch.randn(2, 4), rows=2)
    with pytest.raises(ShapeError, match="do not cover"):
        RowParallelLinear(4, 4, group=group, ranges=[(0, 3)])
