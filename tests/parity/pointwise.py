"""Norms and dropout: whole parameters, elements of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.case import Entry, Options, Part, Setting
from tests.parity.dense import Rounding
from tests.parity.linear import BATCH, FLAGS, INNER, LAYOUTS, TOKENS, Named
from tp_kernels.layers import LayerNorm, ParallelDropout, RMSNorm
from tp_kernels.layers.random import draw_key
from tp_kernels.ops import dropout

KINDS = ("rms", "layer", "layer without bias")


def norm_inputs(o: Options) -> dict[str, Any]:
    shape = (BATCH, o.tokens, INNER)
    return {"x": shape} | ({"residual": shape} if o.residual else {})


def dense_norm(r: Rounding, o: Options, p: Named, x: Named) -> Named:
    s = r(x["x"] + x["residual"]) if o.residual else x["x"]
    weight = r(1 + p["weight"]) if o.zero_centered else p["weight"]
    if o.kind == "rms":
        y = r.rms_norm(s, weight)
    else:
        y = r.layer_norm(s, weight, p.get("bias"))
    return {"y": y} | ({"sum": s} if o.residual else {})


def build_norm(s: Setting) -> nn.Module:
    options = {"zero_centered": s.o.zero_centered} | s.common
    if s.o.kind == "rms":
        return RMSNorm(INNER, **options)
    return LayerNorm(INNER, bias=s.o.kind == "layer", **options)


def call_norm(s: Setting, layer: Any, x: Named) -> Named:
    if not s.o.residual:
        return {"y": layer(x["x"])}
    return dict(zip(("y", "sum"), layer(x["x"], x["residual"]), strict=True))


NORM = Entry(
    options={"tokens": TOKENS, "kind": KINDS, "residual": FLAGS, "zero_centered": FLAGS},
    parameters=lambda o: {"weight": (INNER,)} | ({"bias": (INNER,)} if o.kind == "layer" else {}),
    inputs=norm_inputs,
    dense=dense_norm,
    build=build_norm,
    call=call_norm,
    parts=lambda s: dict.fromkeys(("x", "residual", "y", "sum"), Part(s.tokens)),
)


SEED, SHARE = 77, 0.3


def kept(o: Options) -> Tensor:
    """What every element of the unsplit [b, s, H] is multiplied by, drawn on no ranks at all."""
    torch.manual_seed(SEED)
    ones = torch.ones(BATCH, o.tokens, INNER, dtype=torch.float64)
    factors = dropout(ones, SHARE, key=draw_key("cpu"))
    assert set(factors.unique().tolist()) == {0.0, 1 / (1 - SHARE)}
    return factors


def dense_dropout(r: Rounding, o: Options, p: Named, x: Named) -> Named:
    y = r(x["x"] * kept(o))
    return {"y": r(y + x["residual"]) if o.residual else y}


def call_dropout(s: Setting, layer: Any, x: Named) -> Named:
    torch.manual_seed(SEED)
    return {"y": layer(x["x"], x.get("residual"), s.o.tokens if s.sp else None)}


DROPOUT = Entry(
    options={"tokens": TOKENS, "residual": FLAGS, "batch_first": LAYOUTS},
    parameters=lambda o: {},
    inputs=norm_inputs,
    dense=dense_dropout,
    build=lambda s: ParallelDropout(
        SHARE, group=s.group, sequence_parallel=s.sp, batch_first=s.o.batch_first
    ),
    call=call_dropout,
    parts=lambda s: dict.fromkeys(("x", "residual", "y"), Part(s.tokens)),
)

ENTRIES = {"norm": NORM, "dropout": DROPOUT}
