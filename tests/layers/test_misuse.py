"""What users do to layers that is easy to get wrong: refused, or right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tp_kernels.comm import ParallelGroup, ShapeError, UnsupportedError, all_gather
from tp_kernels.layers import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelDropout,
    RandomStreams,
    RotaryOptions,
    VocabParallelEmbedding,
    clip_grad_norm_,
    finalize_gradients,
    main_grads_to_grads,
    use_main_grads,
)
from tp_kernels.ops import gather_features


def sizes_that_do_not_fit() -> None:
    with ParallelGroup(timeout=30) as group:
        x = torch.ones(2, 3 - group.rank)  # 3 and 2 features
        for sizes in ([2, 3], [3, 3, 2], [5]):
            with pytest.raises(ShapeError, match="one for each rank"):
                gather_features(x, sizes, group=group)
        with pytest.raises(ShapeError, match="one for each rank"):
            all_gather(x.t(), group, counts=[2, 3])
        assert gather_features(x, [3, 2], group=group).shape == (2, 5)


def test_sizes_of_gathered_parts(world):
    world(2).run(sizes_that_do_not_fit)
    with pytest.raises(ShapeError, match="one for each rank"):
        gather_features(torch.ones(2, 3), [4], group=ParallelGroup())


def learned_bias(heads: int) -> Tensor:
    with ParallelGroup(timeout=30, provider="none") as group:
        torch.manual_seed(3)
        layer = ParallelAttention(10, 5, 2, 4, group=group, dtype=torch.float64)
        x = torch.randn(2, 6, 10, dtype=torch.float64)
        bias = torch.randn(1, heads, 6, 6, dtype=torch.float64, requires_grad=True)
        layer(x, attention_mask=bias).square().sum().backward()
        return bias.grad


@pytest.mark.parametrize("heads", [1, 5])
def test_learned_masks_get_the_gradient_of_all_heads(world, heads):
    (whole,) = world(1).run(learned_bias, heads)
    for gradient in world(3).run(learned_bias, heads):
        torch.testing.assert_close(gradient, whole, rtol=0, atol=1e-13)


def padding_from_the_end() -> Tensor:
    with ParallelGroup(timeout=30) as group:
        layer = VocabParallelEmbedding(10, 4, padding_idx=-1, group=group)
        layer(torch.tensor([[9, 1, 9]])).sum().backward()
        return layer.placements["weight"].gather(layer.weight.grad)


def test_padding_idx_is_counted_from_the_end(world):
    for size in (1, 2):
        for gradient in world(size).run(padding_from_the_end):
            assert gradient[9].tolist() == [0] * 4 and gradient[1].tolist() == [1] * 4
    with pytest.raises(ShapeError, match="padding_idx=10"):
        VocabParallelEmbedding(10, 4, padding_idx=10, group=ParallelGroup(), device="meta")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("which", ["input", "gradient"])
def test_what_a_delayed_gradient_is_made_of_must_not_change(which, bias):
    layer = ColumnParallelLinear(6, 4, bias, group=ParallelGroup(), delay_wgrad=True)
    x, dy = torch.randn(3, 6), torch.randn(3, 4)
    layer(x).backward(dy)
    (x if which == "input" else dy).zero_()
    with pytest.raises(UnsupportedError, match="written to in place"):
        layer.backward_dw()


def test_copies_of_a_layer_draw_other_masks():
    streams = RandomStreams(3, group=ParallelGroup())
    layer = ParallelDropout(0.5, group=streams.group, streams=streams)
    twin = copy.deepcopy(layer)
    assert twin.streams is streams
    x = torch.ones(4, 64)
    assert not torch.equal(layer(x), twin(x))


def test_tables_of_transformers_are_refused():
    rotary = RotaryOptions(dim=8)
    layer = ParallelAttention(32, 2, head_dim=16, rotary=rotary, group=ParallelGroup())
    x = torch.randn(1, 5, 32)
    cos, sin = layer.rotary(torch.arange(5))
    assert torch.equal(layer(x, rotary=(cos, sin)), layer(x))
    with pytest.raises(ShapeError, match="a column for each pair"):
        layer(x, rotary=(cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)))


def trained(main: bool) -> list[Tensor]:
    """Weights after two steps of two micro-batches."""
    with ParallelGroup(timeout=30) as group:
        torch.manual_seed(8)
        layer = ColumnParallelLinear(5, 7, group=group)
        norm = nn.LayerNorm(5)
        model = nn.Sequential(norm, layer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            if main:
                use_main_grads(model)
            else:
                optimizer.zero_grad()
            for _ in range(2):
                model(torch.randn(3, 5)).square().sum().backward()
            finalize_gradients(model)
            clip_grad_norm_(model, 0.5)
            if main:
                main_grads_to_grads(model)
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]


def test_an_optimizer_that_reads_grad_after_main_grad(world):
    for size in (1, 2):
        plain, main = world(size).run(trained, False), world(size).run(trained, True)
        for one, other in zip(plain, main, strict=True):
            for a, b in zip(one, other, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def wrapped_projection() -> None:
    """An adapter around one of several layers does not hide its delayed gradients."""

    class Wrap(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
            return self.inner(*args, **kwargs)

    with ParallelGroup(timeout=30) as group:
        layer = ParallelAttention(8, 4, group=group, delay_wgrad=True)
        layer.q_proj = Wrap(layer.q_proj)
        layer(torch.randn(1, 3, 8)).sum().backward()
        layer.backward_dw()
        assert layer.q_proj.inner.weight.grad is not None


def test_delayed_gradients_of_wrapped_projections(world):
    world(2).run(wrapped_projection)
