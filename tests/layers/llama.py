"""A two-layer Llama twice: plain torch on unsplit weights (the oracle), and built from our layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tp_kernels.comm import ParallelGroup
from tp_kernels.layers import (
    ParallelAttention,
    ParallelLMHead,
    ParallelMLP,
    ParamPlacement,
    VocabParallelEmbedding,
    placements,
)
from tp_kernels.layers.placement import place
from tp_kernels.ops import gather_rows, scatter_rows


@dataclass(frozen=True)
class Shape:
    """Sizes that divide by nothing: 5 heads on 2 KV heads, odd widths, odd vocabulary."""

    heads: int = 5
    kv_heads: int = 2
    head_dim: int = 6
    hidden: int = 21
    intermediate: int = 29
    vocabulary: int = 37
    layers: int = 2
    bias: bool = False
    sliding_window: int | None = None


def weights(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    """Unsplit parameters by name, drawn in fp32 so that every dtype starts from the same numbers."""
    draw = torch.Generator().manual_seed(5)
    sizes = {"embed.weight": (shape.vocabulary, shape.hidden)}
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        linears = {
            "attention.q_proj": (q, shape.hidden),
            "attention.k_proj": (kv, shape.hidden),
            "attention.v_proj": (kv, shape.hidden),
            "attention.o_proj": (shape.hidden, q),
            "mlp.gate_proj": (shape.intermediate, shape.hidden),
            "mlp.up_proj": (shape.intermediate, shape.hidden),
            "mlp.down_proj": (shape.hidden, shape.intermediate),
        }
        for name, size in linears.items():
            sizes[f"layers.{layer}.{name}.weight"] = size
            if shape.bias:
                sizes[f"layers.{layer}.{name}.bias"] = size[:1]
        for name in ("norm1", "norm2"):
            sizes[f"layers.{layer}.{name}.weight"] = (shape.hidden,)
    sizes["norm.weight"] = (shape.hidden,)
    sizes["head.weight"] = (shape.vocabulary, shape.hidden)
    return {
        name: (torch.randn(size, generator=draw) / math.sqrt(size[-1]) + ("norm" in name)).to(dtype)
        for name, size in sizes.items()
    }


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def dense_loss(full: dict[str, Tensor], shape: Shape, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(mean next-token loss, logits [b, s, V]) in plain torch, head by head."""
    x = full["embed.weight"][ids]
    length = ids.shape[1]
    position = torch.arange(length, dtype=torch.float32)  # rotary tables are fp32 by convention
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
    angle = position[:, None] * 10000.0 ** (-half / shape.head_dim)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    query, key = torch.arange(length)[:, None], torch.arange(length)
    seen = key <= query
    if shape.sliding_window:
        seen &= key > query - shape.sliding_window

    def linear(y: Tensor, name: str) -> Tensor:
        return nn.functional.linear(y, full[f"{name}.weight"], full.get(f"{name}.bias"))

    def turn(y: Tensor) -> Tensor:
        a, b = y.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    for layer in range(shape.layers):
        name = f"layers.{layer}"
        y = rms_norm(x, full[f"{name}.norm1.weight"])
        q, k, v = (
            linear(y, f"{name}.attention.{part}_proj").unflatten(-1, (-1, shape.head_dim))
            for part in "qkv"
        )
        heads = []
        for head in range(shape.heads):
            shared = head * shape.kv_heads // shape.heads
            scores = turn(q[:, :, head]) @ turn(k[:, :, shared]).mT / math.sqrt(shape.head_dim)
            heads.append(scores.masked_fill(~seen, -math.inf).softmax(-1) @ v[:, :, shared])
        x = x + linear(torch.cat(heads, -1), f"{name}.attention.o_proj")
        y = rms_norm(x, full[f"{name}.norm2.weight"])
        gate = nn.functional.silu(linear(y, f"{name}.mlp.gate_proj"))
        x = x + linear(gate * linear(y, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
    logits = linear(rms_norm(x, full["norm.weight"]), "head")
    return next_token_loss(logits, ids), logits


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Norm(nn.Module):
    def __init__(self, size: int, group: ParallelGroup, partial: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        place(self, "weight", ParamPlacement(group, (size,), partial_gradient=partial))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)


class Layer(nn.Module):
    def __init__(self, shape: Shape, group: ParallelGroup, sp: bool, dtype: torch.dtype) -> None:
        super().__init__()
        options = {"group": group, "sequence_parallel": sp, "dtype": dtype}
        self.norm1 = Norm(shape.hidden, group, sp, dtype)
        self.attention = ParallelAttention(
            shape.hidden,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            qkv_bias=shape.bias,
            output_bias=shape.bias,
            sliding_window=shape.sliding_window,
            **options,
        )
        self.norm2 = Norm(shape.hidden, group, sp, dtype)
        self.mlp = ParallelMLP(shape.hidden, shape.intermediate, bias=shape.bias, **options)

    def forward(self, x: Tensor, rows: int | None) -> Tensor:
        x = x + self.attention(self.norm1(x), rows=rows)
        return x + self.mlp(self.norm2(x), rows=rows)


class Llama(nn.Module):
    """The same model from our layers; under sequence parallelism activations are [s_r, b, H]."""

    def __init__(
        self, shape: Shape, group: ParallelGroup, sequence_parallel: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.embed = VocabParallelEmbedding(
            shape.vocabulary, shape.hidden, group=group, dtype=dtype
        )
        self.layers = nn.ModuleList(
            Layer(shape, group, sequence_parallel, dtype) for _ in range(shape.layers)
        )
        self.norm = Norm(shape.hidden, group, sequence_parallel, dtype)
        self.head = ParallelLMHead(shape.hidden, shape.vocabulary, group=group, dtype=dtype)

    def load(self, full: dict[str, Tensor]) -> Llama:
        for name, parameter, placement in placements(self):
            parameter.data.copy_(placement.slice(full[name]))
        return self

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        rows = None
        if self.sequence_parallel:
            rows = ids.shape[1]
            x = scatter_rows(x.transpose(0, 1), group=self.group)
        for layer in self.layers:
            x = layer(x, rows)
        x = self.norm(x)
        if self.sequence_parallel:
            x = gather_rows(x, group=self.group, rows=rows).transpose(0, 1)
        return self.head(x)
