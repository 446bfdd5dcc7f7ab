"""Embedding, output head and losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.parity.case import Entry, Options, Part, Setting
from tests.parity.dense import Rounding
from tests.parity.linear import BATCH, FLAGS, INNER, LAYOUTS, TOKENS, Named, rows_of
from tp_kernels.layers import ParallelLMHead, VocabParallelEmbedding
from tp_kernels.ops import vocab_parallel_cross_entropy

VOCABULARIES = (37, 3)  # with 3 words on 4 ranks, one has none


def tokens(o: Options) -> Tensor:
    """Words [b, s], some of them several times and one of them the padding."""
    draw = torch.Generator().manual_seed(41)
    ids = torch.randint(0, o.vocabulary, (BATCH, o.tokens), generator=draw)
    ids[0, :2] = torch.tensor([0, o.vocabulary - 1])
    return ids


def dense_embedding(r: Rounding, o: Options, p: Named, x: Named) -> Named:
    y = r.lookup(p["weight"], tokens(o))
    if o.padding is not None:
        y = torch.where((tokens(o) == o.padding).unsqueeze(-1), y.detach(), y)
    return {"y": y if o.scale is None else r(y * o.scale)}


EMBEDDING = Entry(
    options={
        "tokens": TOKENS,
        "vocabulary": VOCABULARIES,
        "padding": (None, 0),
        "scale": (None, 1.5),
        "batch_first": LAYOUTS,
    },
    parameters=lambda o: {"weight": (o.vocabulary, INNER)},
    inputs=lambda o: {},
    dense=dense_embedding,
    build=lambda s: VocabParallelEmbedding(
        s.o.vocabulary,
        INNER,
        s.o.padding,
        scale=s.o.scale,
        batch_first=s.o.batch_first,
        **s.common,
    ),
    call=lambda s, layer, x: {"y": layer(s.layout(tokens(s.o)))},
    parts=lambda s: {"y": Part(s.tokens)},
)


def head_parameters(o: Options) -> dict[str, Any]:
    bias = {"bias": (o.vocabulary,)} if o.bias else {}
    return {"weight": (o.vocabulary, INNER)} | bias


def head(s: Setting, gather_output: bool) -> ParallelLMHead:
    return ParallelLMHead(
        INNER,
        s.o.vocabulary,
        s.o.bias,
        gather_output=gather_output,
        batch_first=s.o.batch_first,
        **s.common,
    )


HEAD = Entry(
    options={
        "tokens": TOKENS,
        "vocabulary": VOCABULARIES,
        "bias": FLAGS,
        "gather_output": FLAGS,
        "batch_first": LAYOUTS,
    },
    parameters=head_parameters,
    inputs=lambda o: {"x": (BATCH, o.tokens, INNER)},
    dense=lambda r, o, p, x: {"y": r.linear(x["x"], p["weight"], p.get("bias"))},
    build=lambda s: head(s, s.o.gather_output),
    call=lambda s, layer, x: {"y": layer(x["x"], rows_of(s, s.o))},
    parts=lambda s: {
        "x": Part(s.tokens),
        "y": Part(s.all if s.o.gather_output else s.features),
    },
)

IGNORED = -7


def labels(o: Options) -> Tensor:
    """[b, s]; one of them does not count."""
    result = tokens(o).flip(1)
    result[1, 1] = IGNORED
    return result


def dense_loss(r: Rounding, o: Options, p: Named, x: Named) -> Named:
    logits = r.linear(x["x"], p["weight"], p.get("bias"))
    if o.soft_cap:
        logits = r(o.soft_cap * r(torch.tanh(r(logits / o.soft_cap))))
    normaliser = r(logits.logsumexp(-1))
    counted = labels(o) != IGNORED
    label = r(logits.gather(-1, labels(o).clamp(min=0).unsqueeze(-1)).squeeze(-1))
    mean = r(r(logits).mean(-1))
    rows = normaliser - (1 - o.smoothing) * label - o.smoothing * mean
    rows = r(r(rows) + o.z_loss * r(normaliser**2))
    rows = torch.where(counted, rows, 0.0)
    if o.reduction == "none":
        return {"loss": rows}
    return {"loss": r(rows.sum() / (counted.sum() if o.reduction == "mean" else 1))}


def call_loss(s: Setting, layer: ParallelLMHead, x: Named) -> Named:
    options = {
        "label_smoothing": s.o.smoothing,
        "z_loss": s.o.z_loss,
        "soft_cap": s.o.soft_cap,
        "reduction": s.o.reduction,
        "ignore_index": IGNORED,
    }
    wanted = s.layout(labels(s.o))
    if s.o.fused:
        return {"loss": layer.loss(x["x"], wanted, chunk_rows=4, **options)}
    logits = layer(x["x"], rows_of(s, s.o))
    return {
        "loss": vocab_parallel_cross_entropy(
            logits, wanted, group=s.group, vocab_size=s.o.vocabulary, **options
        )
    }


LOSS = Entry(
    options={
        "tokens": (5,),
        "vocabulary": VOCABULARIES,
        "bias": FLAGS,
        "fused": FLAGS,
        "smoothing": (0.0, 0.2),
        "z_loss": (0.0, 0.1),
        "soft_cap": (None, 3.0),
        "reduction": ("mean", "sum", "none"),
        "batch_first": (None,),
    },
    parameters=head_parameters,
    inputs=lambda o: {"x": (BATCH, o.tokens, INNER)},
    dense=dense_loss,
    build=lambda s: head(s, gather_output=False),
    call=call_loss,
    parts=lambda s: {
        "x": Part(s.tokens),
        "loss": Part(s.all if s.o.reduction == "none" else lambda t, rank: t),
    },
    wide=True,
)

ENTRIES = {"embedding": EMBEDDING, "head": HEAD, "loss": LOSS}
