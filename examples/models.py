"""Two small decoders made of the layers of tp_kernels: one like Llama, one like GPT-2."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tp_kernels import ParallelGroup, split_range
from tp_kernels.layers import (
    LayerNorm,
    ParallelDropout,
    ParallelLMHead,
    ParallelTransformerBlock,
    ParamPlacement,
    RandomStreams,
    RMSNorm,
    VocabParallelEmbedding,
)
from tp_kernels.layers.placement import place


@dataclass(frozen=True)
class Shape:
    """Sizes and kinds of a decoder. Nothing has to be a multiple of the number of ranks."""

    vocabulary: int = 256
    hidden: int = 60
    layers: int = 2
    heads: int = 5
    kv_heads: int = 2
    head_dim: int = 12
    intermediate: int = 157
    norm: str = "rms"
    # Of learned positions, which the first layer adds; None: rotary embedding in every attention.
    positions: int | None = None
    tied: bool = False
    attention: dict[str, Any] = field(default_factory=dict)
    mlp: dict[str, Any] = field(default_factory=dict)


# RMSNorm, rotary embedding, SwiGLU, 5 query heads on 2 of keys and values.
LLAMA = Shape()
# LayerNorm, learned positions, gelu, biases, and a head that is the embedding.
GPT2 = Shape(
    kv_heads=5,
    intermediate=241,
    norm="layer",
    positions=64,
    tied=True,
    attention={"qkv_bias": True, "output_bias": True},
    mlp={"activation": "gelu_tanh", "bias": True},
)
MODELS = {"llama": LLAMA, "gpt2": GPT2}


class LearnedPositions(nn.Module):
    """x + weight[position]; weight [positions, H] is whole on every rank.

    Under sequence parallelism a rank uses the rows of its own tokens, so that its gradient is a part of the
    whole: that is said once, in the placement, and `finalize_gradients` reads it there.
    """

    def __init__(
        self, positions: int, hidden: int, *, group: ParallelGroup, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        shape = (positions, hidden)
        place(self, "weight", ParamPlacement(group, shape, partial_gradient=sequence_parallel))
        self.weight = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.1)

    def forward(self, x: Tensor, tokens: int) -> Tensor:
        if not self.sequence_parallel:
            return x + self.weight[:tokens]  # [b, s, H]
        start, stop = split_range(tokens, self.group.size, self.group.rank)
        return x + self.weight[start:stop].unsqueeze(1)  # [s_r, b, H]


class ParallelDecoder(nn.Module):
    """Embedding, blocks, norm and head.

    forward(ids [b, s], labels=None): logits [b, s, V], or with labels [b, s] the mean cross-entropy, equal
    on every rank. Between embedding and head activations are [b, s, H], and [s_r, b, H] under sequence
    parallelism. Build it on every rank with torch's generator in the same state.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        group: ParallelGroup,
        streams: RandomStreams,
        sequence_parallel: bool = False,
        dropout: float = 0.0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.sequence_parallel, self.checkpointing = sequence_parallel, checkpointing
        self.streams = streams
        layout: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel}
        self.embed = VocabParallelEmbedding(shape.vocabulary, shape.hidden, **layout)
        with torch.no_grad():
            self.embed.weight.mul_(0.1)  # torch draws with a deviation of 1: too much for logits
        self.positions = None
        rotary: dict[str, Any] = {}
        if shape.positions is not None:
            self.positions = LearnedPositions(shape.positions, shape.hidden, **layout)
            rotary = {"rotary": None}
        self.dropout = ParallelDropout(dropout, streams=streams, **layout)
        self.layers = nn.ModuleList(
            ParallelTransformerBlock(
                shape.hidden,
                shape.heads,
                shape.intermediate,
                shape.kv_heads,
                shape.head_dim,
                norm=shape.norm,
                dropout=dropout,
                attention={**rotary, **shape.attention, "dropout": dropout},
                mlp=shape.mlp,
                streams=streams,
                **layout,
            )
            for _ in range(shape.layers)
        )
        norm = RMSNorm if shape.norm == "rms" else LayerNorm
        self.norm = norm(shape.hidden, **layout)
        self.head = ParallelLMHead(shape.hidden, shape.vocabulary, **layout)
        if shape.tied:
            self.head.tie(self.embed)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        tokens = ids.shape[1]
        rows = tokens if self.sequence_parallel else None
        x = self.embed(ids.t() if self.sequence_parallel else ids)
        if self.positions is not None:
            x = self.positions(x, tokens)
        x = self.dropout(x, rows=rows)
        for layer in self.layers:
            if self.checkpointing:  # with the masks of dropout of the forward
                x = self.streams.checkpoint(layer, x, rows=rows)
            else:
                x = layer(x, rows=rows)
        x = self.norm(x)
        if labels is not None:
            return self.head.loss(x, labels.t() if self.sequence_parallel else labels)
        y = self.head(x, rows)
        return y.transpose(0, 1) if self.sequence_parallel else y
