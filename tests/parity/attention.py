"""Query, key and value projections, and attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.parity.case import Case, Entry, Options, Part, Setting
from tests.parity.dense import Rounding
from tests.parity.linear import BATCH, FLAGS, INNER, TOKENS, Named, linear_parameters, rows_of
from tp_kernels.layers import ParallelAttention, QKVParallelLinear, RotaryOptions
from tp_kernels.layers.heads import partition_heads

HEAD = 6
# Query and KV heads: uneven groups; as many; one for all, which every rank holds.
HEADS = ((5, 2), (4, 4), (4, 1))
THETA = 10000.0


def qkv_parameters(o: Options) -> dict[str, Any]:
    heads, kv = o.heads
    shapes = {}
    for name, n in (("q_proj.", heads), ("k_proj.", kv), ("v_proj.", kv)):
        shapes |= linear_parameters(o, INNER, n * HEAD, name)
    return shapes


def dense_qkv(r: Rounding, p: Named, x: Tensor, prefix: str = "") -> list[Tensor]:
    return [
        r.linear(x, p[f"{prefix}{name}_proj.weight"], p.get(f"{prefix}{name}_proj.bias"))
        for name in ("q", "k", "v")
    ]


def head_features(s: Setting, kind: str) -> Part:
    """Features of the heads of each rank; KV heads that several hold are copies."""
    shards = partition_heads(*s.o.heads, s.group.size)

    def cut(t: Tensor, rank: int) -> Tensor:
        start, stop = getattr(shards[rank], kind)
        return s.layout(t[..., start * HEAD : stop * HEAD])

    return Part(cut, copies=kind == "kv")


QKV = Entry(
    options={"tokens": TOKENS, "heads": HEADS, "bias": FLAGS},
    parameters=qkv_parameters,
    inputs=lambda o: {"x": (BATCH, o.tokens, INNER)},
    dense=lambda r, o, p, x: dict(zip("qkv", dense_qkv(r, p, x["x"]), strict=True)),
    build=lambda s: QKVParallelLinear(INNER, *s.o.heads, HEAD, s.o.bias, **s.common),
    call=lambda s, layer, x: dict(zip("qkv", layer(x["x"], rows_of(s, s.o)), strict=True)),
    parts=lambda s: {
        "x": Part(s.tokens),
        "q": head_features(s, "q"),
        "k": head_features(s, "kv"),
        "v": head_features(s, "kv"),
    },
)

MASKS = ("causal", "window", "all", "padding", "additive")


def turned(r: Rounding, x: Tensor, positions: Tensor) -> Tensor:
    """Half-split rotary embedding of [b, s, D] (Su et al., 2021); the table is in fp32 by convention."""
    half = torch.arange(0, HEAD, 2, dtype=torch.float32)
    angle = positions.float().unsqueeze(-1) * THETA ** (-half / HEAD)
    cos, sin = angle.cos().double(), angle.sin().double()
    a, b = x.chunk(2, -1)
    return r(torch.cat((r(a * cos) - r(b * sin), r(b * cos) + r(a * sin)), -1))


def positions(o: Options) -> Tensor | None:
    """None: counted from 0. Else positions of their own in each sequence."""
    if o.positions == "counted":
        return None
    return torch.stack([torch.arange(o.tokens) + 3, 2 * torch.arange(o.tokens)])


def mask(o: Options) -> tuple[Tensor, Tensor | float, Tensor | None]:
    """Who sees whom [b, 1, s, s], what is added to the scores, and the argument of the layer."""
    query, key = torch.arange(o.tokens)[:, None], torch.arange(o.tokens)
    seen = (key <= query).expand(BATCH, 1, -1, -1)
    if o.mask == "window":
        return seen & (key > query - 2), 0.0, None
    if o.mask == "all":
        return torch.ones_like(seen), 0.0, None
    if o.mask == "padding":  # of the second sequence, the first token is none
        padding = torch.ones(BATCH, 1, 1, o.tokens, dtype=torch.bool)
        padding[1, ..., 0] = False
        padding = padding | (key == query)  # a row that sees nothing has no softmax
        return seen & padding, 0.0, padding
    if o.mask == "additive":
        draw = torch.Generator().manual_seed(43)
        added = torch.randn(BATCH, 1, o.tokens, o.tokens, generator=draw).bfloat16()
        return seen, added.double(), added
    return seen, 0.0, None


def dense_attention(r: Rounding, o: Options, p: Named, x: Named, prefix: str = "") -> Named:
    q, k, v = (y.unflatten(-1, (-1, HEAD)) for y in dense_qkv(r, p, x["x"], prefix))
    at = positions(o)
    at = torch.arange(o.tokens) if at is None else at
    seen, added, _ = mask(o)
    n, kv = o.heads
    outputs = []
    for head in range(n):
        shared = head * kv // n
        query, key = q[:, :, head], k[:, :, shared]
        if o.rotary:
            query, key = turned(r, query, at), turned(r, key, at)
        bias = added[:, 0] if isinstance(added, Tensor) else added
        outputs.append(r.attention(query, key, v[:, :, shared], seen[:, 0], bias))
    out = f"{prefix}o_proj."
    y = r.linear(torch.cat(outputs, -1), p[f"{out}weight"], p.get(f"{out}bias"))
    return {"y": y}


def call_attention(s: Setting, layer: Any, x: Named) -> Named:
    given = mask(s.o)[2]
    if given is not None and given.is_floating_point():
        given = given.to(s.dtype)
    return {
        "y": layer(x["x"], rows=rows_of(s, s.o), position_ids=positions(s.o), attention_mask=given)
    }


def build_attention(s: Setting) -> ParallelAttention:
    return ParallelAttention(
        INNER,
        *s.o.heads,
        HEAD,
        qkv_bias=s.o.bias,
        output_bias=s.o.bias,
        causal=s.o.mask != "all",
        sliding_window=2 if s.o.mask == "window" else None,
        rotary=RotaryOptions(THETA) if s.o.rotary else None,
        **s.common,
    )


def attention_allowed(case: Case, o: Options) -> bool:
    return o.rotary or o.positions == "counted"


ATTENTION = Entry(
    options={
        "tokens": TOKENS,
        "heads": HEADS,
        "bias": FLAGS,
        "mask": MASKS,
        "rotary": FLAGS,
        "positions": ("counted", "given"),
    },
    parameters=lambda o: (
        qkv_parameters(o) | linear_parameters(o, o.heads[0] * HEAD, INNER, "o_proj.")
    ),
    inputs=lambda o: {"x": (BATCH, o.tokens, INNER)},
    dense=dense_attention,
    build=build_attention,
    call=call_attention,
    parts=lambda s: {"x": Part(s.tokens), "y": Part(s.tokens)},
    allowed=attention_allowed,
)

ENTRIES = {"qkv": QKV, "attention": ATTENTION}
