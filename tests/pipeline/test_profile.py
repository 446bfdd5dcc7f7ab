"""Costs of layers: bytes exactly, seconds by what the layers do."""

from __future__ import annotations

from time import sleep

import pytest
import torch
from torch import nn

from tests.pipeline import decoders
from tp_kernels.comm import ShapeError, UnsupportedError
from tp_kernels.pipeline.causal_lm import split_layers
from tp_kernels.pipeline.partition import partition
from tp_kernels.pipeline.profile import profile_layers, profile_units


@pytest.fixture(autouse=True)
def _one_thread():
    with decoders.one_thread():
        yield


class Sleepy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        sleep(forward)
        ctx.seconds = backward
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        sleep(ctx.seconds)
        return dy, None, None


class Sleep(nn.Module):
    def __init__(self, forward, backward):
        super().__init__()
        self.seconds = forward, backward

    def forward(self, x):
        return Sleepy.apply(x, *self.seconds)


def test_bytes_of_layers():
    """Kept: the input of a product, the output of a ReLU; weights are not activations."""
    layers = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2, bias=False), nn.Dropout(0.5))
    seen = []
    costs = profile_layers(layers, torch.randn(5, 6), progress=lambda *at: seen.append(at))
    assert [cost.parameter_bytes for cost in costs] == [4 * 28, 0, 4 * 8, 0]
    assert [cost.output_bytes for cost in costs] == [4 * 20, 4 * 20, 4 * 10, 4 * 10]
    assert [cost.activation_bytes for cost in costs[:3]] == [4 * 30, 4 * 20, 4 * 20]
    assert costs[0].name == "0 Linear"
    assert seen[0] == (1, 24) and seen[-1] == (24, 24)
    assert all(parameter.grad is None for parameter in layers.parameters())
    inference = profile_layers(layers, torch.randn(5, 6), backward=False)
    assert all(cost.backward == 0 and cost.activation_bytes == 0 for cost in inference)


def test_values_of_several_tensors():
    """Tuples and dicts pass between layers as between stages; integers and strings get no gradients."""

    class Two(nn.Module):
        def forward(self, x, n):
            return {"x": x * n, "y": x.sum(), "how": "twice"}

    class One(nn.Module):
        def forward(self, x, y, how):
            return x * y if how == "twice" else None

    costs = profile_layers([Two(), One()], (torch.randn(3), torch.tensor(2)), names=["two", "one"])
    assert [cost.name for cost in costs] == ["two", "one"]
    assert [cost.output_bytes for cost in costs] == [16, 12]


def test_seconds_are_of_the_right_layer(monkeypatch):
    """A clock that only sleeping moves: no other load of the machine counts."""
    clock = [0.0]

    def pass_time(seconds):
        clock[0] += seconds

    monkeypatch.setitem(Sleepy.forward.__globals__, "sleep", pass_time)
    layers = [Sleep(1.0, 2.0), Sleep(3.0, 0.5), Sleep(0.25, 8.0)]
    x = torch.randn(3, requires_grad=True)
    costs = profile_layers(layers, x, repeats=3, clock=lambda: clock[0])
    assert [(cost.forward, cost.backward) for cost in costs] == [
        (1.0, 2.0),
        (3.0, 0.5),
        (0.25, 8.0),
    ]
    assert partition(costs, 2).bounds == (0, 2, 3)
    # The input of the first layer needs no gradient unless it says so.
    assert profile_layers(layers, x.detach(), clock=lambda: clock[0])[0].backward == 0


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_units_of_a_model(kind):
    model = decoders.tiny(kind, layers=3)
    units = split_layers(model, range(6))
    ids = torch.randint(3, 101, (2, 10))
    train = profile_units(units, ids, repeats=1)
    assert [cost.name for cost in train] == ["embedding", "layer 0", "layer 1", "layer 2", "head"]
    assert all(cost.forward > 0 and cost.backward > 0 for cost in train)
    assert {cost.output_bytes for cost in train[:-1]} == {4 * 2 * 10 * 48}
    total = sum(p.nbytes for p in model.parameters())
    tied = train[-1].parameter_bytes if kind == "gpt2" else 0
    if kind == "gpt2":  # the head holds the embedding again, beside its norm
        tied = 4 * 101 * 48
    assert sum(cost.parameter_bytes for cost in train) == total + tied
    assert train[1].activation_bytes == train[2].activation_bytes > 4 * 2 * 10 * 48
    assert all(parameter.grad is None for parameter in model.parameters())

    heads = 6 if kind == "gpt2" else 2
    prefill = profile_units(units, ids, mode="prefill", repeats=2)
    decode = profile_units(iter(units), ids, mode="decode", repeats=2)
    for costs, tokens, passed in ((prefill, 10, 10), (decode, 11, 1)):
        assert costs[1].activation_bytes == 2 * 4 * 2 * tokens * heads * 8
        assert costs[1].output_bytes == 4 * 2 * passed * 48
        assert costs[-1].output_bytes == 4 * 2 * 101
        assert all(cost.backward == 0 for cost in costs)


def test_padding_reaches_the_layers():
    """A mask in the sample is used: an all-padding column changes what is kept."""
    units = split_layers(decoders.tiny("llama", layers=1), range(4))
    ids, mask = torch.randint(3, 101, (2, 10)), torch.ones(2, 10, dtype=torch.long)
    mask[0, :4] = 0
    for mode in ("train", "prefill", "decode"):
        assert len(profile_units(units, ids, attention_mask=mask, mode=mode, repeats=1)) == 3


def test_refusals():
    with pytest.raises(ShapeError, match="nothing to measure"):
        profile_layers([], torch.zeros(1))
    with pytest.raises(ShapeError, match="at least one repeat"):
        profile_units([], torch.zeros(2, 3), repeats=0)
    with pytest.raises(UnsupportedError, match="mode='magic'"):
        profile_units([], torch.zeros(2, 3), mode="magic")
