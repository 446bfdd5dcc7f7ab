"""QKVParallelLinear: separate and packed projections, their layouts, and which rank holds what."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tp_kernels.comm import ParallelGroup, ShapeError, UnsupportedError
from tp_kernels.comm.layout import split_range
from tp_kernels.layers import QKVParallelLinear, finalize_gradients, placements
from tp_kernels.layers.heads import kv_head, partition_heads
from tp_kernels.layers.qkv import packed_pieces

SHAPES = [(5, 2), (5, 1), (6, 3), (4, 4), (7, 3), (8, 2)]
LAYOUTS = {
    "separate": {},
    "blocks": {"fused": True, "layout": "blocks"},
    "groups": {"fused": True, "layout": "groups"},
}


def unsplit(heads: int, kv_heads: int, layout: str) -> tuple[list[Tensor], list[tuple[str, int]]]:
    """q, k, v [n * 3, 7] and the heads of a packed weight in order."""
    draw = torch.Generator().manual_seed(heads)
    sizes = (heads, kv_heads, kv_heads)
    parts = [torch.randn(n * 3, 7, generator=draw, dtype=torch.float64) for n in sizes]
    if layout == "groups":
        order = []
        for kv in range(kv_heads):
            order += [("q", q) for q in range(heads) if q * kv_heads // heads == kv]
            order += [("k", kv), ("v", kv)]
    else:
        order = [("q", i) for i in range(heads)]
        order += [("k", i) for i in range(kv_heads)] + [("v", i) for i in range(kv_heads)]
    return parts, order


def pack(parts: list[Tensor], order: list[tuple[str, int]]) -> Tensor:
    blocks = dict(zip("qkv", parts, strict=True))
    return torch.cat([blocks[name][3 * i : 3 * i + 3] for name, i in order])


def project(layout: str, sp: bool, batch_first: bool | None, stored_as: str) -> list[float]:
    """Largest error of outputs and gathered gradients for every shape that the ranks can hold."""
    worst = []
    with ParallelGroup(provider="none", timeout=60) as group:
        for heads, kv_heads in SHAPES:
            if group.size > heads:
                continue
            parts, order = unsplit(heads, kv_heads, stored_as)
            layer = QKVParallelLinear(
                7,
                heads,
                kv_heads,
                3,
                True,
                group=group,
                sequence_parallel=sp,
                batch_first=batch_first,
                dtype=torch.float64,
                **LAYOUTS[layout],
            )
            full = dict(zip(("q_proj", "k_proj", "v_proj"), parts, strict=True))
            if layout != "separate":
                full = {"qkv_proj": pack(parts, order)}
            for name, parameter, place in placements(layer):
                whole = full[name.split(".")[0]]
                whole = whole if name.endswith("weight") else whole[:, 0] / 2
                parameter.data.copy_(place.slice(whole))
            x = torch.randn(
                2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
            )
            leaf = x.clone().requires_grad_()
            leaves = [part.clone().requires_grad_() for part in parts]
            biases = [(part[:, 0] / 2).requires_grad_() for part in parts]
            wanted = [leaf @ w.T + b for w, b in zip(leaves, biases, strict=True)]
            dys = [torch.sin(torch.arange(y.numel()).double()).view_as(y) for y in wanted]
            torch.autograd.backward(wanted, dys)
            first = not sp if batch_first is None else batch_first
            start, stop = split_range(5, group.size, group.rank) if sp else (0, 5)
            mine = x[:, start:stop]
            mine = (mine if first else mine.transpose(0, 1)).clone().requires_grad_()
            ys = layer(mine, rows=5 if sp else None)
            shard = layer.shard
            spans = [slice(3 * a, 3 * b) for a, b in (shard.q, shard.kv, shard.kv)]
            # a KV head held twice is used twice: each holder contributes the gradient of its own queries
            share = [1.0, *[holders(heads, kv_heads, group.size)] * 2]
            local_dys = [
                dy[..., span] / n
                for dy, span, n in zip(dys, spans, expand(share, spans), strict=True)
            ]
            local_dys = [dy if first else dy.transpose(0, 1) for dy in local_dys]
            torch.autograd.backward(ys, local_dys)
            finalize_gradients(layer)
            for y, want, span in zip(ys, wanted, spans, strict=True):
                y = y if first else y.transpose(0, 1)
                worst.append(float((y - want[..., span]).abs().max()))
            dx = mine.grad if first else mine.grad.transpose(0, 1)
            worst.append(float((dx - leaf.grad[:, start:stop]).abs().max()))
            grads = dict(zip(("q_proj", "k_proj", "v_proj"), [w.grad for w in leaves], strict=True))
            dbs = dict(zip(grads, [b.grad for b in biases], strict=True))
            if layout != "separate":
                grads = {"qkv_proj": pack([w.grad for w in leaves], order)}
                columns = [b.grad[:, None] for b in biases]
                dbs = {"qkv_proj": pack(columns, order)[:, 0]}
            for name, parameter, place in placements(layer):
                want = (grads if name.endswith("weight") else dbs)[name.split(".")[0]]
                worst.append(float((place.gather(parameter.grad) - want).abs().max()))
    return worst


def holders(heads: int, kv_heads: int, world: int) -> Tensor:
    """How many ranks hold each KV head, by feature."""
    count = torch.zeros(kv_heads, dtype=torch.float64)
    for shard in partition_heads(heads, kv_heads, world):
        count[slice(*shard.kv)] += 1
    return count.repeat_interleave(3)


def expand(share: list[Tensor | float], spans: list[slice]) -> list[Tensor | float]:
    return [n[span] if isinstance(n, Tensor) else n for n, span in zip(share, spans, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_projections(world, size, layout):
    for sp, batch_first in ((False, None), (False, False), (True, None), (True, True)):
        for errors in world(size).run(project, layout, sp, batch_first, layout):
            assert max(errors) < 1e-13, (sp, batch_first)


@pytest.mark.parametrize(("layout", "other"), [("blocks", "groups"), ("groups", "blocks")])
def test_the_wrong_layout_is_wrong(world, layout, other):
    """A weight packed one way and read the other runs, and the comparison above notices."""
    for size in (1, 2):
        for errors in world(size).run(project, layout, False, None, other):
            assert max(errors) > 1e-1


@given(st.data())
def test_packed_pieces(data):
    """Pieces are whole heads in the order of the unsplit tensor, and those that the rank uses."""
    heads = data.draw(st.integers(1, 12))
    kv_heads = data.draw(st.integers(1, heads))
    world = data.draw(st.integers(1, heads))
    for layout in ("blocks", "groups"):
        _, order = unsplit(heads, kv_heads, layout)
        for shard in partition_heads(heads, kv_heads, world):
            pieces = packed_pieces(shard, 3, layout)
            held = [order[i // 3] for start, stop in pieces for i in range(start, stop, 3)]
            wanted = [("q", q) for q in range(*shard.q)]
            wanted += [(n, kv) for n in "kv" for kv in range(*shard.kv)]
            assert sorted(held) == sorted(wanted)
            assert [start for start, _ in pieces] == sorted(start for start, _ in pieces)
            assert {kv_head(q, heads, kv_heads) for q in range(*shard.q)} == set(range(*shard.kv))


def test_whole_groups_are_one_piece():
    """Megatron's layout: a rank with whole groups holds one range of rows."""
    for shard in partition_heads(8, 4, 2):
        assert len(packed_pieces(shard, 5, "groups")) == 1
        assert len(packed_pieces(shard, 5, "blocks")) == 3


def test_refusals():
    group = ParallelGroup()
    with pytest.raises(UnsupportedError, match="layout='groups' with fused=False"):
        QKVParallelLinear(8, 2, layout="groups", group=group)
    with pytest.raises(UnsupportedError, match="layout='columns'"):
        QKVParallelLinear(8, 2, fused=True, layout="columns", group=group)
    with pytest.raises(UnsupportedError, match="fused=True with context_size"):
        QKVParallelLinear(8, 2, fused=True, context_size=8, group=group)
    with pytest.raises(ShapeError, match="not a multiple of 3 heads"):
        QKVParallelLinear(8, 3, group=group)
    with pytest.raises(ShapeError, match="head_dim=0"):
        QKVParallelLinear(8, 3, head_dim=0, group=group)
    x = torch.randn(1, 2, 8)
    with pytest.raises(UnsupportedError, match="context is given"):
        QKVParallelLinear(8, 2, group=group)(x, context=x)
    with pytest.raises(UnsupportedError, match="context is missing"):
        QKVParallelLinear(8, 2, context_size=8, group=group)(x)
    with pytest.raises(UnsupportedError, match="context_rows"):
        QKVParallelLinear(8, 2, group=group)(x, context_rows=2)
    with pytest.raises(UnsupportedError, match="rows="):
        QKVParallelLinear(8, 2, group=group)(x, rows=2)
