"""Whole transformer blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.parity.attention import (
    HEAD,
    attention_options,
    attention_parameters,
    dense_attention,
)
from tests.parity.case import Entry, Options, Part, Setting
from tests.parity.dense import Rounding
from tests.parity.linear import (
    BATCH,
    GRADIENTS,
    INNER,
    OUTER,
    Named,
    dense_mlp,
    dense_norm,
    linear_parameters,
    norm_parameters,
    rows_of,
)
from tests.parity.pointwise import SEED
from tp_kernels.layers import ParallelTransformerBlock
from tp_kernels.layers.random import draw_key
from tp_kernels.ops import dropout

# By position of the norms: those in front of and behind attention and MLP.
FRONT, BACK = "input_layernorm.", "post_feedforward_layernorm."
MIDDLE, INNERMOST = "post_attention_layernorm.", "pre_feedforward_layernorm."
NORMS: dict[str, tuple[str | None, ...]] = {
    "pre": (FRONT, None, MIDDLE, None),
    "post": (None, MIDDLE, None, BACK),
    "sandwich": (FRONT, MIDDLE, INNERMOST, BACK),
    "parallel": (FRONT, None, None, None),
}


def inner_options(o: Options) -> Options:
    """Those of the attention and the MLP in the block."""
    return Options(
        tokens=o.tokens,
        heads=o.heads,
        bias=o.norm == "layer",  # as in GPT-2, without as in Llama
        norm=None,
        packed=None,
        gated=True,
        activation="silu",
    )


def parameters(o: Options) -> dict[str, Any]:
    inner = inner_options(o)
    shapes = {f"self_attn.{n}": shape for n, shape in attention_parameters(inner).items()}
    for name, sizes in (("gate", (INNER, OUTER)), ("up", (INNER, OUTER)), ("down", (OUTER, INNER))):
        shapes |= linear_parameters(inner, *sizes, f"mlp.{name}_proj.")
    for name in NORMS[o.position]:
        shapes |= norm_parameters(o, name) if name else {}
    return shapes


def dense(r: Rounding, o: Options, p: Named, x: Named) -> Named:
    inner = inner_options(o)
    torch.manual_seed(SEED)

    def norm(y: Tensor, name: str | None) -> Tensor:
        return y if name is None else dense_norm(r, o, p, y, name)

    def attention(y: Tensor) -> Tensor:
        return dense_attention(r, inner, p, {"x": y}, "self_attn.")["y"]

    def mlp(y: Tensor) -> Tensor:
        return dense_mlp(r, inner, p, {"x": y}, "mlp.")["y"]

    def dropped(y: Tensor) -> Tensor:
        if not o.dropout:
            return y
        return r(y * dropout(torch.ones_like(y), o.dropout, key=draw_key("cpu")))

    x, names = x["x"], NORMS[o.position]
    if o.position == "parallel":
        y = norm(x, FRONT)
        return {"y": r(x + dropped(r(attention(y) + mlp(y))))}
    for layer, before, after in ((attention, *names[:2]), (mlp, *names[2:])):
        y = layer(norm(x, before))
        if o.position == "post":
            x = norm(r(x + dropped(y)), after)
        else:
            x = r(x + dropped(norm(y, after)))
    return {"y": x}


def build(s: Setting) -> ParallelTransformerBlock:
    bias = inner_options(s.o).bias
    return ParallelTransformerBlock(
        INNER,
        s.o.heads[0],
        OUTER,
        s.o.heads[1],
        HEAD,
        norm=s.o.norm,
        norm_position="pre" if s.o.position == "parallel" else s.o.position,
        parallel=s.o.position == "parallel",
        dropout=s.o.dropout,
        attention=attention_options(inner_options(s.o)),
        mlp={"bias": bias},
        delay_wgrad=s.o.gradients == "later",
        batch_first=s.o.batch_first,
        **s.common,
    )


def call(s: Setting, layer: Any, x: Named) -> Named:
    torch.manual_seed(SEED)
    return {"y": layer(x["x"], rows=rows_of(s, s.o))}


BLOCK = Entry(
    options={
        "tokens": (5,),
        "heads": ((5, 2), (4, 1)),
        "norm": ("rms", "layer"),
        "position": tuple(NORMS),
        "dropout": (0.0, 0.3),
        "gradients": GRADIENTS,
        "batch_first": (None,),
    },
    parameters=parameters,
    inputs=lambda o: {"x": (BATCH, o.tokens, INNER)},
    dense=dense,
    build=build,
    call=call,
    parts=lambda s: {"x": Part(s.tokens), "y": Part(s.tokens)},
)

ENTRIES = {"block": BLOCK}
