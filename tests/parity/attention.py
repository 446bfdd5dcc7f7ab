"""Query, key and value projections, and attention with what models do to it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.parity.case import Case, Entry, Options, Part, Setting
from tests.parity.dense import Rounding
from tests.parity.linear import (
    BATCH,
    FLAGS,
    INNER,
    LAYOUTS,
    TOKENS,
    Named,
    linear_parameters,
    rows_of,
)
from tests.parity.pointwise import SEED
from tp_kernels.layers import ParallelAttention, QKVParallelLinear
from tp_kernels.layers.heads import partition_heads
from tp_kernels.layers.random import draw_key
from tp_kernels.layers.rotary import LinearScaling, RotaryOptions
from tp_kernels.ops import dropout

HEAD = 6
# Query and KV heads: uneven groups; as many; one for all, which every rank holds.
HEADS = ((5, 2), (4, 4), (4, 1))
# One parameter for each of q, k and v, or all in one, in one of two orders.
FORMS = (None, "blocks", "groups")

# Options of attention that an entry does not have as an axis.
DEFAULTS: dict[str, Any] = {
    "form": None,
    "bias": False,
    "mask": "causal",
    "rotary": "half",
    "positions": "counted",
    "qk_norm": None,
    "alibi": False,
    "softcap": None,
    "sinks": False,
    "scale": None,
    "dropout": 0.0,
    "cross": False,
    "batch_first": None,
}


def settled(o: Options) -> Options:
    settled = Options(**DEFAULTS | vars(o))
    if settled.alibi:  # instead of
        settled.rotary = None
    return settled


def qkv_parameters(o: Options) -> dict[str, Any]:
    heads, kv = o.heads
    if o.form:
        return linear_parameters(o, INNER, (heads + 2 * kv) * HEAD, "qkv_proj.")
    shapes = {}
    for name, n in (("q_proj.", heads), ("k_proj.", kv), ("v_proj.", kv)):
        shapes |= linear_parameters(o, INNER, n * HEAD, name)
    return shapes


def dense_qkv(
    r: Rounding, o: Options, p: Named, x: Tensor, context: Tensor, prefix: str = ""
) -> list[Tensor]:
    """[b, s, n, D] of queries, keys, values."""
    if not o.form:
        return [
            r.linear(
                y, p[f"{prefix}{name}_proj.weight"], p.get(f"{prefix}{name}_proj.bias")
            ).unflatten(-1, (-1, HEAD))
            for name, y in (("q", x), ("k", context), ("v", context))
        ]
    y = r.linear(x, p[f"{prefix}qkv_proj.weight"], p.get(f"{prefix}qkv_proj.bias"))
    heads, kv = o.heads
    if o.form == "blocks":
        order = [(0, q) for q in range(heads)] + [(i, k) for i in (1, 2) for k in range(kv)]
    else:
        order = []
        for k in range(kv):
            order += [(0, q) for q in range(heads) if q * kv // heads == k] + [(1, k), (2, k)]
    parts = y.unflatten(-1, (-1, HEAD))
    at = [[i for i, (kind, _) in enumerate(order) if kind == wanted] for wanted in range(3)]
    return [parts[:, :, index] for index in at]


def head_features(s: Setting, kind: str) -> Part:
    """Features of the heads of each rank; KV heads that several hold are copies."""
    shards = partition_heads(*s.o.heads, s.group.size)

    def cut(t: Tensor, rank: int) -> Tensor:
        start, stop = getattr(shards[rank], kind)
        return s.layout(t[..., start * HEAD : stop * HEAD])

    return Part(cut, copies=kind == "kv")


def fused(o: Options) -> dict[str, Any]:
    return {"fused": True, "layout": o.form} if o.form else {}


QKV = Entry(
    options={
        "tokens": TOKENS,
        "heads": HEADS,
        "form": FORMS,
        "bias": FLAGS,
        "batch_first": LAYOUTS,
    },
    parameters=qkv_parameters,
    inputs=lambda o: {"x": (BATCH, o.tokens, INNER)},
    dense=lambda r, o, p, x: {
        name: y.flatten(2)
        for name, y in zip("qkv", dense_qkv(r, o, p, x["x"], x["x"]), strict=True)
    },
    build=lambda s: QKVParallelLinear(
        INNER, *s.o.heads, HEAD, s.o.bias, batch_first=s.o.batch_first, **fused(s.o), **s.common
    ),
    call=lambda s, layer, x: dict(zip("qkv", layer(x["x"], rows_of(s, s.o)), strict=True)),
    parts=lambda s: {
        "x": Part(s.tokens),
        "q": head_features(s, "q"),
        "k": head_features(s, "kv"),
        "v": head_features(s, "kv"),
    },
)

ROTARY: dict[str | None, RotaryOptions | None] = {
    None: None,
    "half": RotaryOptions(),
    "interleaved": RotaryOptions(interleaved=True),
    "partial": RotaryOptions(theta=100.0, dim=4),
    "linear": RotaryOptions(scaling=LinearScaling(3.0)),
}


def turned(r: Rounding, o: Options, x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [b, s, D] (Su et al., 2021); the table is in fp32 by convention."""
    if o.rotary is None:
        return x
    dim, theta = (4, 100.0) if o.rotary == "partial" else (HEAD, 10000.0)
    frequency = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angle = positions.float().unsqueeze(-1) * (frequency / (3.0 if o.rotary == "linear" else 1.0))
    cos, sin = angle.cos().double(), angle.sin().double()
    x, rest = x.split([dim, HEAD - dim], -1)
    if o.rotary == "interleaved":
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        a, b = x.chunk(2, -1)
    pair = r(r(a * cos) - r(b * sin)), r(r(b * cos) + r(a * sin))
    if o.rotary == "interleaved":
        return torch.stack(pair, -1).flatten(-2)
    return torch.cat((*pair, rest), -1)


def positions(o: Options) -> Tensor | None:
    """None: counted from 0. Else positions of their own in each sequence."""
    if o.positions == "counted":
        return None
    return torch.stack([torch.arange(o.tokens) + 3, 2 * torch.arange(o.tokens)])


WINDOW, BAND = 2, 1


def mask(o: Options) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Who sees whom [b, s, t], what is added to scores [b, heads, s, t], and the argument of the layer."""
    query, key = torch.arange(o.tokens)[:, None], torch.arange(o.tokens)
    causal = (key <= query).expand(BATCH, -1, -1)
    if o.mask == "window":
        return causal & (key > query - WINDOW), None, None
    if o.mask == "all":
        return torch.ones_like(causal), None, None
    if o.mask == "band":
        return ((query - key).abs() <= BAND).expand_as(causal), None, None
    if o.mask == "padding":  # of the second sequence, the first token is none
        padding = torch.ones(BATCH, 1, 1, o.tokens, dtype=torch.bool)
        padding[1, ..., 0] = False
        padding = padding | (key == query)  # a row that sees nothing has no softmax
        return causal & padding[:, 0], None, padding
    if o.mask == "additive":  # of every head
        draw = torch.Generator().manual_seed(43)
        shape = (BATCH, o.heads[0], o.tokens, o.tokens)
        added = torch.randn(shape, generator=draw).bfloat16()
        return causal, added.double(), added
    return causal, None, None


def slopes(heads: int) -> list[float]:
    """Of ALiBi (Press et al., 2022), for up to eight heads."""
    powers = {4: [2, 4, 6, 8], 5: [2, 4, 6, 8, 1]}
    return [2.0**-power for power in powers[heads]]


def attention_parameters(o: Options) -> dict[str, Any]:
    o = settled(o)
    shapes = qkv_parameters(o) | linear_parameters(o, o.heads[0] * HEAD, INNER, "o_proj.")
    if o.qk_norm:
        shapes |= {"q_norm.weight": (HEAD,), "k_norm.weight": (HEAD,)}
    return shapes | ({"sinks": (o.heads[0],)} if o.sinks else {})


def dense_attention(r: Rounding, o: Options, p: Named, x: Named, prefix: str = "") -> Named:
    o = settled(o)
    context = x.get("context", x["x"])
    q, k, v = dense_qkv(r, o, p, x["x"], context, prefix)
    at = positions(o)
    at = torch.arange(o.tokens) if at is None else at
    seen, added, _ = mask(o)
    heads, kv = o.heads
    if o.dropout:
        torch.manual_seed(SEED)
        ones = torch.ones(BATCH, heads, o.tokens, k.shape[1], dtype=torch.float64)
        factors = dropout(ones, o.dropout, key=draw_key("cpu"), dim=1)

    def normed(y: Tensor, name: str) -> Tensor:
        if not o.qk_norm:
            return y
        weight = p[f"{prefix}{name}_norm.weight"]
        return r.rms_norm(y, r(1 + weight) if o.qk_norm == "rms_zero_centered" else weight)

    q, k = normed(q, "q"), normed(k, "k")
    distance = (torch.arange(o.tokens)[:, None] - torch.arange(o.tokens)).abs()
    outputs = []
    for head in range(heads):
        shared = head * kv // heads
        query, key, value = q[:, :, head], k[:, :, shared], v[:, :, shared]
        query, key = turned(r, o, query, at), turned(r, o, key, at)
        scores = r(r.matmul(query, key.mT) * (o.scale or 1 / math.sqrt(HEAD)))
        if o.softcap:
            scores = r(o.softcap * r(torch.tanh(r(scores / o.softcap))))
        if o.alibi:
            scores = r(scores + r(-slopes(heads)[head] * distance.double()))
        if added is not None:
            scores = r(scores + added[:, head])
        if not o.cross:
            scores = scores.masked_fill(~seen, -math.inf)
        kept = factors[:, head] if o.dropout else None
        if o.sinks:  # one more key, whose value is zero
            ones = scores.new_ones(scores.shape[0] * scores.shape[1], 1)
            sink = r.matmul(ones, p[f"{prefix}sinks"][head].view(1, 1))
            scores = torch.cat((scores, sink.view(*scores.shape[:2], 1)), -1)
            value = torch.cat((value, torch.zeros_like(value[:, :1])), 1)
            kept = None if kept is None else torch.cat((kept, torch.ones_like(kept[..., :1])), -1)
        outputs.append(r.weighted(scores, value, kept))
    out = f"{prefix}o_proj."
    return {"y": r.linear(torch.cat(outputs, -1), p[f"{out}weight"], p.get(f"{out}bias"))}


def attention_options(o: Options) -> dict[str, Any]:
    """As ParallelAttention takes them."""
    o = settled(o)
    window = {"window": WINDOW, "band": BAND}.get(o.mask)
    return {
        "qkv_bias": o.bias,
        "output_bias": o.bias,
        "causal": o.mask not in ("all", "band") and not o.cross,
        "sliding_window": window,
        "rotary": ROTARY[o.rotary],
        "qk_norm": o.qk_norm,
        "alibi": o.alibi,
        "softcap": o.softcap,
        "sinks": o.sinks,
        "scale": o.scale,
        "dropout": o.dropout,
        "context_size": INNER if o.cross else None,
        **fused(o),
    }


def build_attention(s: Setting) -> ParallelAttention:
    return ParallelAttention(
        INNER,
        *s.o.heads,
        HEAD,
        batch_first=getattr(s.o, "batch_first", None),
        **attention_options(s.o),
        **s.common,
    )


def call_attention(s: Setting, layer: Any, x: Named) -> Named:
    torch.manual_seed(SEED)
    o = settled(s.o)
    given = mask(o)[2]
    if given is not None and given.is_floating_point():
        given = given.to(s.dtype)
    context = {"context": x["context"]} if o.cross else {}
    if o.cross and s.sp:
        context["context_rows"] = CONTEXT
    y = layer(
        x["x"], rows=rows_of(s, o), position_ids=positions(o), attention_mask=given, **context
    )
    return {"y": y}


def attention(axes: dict[str, Any], **rest: Any) -> Entry:
    return Entry(
        options={"tokens": (5,), "heads": HEADS} | axes,
        parameters=attention_parameters,
        inputs=lambda o: {"x": (BATCH, o.tokens, INNER)},
        dense=dense_attention,
        build=build_attention,
        call=call_attention,
        parts=lambda s: {"x": Part(s.tokens), "y": Part(s.tokens)},
        **rest,
    )


def places_allowed(case: Case, o: Options) -> bool:
    return o.rotary is not None or o.positions == "counted"


CONTEXT = 4  # tokens, of which on 3 or 4 ranks every one has some


def cross_attention() -> Entry:
    axes = {"bias": FLAGS, "qk_norm": (None, "rms"), "scale": (None, 0.7), "batch_first": LAYOUTS}
    entry = attention(axes)
    constant = {"cross": True, "rotary": None}

    def fixed(o: Options) -> Options:
        return Options(**vars(o) | constant)

    def within(s: Setting) -> Setting:
        return Setting(s.group, s.sp, s.dtype, fixed(s.o))

    return Entry(
        options=entry.options,
        parameters=lambda o: attention_parameters(fixed(o)),
        inputs=lambda o: {"x": (BATCH, o.tokens, INNER), "context": (BATCH, CONTEXT, INNER)},
        dense=lambda r, o, p, x: dense_attention(r, fixed(o), p, x),
        build=lambda s: build_attention(within(s)),
        call=lambda s, layer, x: call_attention(within(s), layer, x),
        parts=lambda s: dict.fromkeys(("x", "context", "y"), Part(s.tokens)),
    )


ENTRIES = {
    "qkv": QKV,
    # projections and layouts; masks and positions; what happens to scores; another text
    "attention": attention(
        {"tokens": TOKENS, "form": FORMS, "bias": FLAGS, "batch_first": (None, True)}
    ),
    "places": attention(
        {
            "mask": ("causal", "window", "all", "band", "padding", "additive"),
            "rotary": tuple(ROTARY),
            "positions": ("counted", "given"),
        },
        allowed=places_allowed,
    ),
    "scores": attention(
        {
            "mask": ("causal", "additive"),
            "qk_norm": (None, "rms", "rms_zero_centered"),
            "alibi": FLAGS,
            "softcap": (None, 1.5),
            "sinks": FLAGS,
            "dropout": (0.0, 0.3),
        }
    ),
    "cross": cross_attention(),
}
