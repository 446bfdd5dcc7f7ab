"""Options of ParallelAttention beside its arithmetic: dropout, chunks, dtypes, compilation, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.oracle import digest
from tp_kernels.comm import ParallelGroup, ShapeError, UnsupportedError
from tp_kernels.layers import (
    DynamicScaling,
    KVCache,
    ParallelAttention,
    RandomStreams,
    RotaryOptions,
    _attend,
    backward_dw,
    finalize_gradients,
    placements,
)
from tp_kernels.ops.dropout import dropout

P = 0.4
FREE: dict[str, Any] = {"rotary": None, "causal": False}


def drop(size: int, sp: bool, seed: int) -> dict[str, Tensor]:
    """Output and gradients in training with dropout, from given streams or torch's generator."""
    with ParallelGroup(provider="none", timeout=60) as group:
        streams = RandomStreams(seed, group=group) if seed else None
        torch.manual_seed(8 + (0 if seed else 50 * group.rank))  # generators need not agree
        layer = attention(group, sequence_parallel=sp, dropout=P, streams=streams, sinks=True)
        draw = torch.Generator().manual_seed(3)
        x, dy = torch.randn(2, 2, 9, 20, generator=draw, dtype=torch.float64)
        if sp:
            x, dy = (t.transpose(0, 1).tensor_split(group.size)[group.rank] for t in (x, dy))
        x = x.clone().requires_grad_()
        torch.manual_seed(4 + group.rank)
        if streams is None:
            y = layer(x, rows=9 if sp else None)
        else:
            y = streams.checkpoint(layer, x, rows=9 if sp else None)
        y.backward(dy)
        finalize_gradients(layer)
        found = {n: place.gather(p.grad) for n, p, place in placements(layer)}
        whole = {"y": y.detach(), "dx": x.grad}
        if sp:
            from tp_kernels.ops import gather_rows

            whole = {
                n: gather_rows(t, group=group, rows=9).transpose(0, 1) for n, t in whole.items()
            }
        return found | whole


def attention(group: ParallelGroup, **options: Any) -> ParallelAttention:
    """5 query and 2 KV heads of 4 features, hidden 20, the same unsplit float64 weights everywhere."""
    layer = ParallelAttention(20, 5, 2, 4, group=group, dtype=torch.float64, **options)
    draw = torch.Generator().manual_seed(21)
    for _, parameter, place in placements(layer):
        full = torch.randn(place.shape, generator=draw, dtype=torch.float64) / 3
        parameter.data.copy_(place.slice(full))
    return layer


@pytest.mark.parametrize("seed", [0, 17])
def test_dropout_does_not_depend_on_the_world_size(world, seed):
    """Nor on sequence parallelism, and activation checkpointing replays it."""
    (alone,) = world(1).run(drop, 1, False, seed)
    for size in (2, 3, 4):
        for sp in (False, True):
            for rank in world(size).run(drop, size, sp, seed):
                for name, tensor in alone.items():
                    torch.testing.assert_close(rank[name], tensor, rtol=0, atol=1e-13, msg=name)


def test_dropout_is_that_of_the_op():
    """Against softmax, ops.dropout and product in float64; none in evaluation."""
    group = ParallelGroup()
    streams = RandomStreams(5, group=group)
    layer = attention(group, dropout=P, streams=streams, **FREE)
    x = torch.randn(2, 6, 20, dtype=torch.float64)
    y = layer(x)
    again = RandomStreams(5, group=group)
    with again.fork("same"):
        key = torch.randint(0, 2**63 - 1, (1,))[0]
    q, k, v = (
        nn.functional.linear(x, getattr(layer, f"{n}_proj").weight)
        .unflatten(-1, (-1, 4))
        .transpose(1, 2)
        for n in "qkv"
    )
    of_query = [0, 0, 0, 1, 1]
    weights = (q @ k[:, of_query].mT / 2).softmax(-1)
    mixed = dropout(weights, P, key=key) @ v[:, of_query]
    wanted = nn.functional.linear(mixed.transpose(1, 2).flatten(2), layer.o_proj.weight)
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-13)
    layer.eval()
    plain = nn.functional.linear(
        (weights @ v[:, of_query]).transpose(1, 2).flatten(2), layer.o_proj.weight
    )
    torch.testing.assert_close(layer(x), plain, rtol=0, atol=1e-13)
    assert not torch.equal(layer.train()(x), layer(x))  # each call draws again


def test_chunks_are_the_whole(monkeypatch):
    """Queries in chunks of 4: masks, windows and slopes go on where the last chunk ended."""
    group = ParallelGroup()
    mask = torch.rand(2, 1, 11, 11) < 0.7
    for options in (
        {"softcap": 0.9},
        {"softcap": 0.9, "sliding_window": 3},
        {"sinks": True, "alibi": True, "rotary": None},
        {"sinks": True, "causal": False, "sliding_window": 2},
    ):
        layer = attention(group, **options)
        x = torch.randn(2, 11, 20, dtype=torch.float64)
        results = []
        for chunk in (512, 4):
            monkeypatch.setattr(_attend, "CHUNK", chunk)
            leaf = x.clone().requires_grad_()
            layer.zero_grad()
            y = layer(leaf, attention_mask=mask)
            y.square().sum().backward()
            results.append([y, leaf.grad, *(p.grad.clone() for p in layer.parameters())])
        for ours, wanted in zip(*results, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)


def test_the_kernel_runs_unless_scores_are_needed(monkeypatch):
    group = ParallelGroup()
    calls = []
    kernel = nn.functional.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs["is_causal"])
        return kernel(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", counted)
    x = torch.randn(1, 3, 20, dtype=torch.float64)
    for options, way in (
        ({}, "kernel"),
        ({"sliding_window": 2}, "mask"),
        ({"alibi": True, "rotary": None}, "mask"),
        ({"softcap": 1.0}, "softcap"),
        ({"sinks": True}, "sinks"),
        ({"dropout": 0.5}, "dropout"),
        ({"sinks": True, "softcap": 1.0, "dropout": 0.1}, "softcap, sinks, dropout"),
    ):
        layer = attention(group, **options)
        calls.clear()
        layer(x)
        if way in ("kernel", "mask"):
            assert calls == [way == "kernel"]
            assert layer.explain().startswith("torch scaled_dot_product_attention")
        else:
            assert not calls
            assert layer.explain() == f"scores in memory, 512 queries at a time: {way}"
        if way == "dropout":
            layer.eval()(x)
            assert calls == [True]
            assert "torch scaled" in repr(layer)


def bias_gradient() -> tuple[Tensor, Tensor]:
    """Of a learned bias of the scores (T5), a mask of all heads that is complete on every rank."""
    with ParallelGroup(provider="none", timeout=60) as group:
        grads = []
        for softcap in (None, 1e9):  # the second takes the way with scores in memory
            layer = attention(group, softcap=softcap, rotary=None)
            draw = torch.Generator().manual_seed(3)
            x = torch.randn(2, 6, 20, generator=draw, dtype=torch.float64)
            bias = torch.randn(1, 5, 6, 6, generator=draw, dtype=torch.float64).requires_grad_()
            layer(x, attention_mask=bias).sin().sum().backward()
            grads.append(bias.grad)
        return grads[0], grads[1]


def test_gradient_of_a_learned_bias(world):
    (alone,) = world(1).run(bias_gradient)
    assert alone[0].abs().max() > 1e-2
    torch.testing.assert_close(*alone, rtol=0, atol=1e-7)
    for rank in world(3).run(bias_gradient):
        torch.testing.assert_close(rank[0], alone[0], rtol=0, atol=1e-13)
        torch.testing.assert_close(rank[1], alone[1], rtol=0, atol=1e-13)


def tables() -> list[bool]:
    """Tables made once for several layers; the bits of those that the layer makes."""
    with ParallelGroup(timeout=60) as group:
        layer = attention(group, rotary=RotaryOptions(dim=2, interleaved=True))
        x = torch.randn(2, 6, 20, dtype=torch.float64)
        ids = torch.randint(0, 50, (2, 6))
        shared = layer.rotary(ids)
        return [
            torch.equal(layer(x, position_ids=ids), layer(x, rotary=shared)),
            not torch.equal(layer(x), layer(x, rotary=shared)),
        ]


def test_tables_made_outside(world):
    assert world(2).run(tables) == [[True, True]] * 2


def sixteen(dtype: torch.dtype) -> list[tuple[str, float]]:
    """Error in units of eps(dtype), relative to the largest element; 16-bit parameters and inputs."""
    found = []
    with ParallelGroup(timeout=60) as group:
        for options in (
            {},
            {"softcap": 2.0, "sinks": True, "qk_norm": "rms"},
            {"alibi": True, "rotary": None},
        ):
            wide = attention(group, **options)
            for parameter in wide.parameters():
                parameter.data.copy_(parameter.to(dtype))
            narrow = attention(group, **options).to(dtype)
            narrow.load_state_dict(wide.state_dict())
            x = torch.randn(2, 40, 20, generator=torch.Generator().manual_seed(1)).to(dtype)
            with torch.no_grad():
                y, wanted = narrow(x), wide(x.double())
            assert y.dtype == dtype
            error = (y.double() - wanted).abs().max() / wanted.abs().max()
            found.append((str(options), float(error / torch.finfo(dtype).eps)))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(world, dtype):
    """Projections, angles, softmax and sum each round once: a handful of eps in all."""
    for size in (1, 2):
        for errors in world(size).run(sixteen, dtype):
            assert all(error < 8 for _, error in errors), errors


def test_packed_texts_scale_by_their_own_length():
    """Dynamic scaling looks at each text's length, as if it were alone."""
    rotary = RotaryOptions(scaling=DynamicScaling(3.0, 4))
    layer = attention(ParallelGroup(), rotary=rotary)
    x = torch.randn(1, 13, 20, dtype=torch.float64)
    packed = layer(x, cu_seqlens=torch.tensor([0, 3, 10, 13]))
    alone = torch.cat([layer(part) for part in x.split([3, 7, 3], dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-14)
    unscaled = attention(ParallelGroup())(x, cu_seqlens=torch.tensor([0, 3, 10, 13]))
    assert (packed - unscaled)[:, 3:10].abs().max() > 1e-4  # the one text that is longer than 4


def autocast() -> list[bool]:
    """Equal numbers in fp32 under autocast and in bf16 without it."""
    same = []
    with ParallelGroup(timeout=60) as group, torch.no_grad():
        for options in ({}, {"softcap": 30.0, "sinks": True, "scale": 4.0}):
            layer = attention(group, **options).bfloat16().float()
            x = torch.randn(2, 40, 20, generator=torch.Generator().manual_seed(1)).bfloat16()
            with torch.autocast("cpu", torch.bfloat16):
                y = layer(x.float())
            same.append(torch.equal(y, layer.bfloat16()(x)))
    return same


def test_autocast(world):
    """Rounds where 16-bit tensors round, and nowhere else: scores stay in fp32."""
    for size in (1, 2):
        assert world(size).run(autocast) == [[True, True]] * size


def test_masks_of_another_dtype():
    """torch's kernel for the CPU misreads an fp32 mask of float64 queries from 512 tokens on."""
    layer = attention(ParallelGroup(), causal=False)
    mask = torch.randn(600, 600)
    x = torch.randn(1, 600, 20, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(layer(x, attention_mask=mask), layer(x, attention_mask=mask.double()))


def delayed(sp: bool) -> list[bool]:
    with ParallelGroup(timeout=60) as group:
        results = []
        for late in (False, True):
            grads = []
            for fused in (False, True):
                layer = attention(group, sequence_parallel=sp, delay_wgrad=late, fused=fused)
                x = torch.randn(6, 2, 20, generator=torch.Generator().manual_seed(1)).double()
                mine = x.tensor_split(group.size)[group.rank] if sp else x
                y = layer(mine, rows=6 if sp else None)
                y.backward(torch.ones_like(y))
                if late:
                    assert layer.o_proj.weight.grad is None
                    backward_dw(layer) if fused else layer.backward_dw()
                grads += [p.grad for p in layer.parameters()]
            results.append(digest(*grads))
        return results[0] == results[1]


@pytest.mark.parametrize("sp", [False, True])
def test_delayed_weight_gradients(world, sp):
    assert all(world(2).run(delayed, sp))


def compiled() -> list[bool]:
    torch._dynamo.reset()
    same = []
    with ParallelGroup(timeout=60) as group:
        for options in ({}, {"softcap": 1.0, "sinks": True, "sliding_window": 3, "qk_norm": "rms"}):
            layer = attention(group, **options)
            x = torch.randn(2, 6, 20, generator=torch.Generator().manual_seed(1)).double()
            results = []
            for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
                layer.zero_grad()
                leaf = x.clone().requires_grad_()
                y = call(leaf)
                y.square().sum().backward()
                results.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
            same += [
                torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*results, strict=True)
            ]
    return same


def test_compiled_is_eager(world):
    for same in world(2).run(compiled):
        assert all(same)


def nothing() -> None:
    with ParallelGroup(timeout=60) as group:
        for sp in (False, True):
            for options in ({}, {"sinks": True, "dropout": P}, {"sliding_window": 2}):
                layer = attention(group, sequence_parallel=sp, batch_first=True, **options)
                for packed in (None, torch.tensor([0, 0, 0])):
                    x = torch.randn(1, 0, 20, dtype=torch.float64, requires_grad=True)
                    y = layer(x, rows=0 if sp else None, cu_seqlens=packed)
                    assert y.shape == x.shape
                    y.sum().backward()
                    finalize_gradients(layer)
                    assert all(not p.grad.any() for p in layer.parameters())


def test_no_tokens(world):
    world(2).run(nothing)


X = torch.randn(2, 3, 8)


def test_refused_at_construction():
    group = ParallelGroup()

    def refuse(match: str, error: type[Exception] = UnsupportedError, **options: Any) -> None:
        with pytest.raises(error, match=match):
            ParallelAttention(8, 2, group=group, **options)

    refuse("sliding_window=0", sliding_window=0)
    refuse("softcap=0", softcap=0.0)
    refuse("softcap=-1", softcap=-1.0)
    refuse("softcap=inf", softcap=math.inf)
    refuse("qk_norm_epsilon=1e-05 without", qk_norm_epsilon=1e-5)
    refuse("scale=0", scale=0.0)
    refuse("scale=inf", scale=math.inf)
    refuse("dropout=1.5", dropout=1.5)
    refuse("qk_norm='layer'", qk_norm="layer")
    refuse("alibi=True with rotary", alibi=True)
    refuse("context_size with rotary", context_size=8, causal=False)
    refuse("context_size with causal", context_size=8, rotary=None)
    refuse("context_size with causal", context_size=8, sliding_window=2, **FREE)
    refuse("context_size with causal", context_size=8, alibi=True, **FREE)
    refuse("fused=True with context_size", context_size=8, fused=True, **FREE)
    refuse("layout='groups' with fused=False", layout="groups")
    refuse("even number", ShapeError, head_dim=3)
    refuse("at most head_dim=4", ShapeError, rotary=RotaryOptions(dim=6))


def test_refused_at_the_call():
    group = ParallelGroup()
    plain = ParallelAttention(8, 2, group=group)
    spread = ParallelAttention(8, 2, group=group, sequence_parallel=True)
    bare = ParallelAttention(8, 2, group=group, rotary=None)
    cross = ParallelAttention(8, 2, group=group, context_size=8, **FREE)
    ids, ends = torch.arange(3), torch.tensor([0, 1, 3])

    def refuse(
        layer: ParallelAttention,
        match: str,
        error: type[Exception] = UnsupportedError,
        x: Tensor = X,
        **call: Any,
    ) -> None:
        with pytest.raises(error, match=match), torch.no_grad():
            layer(x, **call)

    refuse(plain, "three dimensions", ShapeError, x=X[0])
    refuse(spread, "KV cache under sequence_parallel", cache=KVCache())
    refuse(plain, "rows= has a meaning", rows=3)
    refuse(bare, "without rotary embedding", position_ids=ids)
    refuse(bare, "without rotary embedding", rotary=plain.rotary(ids))
    refuse(plain, "have been made", position_ids=ids, rotary=plain.rotary(ids))
    refuse(plain, "expected \\[s\\] or \\[b, s\\]", ShapeError, position_ids=torch.arange(4))
    refuse(plain, "expected \\[s\\] or \\[b, s\\]", ShapeError, position_ids=ids.expand(3, 3))
    refuse(plain, "cu_seqlens with a cache", x=X[:1], cu_seqlens=ends, cache=KVCache())
    refuse(
        plain, "cu_seqlens with an", x=X[:1], cu_seqlens=ends, attention_mask=torch.ones(3, 3) > 0
    )
    refuse(cross, "cu_seqlens with", x=X[:1], context=X[:1], cu_seqlens=ends)
    refuse(plain, "packed into one sequence", ShapeError, cu_seqlens=ends)
    for wrong in ([0, 1], [1, 3], [0, 2, 1, 3], [0, 4], [3]):
        refuse(plain, "ascending ends", ShapeError, x=X[:1], cu_seqlens=torch.tensor(wrong))
    refuse(plain, "context is given", context=X)
    refuse(cross, "context is missing")
    refuse(cross, "context is missing", cache=KVCache())
    refuse(cross, "three dimensions", ShapeError, context=X[0])
    refuse(cross, "2 sequences of x and 1 ", ShapeError, context=X[:1])
    refuse(plain, "context_rows", context_rows=3)
    cache = KVCache()
    with torch.no_grad():
        cross(X, context=X, cache=cache)
    refuse(cross, "holds it already", context=X, cache=cache)
    refuse(cross, "context_rows", context_rows=3, cache=cache)
    refuse(cross, "1 sequences of x and 2 ", ShapeError, x=X[:1], cache=cache)
    for shape in ((2, 3), (3, 2), (1, 3, 3, 3), (2, 2, 3, 4), (1, 1, 1, 3, 3)):
        refuse(plain, "attention_mask is", ShapeError, attention_mask=torch.zeros(shape))
    refuse(plain, "dtype torch.int64", attention_mask=torch.ones(2, 1, 1, 3).long())
