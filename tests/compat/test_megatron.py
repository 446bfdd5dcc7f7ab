"""A model as users of Megatron write it, on our layers by a change of imports, against dense float64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.oracle import digest
from tp_kernels import ParallelGroup, UnsupportedError
from tp_kernels.compat.megatron import (
    ColumnParallelLinear,
    RNGStatesTracker,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)
from tp_kernels.layers import placements

HEADS, HEAD, WORDS = 12, 2, 37
HIDDEN, INNER = HEADS * HEAD, 26
TOKENS, BATCH = 12, 2
SMOOTHING = 0.1


def init_method(weight: Tensor) -> None:
    nn.init.normal_(weight, std=0.3)


class MLP(nn.Module):
    """Gate and up in one weight of two blocks (stride=2), bias added by hand."""

    def __init__(self, config: Any, tp_group: Any) -> None:
        super().__init__()
        self.linear_fc1 = ColumnParallelLinear(
            HIDDEN,
            2 * INNER,
            config=config,
            init_method=init_method,
            bias=True,
            gather_output=False,
            skip_bias_add=True,
            stride=2,
            tp_comm_buffer_name="fc1",
            tp_group=tp_group,
        )
        self.linear_fc2 = RowParallelLinear(
            INNER,
            HIDDEN,
            config=config,
            init_method=init_method,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=tp_group,
        )

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        intermediate, bias = self.linear_fc1(hidden_states)
        gate, up = torch.chunk(intermediate + bias, 2, dim=-1)
        return self.linear_fc2(F.silu(gate) * up)


class SelfAttention(nn.Module):
    def __init__(self, config: Any, tp_group: Any) -> None:
        super().__init__()
        self.query_key_value = ColumnParallelLinear(
            HIDDEN, 3 * HIDDEN, config=config, init_method=init_method, tp_group=tp_group
        )
        self.dense = RowParallelLinear(
            HIDDEN,
            HIDDEN,
            config=config,
            init_method=init_method,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=tp_group,
        )

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        mixed, _ = self.query_key_value(hidden_states)  # [s, b, np * 3 * hn]
        heads = mixed.shape[-1] // (3 * HEAD)
        q, k, v = mixed.view(*mixed.shape[:2], heads, 3 * HEAD).chunk(3, dim=-1)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(context.permute(2, 0, 1, 3).flatten(2))


class TransformerLayer(nn.Module):
    def __init__(self, config: Any, tp_group: Any) -> None:
        super().__init__()
        self.input_layernorm = layer_norm(config)
        self.self_attention = SelfAttention(config, tp_group)
        self.pre_mlp_layernorm = layer_norm(config)
        self.mlp = MLP(config, tp_group)

    def forward(self, hidden_states: Tensor) -> Tensor:
        output, bias = self.self_attention(self.input_layernorm(hidden_states))
        assert bias is None
        hidden_states = hidden_states + output
        output, bias = self.mlp(self.pre_mlp_layernorm(hidden_states))
        return hidden_states + (output + bias)


def layer_norm(config: Any) -> nn.LayerNorm:
    norm = nn.LayerNorm(HIDDEN, dtype=config.params_dtype)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


class GPT(nn.Module):
    def __init__(self, config: Any, tp_group: Any) -> None:
        super().__init__()
        self.config, self.tp_group = config, tp_group
        self.word_embeddings = VocabParallelEmbedding(
            WORDS,
            HIDDEN,
            init_method=init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
            tp_group=tp_group,
        )
        self.layer = TransformerLayer(config, tp_group)
        self.final_layernorm = layer_norm(config)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.word_embeddings(ids)
        if not self.config.sequence_parallel:
            x = x.transpose(0, 1).contiguous()
        x = self.final_layernorm(self.layer(x))
        if self.config.sequence_parallel:
            x = gather_from_sequence_parallel_region(x, group=self.tp_group)
        else:
            x = copy_to_tensor_model_parallel_region(x, group=self.tp_group)
        logits = torch.matmul(x, self.word_embeddings.weight.t())
        loss = vocab_parallel_cross_entropy(
            logits, labels.transpose(0, 1), SMOOTHING, self.tp_group, vocab_size=WORDS
        )
        return loss.transpose(0, 1)


def dense_loss(full: dict[str, Tensor], ids: Tensor, labels: Tensor) -> Tensor:
    """The same model on unsplit weights; smoothing over the whole vocabulary. [b, s]."""

    def linear(y: Tensor, name: str) -> Tensor:
        return y @ full[f"{name}.weight"].t() + full[f"{name}.bias"]

    def norm(y: Tensor, name: str) -> Tensor:
        y = y - y.mean(-1, keepdim=True)
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return y * full[f"{name}.weight"] + full[f"{name}.bias"]

    x = full["word_embeddings.weight"][ids]
    y = linear(norm(x, "layer.input_layernorm"), "layer.self_attention.query_key_value")
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    heads = []
    for head in y.split(3 * HEAD, -1):
        q, k, v = head.split(HEAD, -1)
        scores = (q @ k.mT / math.sqrt(HEAD)).masked_fill(~seen, -math.inf)
        heads.append(scores.softmax(-1) @ v)
    x = x + linear(torch.cat(heads, -1), "layer.self_attention.dense")
    y = linear(norm(x, "layer.pre_mlp_layernorm"), "layer.mlp.linear_fc1")
    gate, up = y[..., :INNER], y[..., INNER:]
    x = x + linear(gate * torch.sigmoid(gate) * up, "layer.mlp.linear_fc2")
    logits = norm(x, "final_layernorm") @ full["word_embeddings.weight"].t()
    # 1 - smoothing for the label, the rest for the WORDS - 1 others alike
    target = torch.full((*labels.shape, WORDS), SMOOTHING / (WORDS - 1), dtype=x.dtype)
    target.scatter_(-1, labels.unsqueeze(-1), 1 - SMOOTHING)
    return -(target * logits.log_softmax(-1)).sum(-1)


def config_of(sequence_parallel: bool, dtype: torch.dtype, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=True,
        **more,
    )


def unsplit(model: nn.Module, gradient: bool) -> dict[str, Tensor]:
    """Weights or gradients; what has no placement is whole."""
    result = {n: p.grad if gradient else p.detach() for n, p in model.named_parameters()}
    for name, _, placement in placements(model):
        result[name] = placement.gather(result[name])
    return result


def train_step(sp: bool) -> str:
    torch.manual_seed(31)
    ids, labels = torch.randint(0, WORDS, (2, BATCH, TOKENS))
    weight = torch.randn(BATCH, TOKENS, dtype=torch.float64)
    with ParallelGroup(provider="none", timeout=60) as group:
        model = GPT(config_of(sp, torch.float64), group)
        full = {name: w.requires_grad_() for name, w in unsplit(model, False).items()}
        wanted = dense_loss(full, ids, labels)
        (wanted * weight).sum().backward()
        loss = model(ids, labels)
        (loss * weight).sum().backward()
        for parameter in model.parameters():  # as Megatron's finalize_model_grads
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad)
        near(loss.detach(), wanted.detach(), "loss")
        found = unsplit(model, True)
        assert found.keys() == full.keys()
        for name, gradient in found.items():
            near(gradient, full[name].grad, name)
        divided = {n for n, p in model.named_parameters() if getattr(p, "tensor_model_parallel", 0)}
        assert divided == {n for n, _, place in placements(model) if place.dim is not None}
        return digest(loss, *(found[name] for name in sorted(found)))


def near(got: Tensor, wanted: Tensor, name: str) -> None:
    """In float64, about 100 roundings on a path; relative to the largest element."""
    error = float((got - wanted).abs().max() / wanted.abs().max())
    assert error < 1e-13, (name, error)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gpt(world, size: int, sp: bool):
    assert len(set(world(size).run(train_step, sp))) == 1


def regions() -> None:
    """Each region forward and backward, against what its name says of plain collectives."""
    size, rank = dist.get_world_size(), dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    with ParallelGroup(provider="none", timeout=60) as group:

        def total(t: Tensor) -> Tensor:
            t = t.clone()
            dist.all_reduce(t)
            return t

        def joined(t: Tensor, dim: int) -> Tensor:
            parts = [torch.empty_like(t) for _ in range(size)]
            dist.all_gather(parts, t.contiguous())
            return torch.cat(parts, dim)

        def rows(t: Tensor) -> Tensor:
            return t.chunk(size)[rank]

        def features(t: Tensor) -> Tensor:
            return t.chunk(size, -1)[rank]

        gather = gather_from_sequence_parallel_region
        cases: list[tuple[Any, Any, Any]] = [
            (copy_to_tensor_model_parallel_region, lambda t: t, total),
            (reduce_from_tensor_model_parallel_region, total, lambda t: t),
            (scatter_to_tensor_model_parallel_region, features, lambda t: joined(t, -1)),
            (gather_from_tensor_model_parallel_region, lambda t: joined(t, -1), features),
            (scatter_to_sequence_parallel_region, rows, lambda t: joined(t, 0)),
            (gather, lambda t: joined(t, 0), lambda t: rows(total(t))),
            (
                lambda x, group: gather(x, tensor_parallel_output_grad=False, group=group),
                lambda t: joined(t, 0),
                rows,
            ),
            (
                reduce_scatter_to_sequence_parallel_region,
                lambda t: rows(total(t)),
                lambda t: joined(t, 0),
            ),
        ]
        for region, forward, backward in cases:
            x = torch.randn(2 * size, 3, size, generator=draw, dtype=torch.float64)
            x.requires_grad_()
            y = region(x, group=group)
            torch.testing.assert_close(y, forward(x.detach()), rtol=0, atol=1e-15)
            dy = torch.randn(y.shape, generator=draw, dtype=torch.float64)
            y.backward(dy)
            torch.testing.assert_close(x.grad, backward(dy), rtol=0, atol=1e-15)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_regions(world, size: int):
    world(size).run(regions)


def uneven_regions() -> None:
    with ParallelGroup(provider="none", timeout=60) as group:
        rank = group.rank
        x = torch.arange(10.0).view(5, 2)
        mine = x[[slice(0, 2), slice(2, 4), slice(4, 5)][rank]]
        full = gather_from_sequence_parallel_region(mine, group=group, output_split_sizes=[2, 2, 1])
        assert torch.equal(full, x)
        columns = x.t()[..., : rank + 1]
        y = gather_from_tensor_model_parallel_region(
            columns, group=group, output_split_sizes=[1, 2, 3]
        )
        assert torch.equal(y, x.t()[..., [0, 0, 1, 0, 1, 2]])
        with pytest.raises(UnsupportedError, match="as evenly as they can"):
            reduce_scatter_to_sequence_parallel_region(x, group, input_split_sizes=[1, 2, 2])


def test_uneven_regions(world):
    world(3).run(uneven_regions)


def padded_loss() -> None:
    """Equal shards of a vocabulary padded from 37 to 40 words: the padding is not seen."""
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 2, WORDS, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, WORDS, (5, 2), generator=draw)
    with ParallelGroup(provider="none", timeout=60) as group:
        padded = F.pad(logits, (0, 40 - WORDS), value=50.0).chunk(group.size, -1)[group.rank]
        loss = vocab_parallel_cross_entropy(padded, labels, 0.0, group, vocab_size=WORDS)
        wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        near(loss.flatten(), wanted, "loss")


def test_padded_vocabulary(world):
    world(4).run(padded_loss)


def initial_weights() -> Tensor:
    torch.manual_seed(5)
    with ParallelGroup(timeout=60) as group:
        layer = ColumnParallelLinear(
            6, 10, config=config_of(False, torch.float32), init_method=init_method, tp_group=group
        )
        assert not layer.bias.any()
        return layer.placements["weight"].gather(layer.weight)


def test_initialisation_does_not_depend_on_the_world_size(world):
    (single,) = world(1).run(initial_weights)
    assert single.std() > 0.1
    for weight in world(3).run(initial_weights):
        assert torch.equal(weight, single)


def draws() -> list[Tensor]:
    tracker = RNGStatesTracker(7)
    own, same = [], []
    for _ in range(2):
        with tracker.fork():
            own.append(torch.rand(4))
        with tracker.fork("data-parallel-rng"):
            same.append(torch.rand(4))
    states = tracker.get_states()
    with tracker.fork():
        after = torch.rand(4)
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(torch.rand(4), after)
    return [torch.cat(own), torch.cat(same)]


def test_random_states(world):
    one, other = world(2).run(draws)
    assert not torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1]) and one[1].unique().numel() == 8


def test_weight_at_call_and_main_grad():
    group = ParallelGroup()
    config = config_of(False, torch.float32, gradient_accumulation_fusion=True)
    options = {"config": config, "init_method": init_method, "tp_group": group}
    layer = ColumnParallelLinear(4, 6, skip_weight_param_allocation=True, bias=False, **options)
    assert layer.weight is None and not list(layer.parameters())
    with pytest.raises(UnsupportedError, match="pass weight="):
        layer(torch.ones(2, 4))
    weight = torch.randn(6, 4, requires_grad=True)
    y, bias = layer(torch.ones(2, 4), weight=weight)
    assert bias is None and torch.equal(y, torch.ones(2, 4) @ weight.t())

    layer = ColumnParallelLinear(4, 6, **options)
    layer.weight.main_grad = torch.ones(6, 4)
    layer(torch.ones(2, 4))[0].sum().backward()
    assert torch.equal(layer.weight.main_grad, torch.full((6, 4), 3.0))
    config.gradient_accumulation_fusion = False
    with pytest.raises(UnsupportedError, match="gradient_accumulation_fusion=False"):
        layer(torch.ones(2, 4))


@pytest.mark.parametrize(
    "arguments",
    [
        {"is_expert": True},
        {"pg_collection": object()},
        {"keep_master_weight_for_test": True},
        {"embedding_activation_buffer": []},
        {"grad_output_buffer": []},
        {"disable_grad_reduce": True},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_refused_arguments(arguments: dict[str, Any]):
    config = config_of(False, torch.float32)
    with pytest.raises(UnsupportedError, match=next(iter(arguments))):
        ColumnParallelLinear(
            4, 4, config=config, init_method=init_method, tp_group=ParallelGroup(), **arguments
        )


@pytest.mark.parametrize(
    "name", ["defer_embedding_wgrad_compute", "cpu_offloading", "init_model_with_meta_device"]
)
def test_refused_configurations(name: str):
    config = config_of(False, torch.float32, **{name: True})
    with pytest.raises(UnsupportedError, match=rf"config\.{name}"):
        VocabParallelEmbedding(
            4, 4, config=config, init_method=init_method, tp_group=ParallelGroup()
        )


def test_refused_calls():
    group = ParallelGroup()
    config = config_of(False, torch.float32)
    options = {"config": config, "init_method": init_method, "tp_group": group}
    with pytest.raises(UnsupportedError, match="gather_output=True with skip_bias_add"):
        ColumnParallelLinear(4, 4, gather_output=True, skip_bias_add=True, **options)
    with pytest.raises(UnsupportedError, match="runtime_gather_output"):
        ColumnParallelLinear(4, 4, **options)(torch.ones(1, 4), runtime_gather_output=True)
    with pytest.raises(UnsupportedError, match="use_global_buffer"):
        gather_from_sequence_parallel_region(torch.ones(1, 4), group=group, use_global_buffer=True)
