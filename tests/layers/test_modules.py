"""Single layers: against their dense counterparts, their options, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tp_kernels.comm import ParallelGroup, ShapeError, UnsupportedError
from tp_kernels.layers import (
    ColumnParallelLinear,
    KVCache,
    ParallelAttention,
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


def decode(sliding_window: int | None) -> tuple[Tensor, Tensor]:
    """The same tokens at once, and one by one (after a prompt of three) with a cache."""
    with ParallelGroup(timeout=30) as group, torch.no_grad():
        torch.manual_seed(5)
        layer = ParallelAttention(20, 5, 2, 4, sliding_window=sliding_window, group=group)
        x = torch.randn(2, 70, 20)
        cache = KVCache()
        steps = [layer(x[:, :3], cache=cache)]
        steps += [layer(x[:, at : at + 1], cache=cache) for at in range(3, 70)]
        return layer(x), torch.cat(steps, dim=1)


@pytest.mark.parametrize("sliding_window", [None, 4])
def test_kv_cache(world, sliding_window):
    for size in (1, 3):
        for whole, steps in world(size).run(decode, sliding_window):
            torch.testing.assert_close(steps, whole, rtol=0, atol=2e-6)


def masked() -> list[float]:
    """Boolean and additive masks that say what causal says; and a padded batch."""
    with ParallelGroup(timeout=30) as group, torch.no_grad():
        torch.manual_seed(6)
        causal = ParallelAttention(16, 4, group=group)
        free = ParallelAttention(16, 4, causal=False, group=group)
        free.load_state_dict(causal.state_dict())
        x = torch.randn(2, 9, 16)
        seen = torch.ones(9, 9, dtype=torch.bool).tril()
        additive = torch.zeros(9, 9).masked_fill(~seen, float("-inf"))
        padding = torch.ones(2, 1, 1, 9, dtype=torch.bool)
        padding[1, ..., :4] = False
        padded = causal(x, attention_mask=padding)
        short = causal(x[1:, 4:], position_ids=torch.arange(4, 9))
        pairs = [
            (free(x, attention_mask=seen), causal(x)),
            (free(x, attention_mask=additive), causal(x)),
            (padded[1:, 4:], short),
        ]
        return [float((a - b).abs().max()) for a, b in pairs]


def test_attention_masks(world):
    for size in (1, 2):
        for errors in world(size).run(masked):
            assert max(errors) < 1e-6


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
    attention = ParallelAttention(8, 2, group=group, sequence_parallel=True)
    with pytest.raises(UnsupportedError, match="KV cache under sequence_parallel"):
        attention(torch.randn(2, 1, 8), cache=KVCache())
    with pytest.raises(ShapeError, match="three dimensions"):
        attention(torch.randn(2, 8))
    with pytest.raises(ShapeError, match="outside the vocabulary"):
        VocabParallelEmbedding(4, 2, group=group)(torch.tensor([4]))
    with pytest.raises(ShapeError, match="not a multiple of 3 heads"):
        ParallelAttention(8, 3, group=group)
    with pytest.raises(ShapeError, match="even number of features"):
        ParallelAttention(9, 3, group=group)
    with pytest.raises(UnsupportedError, match="sliding_window"):
        ParallelAttention(8, 2, sliding_window=0, group=group)
    with pytest.raises(UnsupportedError, match="activation='swish'"):
        ParallelMLP(8, 8, activation="swish", group=group)
    with pytest.raises(UnsupportedError, match="rows="):
        ColumnParallelLinear(4, 4, group=group)(torch.randn(2, 4), rows=2)
    with pytest.raises(ShapeError, match="do not cover"):
        RowParallelLinear(4, 4, group=group, ranges=[(0, 3)])
