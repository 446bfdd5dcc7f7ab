"""Caches: the same tokens in any pieces give the same numbers as at once, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tp_kernels.comm import ParallelGroup, ShapeError, UnsupportedError
from tp_kernels.layers import KVCache, ParallelAttention, RotaryOptions, StaticKVCache

LENGTH = 23
PIECES = [3, 1, 1, 6, 1, 1, 1, 4, 5]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 4},
    "window_of_one": {"sliding_window": 1},
    "alibi": {"alibi": True, "rotary": None},
    "sinks": {"sinks": True, "softcap": 0.8, "qk_norm": "rms"},
    "sinks_window": {"sinks": True, "sliding_window": 5, "rotary": RotaryOptions(interleaved=True)},
    "fused": {"fused": True, "layout": "groups"},
}


def layer_of(group: ParallelGroup, **options: Any) -> ParallelAttention:
    torch.manual_seed(5)
    layer = ParallelAttention(20, 5, 2, 4, group=group, dtype=torch.float64, **options)
    if layer.sinks is not None:
        layer.sinks.data.copy_(torch.randn(5).double()[slice(*layer.shard.q)])
    return layer


def pieces(layer: ParallelAttention, x: Tensor, cache: KVCache, **call: Any) -> Tensor:
    """x [b, s, H] piece by piece; a mask or positions are those of the tokens so far or of the piece."""
    outputs = []
    at = 0
    for size in PIECES:
        now = dict(call)
        if "attention_mask" in call:
            now["attention_mask"] = call["attention_mask"][..., : at + size]
        if "position_ids" in call:
            now["position_ids"] = call["position_ids"][:, at : at + size]
        outputs.append(layer(x[:, at : at + size], cache=cache, **now))
        at += size
    assert (at, cache.length) == (LENGTH, LENGTH)
    return torch.cat(outputs, dim=1)


def caches(options: dict[str, Any]) -> list[KVCache]:
    found = [KVCache(), StaticKVCache(2, LENGTH), StaticKVCache(2, 64)]
    window = options.get("sliding_window")
    if window:  # 6 is the longest piece
        found += [StaticKVCache(2, size, window=window) for size in (5 + window, 6 + window, 40)]
        found.append(StaticKVCache(2, 7 + window, window=window + 1))
    return found


def decode(name: str) -> list[float]:
    options = OPTIONS[name]
    with ParallelGroup(timeout=60, provider="none") as group, torch.no_grad():
        layer = layer_of(group, **options)
        x = torch.randn(2, LENGTH, 20, dtype=torch.float64)
        whole = layer(x)
        return [float((pieces(layer, x, c) - whole).abs().max()) for c in caches(options)]


@pytest.mark.parametrize("name", OPTIONS)
def test_pieces_are_the_whole(world, name):
    for size in (1, 3):
        for errors in world(size).run(decode, name):
            assert len(errors) == (7 if "window" in name else 3)
            assert max(errors) < 1e-14


def decode_padded(window: int | None) -> list[float]:
    """Two texts, the second shorter by 5 and padded on the left, against each alone."""
    with ParallelGroup(timeout=60, provider="none") as group, torch.no_grad():
        layer = layer_of(group, sliding_window=window)
        x = torch.randn(2, LENGTH, 20, dtype=torch.float64)
        mask = torch.ones(2, 1, 1, LENGTH, dtype=torch.bool)
        mask[1, ..., :5] = False
        positions = (mask[:, 0, 0].cumsum(-1) - 1).clamp(min=0)
        alone = [layer(x[:1]), layer(x[1:, 5:])]
        errors = []
        for cache in caches({"sliding_window": window}):
            y = pieces(layer, x, cache, attention_mask=mask, position_ids=positions)
            errors += [float((y[:1] - alone[0]).abs().max())]
            errors += [float((y[1:, 5:] - alone[1]).abs().max())]
        return errors


@pytest.mark.parametrize("window", [None, 4])
def test_texts_of_unequal_length(world, window):
    for size in (1, 2):
        for errors in world(size).run(decode_padded, window):
            assert max(errors) < 1e-14


def edit() -> list[float]:
    """crop, reorder and reset, then more tokens, against the texts that result."""
    with ParallelGroup(timeout=60, provider="none") as group, torch.no_grad():
        layer = layer_of(group)
        x, y = torch.randn(2, 2, 9, 20, dtype=torch.float64)
        errors = []
        for cache in (KVCache(), StaticKVCache(2, 9)):
            layer(y, cache=cache)
            cache.reset()
            layer(x[:, :6], cache=cache)
            cache.crop(4)
            ours = layer(y[:, 4:7], cache=cache)
            wanted = layer(torch.cat((x[:, :4], y[:, 4:7]), 1))[:, 4:]
            errors.append(float((ours - wanted).abs().max()))
            cache.reorder(torch.tensor([1, 1]))
            ours = layer(x[:, 7:], cache=cache)
            both = torch.cat((x[:, :4], y[:, 4:7]), 1)[[1, 1]]
            wanted = layer(torch.cat((both, x[:, 7:]), 1))[:, 7:]
            errors.append(float((ours - wanted).abs().max()))
        return errors


def test_crop_reorder_reset(world):
    for size in (1, 2):
        for errors in world(size).run(edit):
            assert max(errors) < 1e-14


def cross() -> tuple[list[float], int]:
    """Keys of the context are made once and serve later calls, which do not bring it."""
    with ParallelGroup(timeout=60, provider="none") as group, torch.no_grad():
        layer = layer_of(
            group, context_size=7, causal=False, rotary=None, qk_norm="rms", sinks=True
        )
        x = torch.randn(2, 5, 20, dtype=torch.float64)
        context = torch.randn(2, 6, 7, dtype=torch.float64)
        mask = torch.rand(2, 1, 1, 6) < 0.6
        calls = []
        layer.k_proj.register_forward_hook(lambda *_: calls.append(1))
        whole = layer(x, context=context, attention_mask=mask)
        errors = []
        for cache in (KVCache(), StaticKVCache(2, 6)):
            first = layer(x[:, :2], context=context, cache=cache, attention_mask=mask)
            rest = layer(x[:, 2:], cache=cache, attention_mask=mask)
            errors.append(float((torch.cat((first, rest), 1) - whole).abs().max()))
        return errors, len(calls)


def test_cache_of_a_context(world):
    for size in (1, 2):
        for errors, calls in world(size).run(cross):
            assert max(errors) < 1e-14
            assert calls == 3  # once without a cache, once for each cache


def tokens(batch: int, length: int, value: float = 0.0) -> Tensor:
    return torch.full((batch, 2, length, 3), float(value)) + torch.arange(length)[:, None]


def test_static_memory_stays():
    cache = StaticKVCache(2, 8, window=3)
    places = set()
    for step in range(20):
        keys, values = cache.append(tokens(2, 1, step), -tokens(2, 1, step))
        places.add(keys.untyped_storage().data_ptr())
        assert keys.untyped_storage().nbytes() == 2 * 2 * 8 * 3 * 4
        kept = min(step + 1, 3)
        wanted = torch.arange(step + 1 - kept, step + 1.0)
        assert keys[0, 0, -kept:, 0].tolist() == wanted.tolist()
        assert values[1, 1, -kept:, 2].tolist() == (-wanted).tolist()
        assert (cache.length, cache.stored) == (step + 1, keys.shape[2])
    cache.reset()
    places.add(cache.append(tokens(2, 8), tokens(2, 8))[0].untyped_storage().data_ptr())
    assert len(places) == 1


def test_growth_is_by_doubling():
    cache = KVCache()
    places = set()
    for step in range(1000):
        keys, _ = cache.append(tokens(1, 1, step), tokens(1, 1, step))
        places.add(keys.untyped_storage().nbytes())
    assert len(places) == 5  # 64, 128, ..., 1024
    assert keys[0, 0, :, 0].tolist() == list(range(1000))


def test_refusals():
    full = StaticKVCache(2, 4)
    full.append(tokens(2, 3), tokens(2, 3))
    with pytest.raises(ShapeError, match="larger max_length"):
        full.append(tokens(2, 2), tokens(2, 2))
    assert (full.length, full.stored) == (3, 3)  # as before
    with pytest.raises(ShapeError, match="3 sequences"):
        StaticKVCache(2, 4).append(tokens(3, 1), tokens(3, 1))
    for other in (tokens(1, 1), tokens(2, 1).double(), tokens(2, 1)[..., :2], tokens(2, 1)[:, :1]):
        for cache in (full, KVCache()):
            if not cache.length:
                cache.append(tokens(2, 3), tokens(2, 3))
            with pytest.raises(ShapeError, match=r"3 sequences|1 sequences|reset\(\) it"):
                cache.append(other, other)
    slid = StaticKVCache(2, 5, window=4)
    for _ in range(4):
        slid.append(tokens(2, 2), tokens(2, 2))
    with pytest.raises(ShapeError, match=r"crop\(4\)"):
        slid.crop(4)  # its window would need tokens 1, 2 and 3
    for length in (-1, 9):
        with pytest.raises(ShapeError, match="crop"):
            slid.crop(length)
    with pytest.raises(ShapeError, match="window"):
        StaticKVCache(2, 4, window=5)
    with pytest.raises(ShapeError, match="positive"):
        StaticKVCache(0, 4)
    with pytest.raises(ShapeError, match="reorder"):
        full.reorder(torch.tensor([0, 1, 0]))
    with pytest.raises(ShapeError, match="empty"):
        KVCache().view()
    wanted = tokens(2, 1).requires_grad_()
    with pytest.raises(UnsupportedError, match="no gradients"):
        KVCache().append(wanted, wanted)
    with torch.no_grad():
        KVCache().append(wanted, wanted)
    layer = ParallelAttention(8, 2, group=ParallelGroup(), sliding_window=4)
    x = torch.randn(1, 1, 8)
    with torch.no_grad():
        for window in (3, 2):
            with pytest.raises(UnsupportedError, match="forgets too early"):
                layer(x, cache=StaticKVCache(1, 9, window=window))
        layer(x, cache=StaticKVCache(1, 9, window=4))
    with pytest.raises(UnsupportedError, match="no gradients"):
        layer(x, cache=KVCache())
