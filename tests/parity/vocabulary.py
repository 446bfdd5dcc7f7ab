"""Embedding and output head."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.parity.case import Entry, Options, Part
from tests.parity.dense import Rounding
from tests.parity.linear import BATCH, FLAGS, INNER, TOKENS, Named
from tp_kernels.layers import ParallelLMHead, VocabParallelEmbedding

VOCABULARIES = (37, 3)  # with 3 words on 4 ranks, one has none


def tokens(o: Options) -> Tensor:
    """Words, some of them several times and one of them the padding."""
    draw = torch.Generator().manual_seed(41)
    ids = torch.randint(0, o.vocabulary, (BATCH, o.tokens), generator=draw)
    ids[0, :2] = torch.tensor([0, o.vocabulary - 1])
    return ids


def dense_embedding(r: Rounding, o: Options, p: Named, x: Named) -> Named:
    y = r.lookup(p["weight"], tokens(o))
    if o.padding is not None:
        y = torch.where((tokens(o) == o.padding).unsqueeze(-1), y.detach(), y)
    return {"y": y}


EMBEDDING = Entry(
    options={"tokens": TOKENS, "vocabulary": VOCABULARIES, "padding": (None, 0)},
    parameters=lambda o: {"weight": (o.vocabulary, INNER)},
    inputs=lambda o: {},
    dense=dense_embedding,
    build=lambda s: VocabParallelEmbedding(
        s.o.vocabulary, INNER, s.o.padding, group=s.group, dtype=s.dtype
    ),
    call=lambda s, layer, x: {"y": layer(tokens(s.o))},
    parts=lambda s: {"y": Part(s.all)},
    sp=(False,),
)

HEAD = Entry(
    options={"tokens": TOKENS, "vocabulary": VOCABULARIES, "bias": FLAGS},
    parameters=lambda o: (
        {"weight": (o.vocabulary, INNER)} | ({"bias": (o.vocabulary,)} if o.bias else {})
    ),
    inputs=lambda o: {"x": (BATCH, o.tokens, INNER)},
    dense=lambda r, o, p, x: {"y": r.linear(x["x"], p["weight"], p.get("bias"))},
    build=lambda s: ParallelLMHead(INNER, s.o.vocabulary, s.o.bias, group=s.group, dtype=s.dtype),
    call=lambda s, layer, x: {"y": layer(x["x"])},
    parts=lambda s: {"x": Part(s.all), "y": Part(s.all)},
    sp=(False,),
)

ENTRIES = {"embedding": EMBEDDING, "head": HEAD}
