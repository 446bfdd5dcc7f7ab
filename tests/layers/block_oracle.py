"""Blocks in plain torch on unsplit weights, which tests of ParallelMLP and of whole blocks compare with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tp_kernels.comm import ParallelGroup, all_gather
from tp_kernels.comm.layout import split_sizes
from tp_kernels.layers import placements

Weights = Mapping[str, Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: (
        0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "relu2": lambda x: torch.where(x > 0, x * x, 0.0),
}
ACTIVATIONS |= {"swiglu": ACTIVATIONS["silu"], "geglu": ACTIVATIONS["gelu"]}


@dataclass(frozen=True)
class Case:
    """Sizes that divide by nothing, and the options of the module by name."""

    options: dict[str, Any] = field(default_factory=dict)
    hidden: int = 10
    intermediate: int = 11
    heads: int = 5
    kv_heads: int = 2
    head_dim: int = 4
    batch: int = 2
    tokens: int = 7
    context: int = 5

    def given(self, name: str, default: Any) -> Any:
        return self.options.get(name, default)


def draw(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: int = 5
) -> dict[str, Tensor]:
    """Numbers for tensors of these shapes, drawn in fp32 and by name: the same for every dtype and world."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) / math.sqrt(shape[-1])).to(dtype)
        for name, shape in sorted(shapes.items())
    }


def linear(full: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ full[f"{name}.weight"].T
    return y + full[f"{name}.bias"] if f"{name}.bias" in full else y


def norm(full: Weights, name: str, x: Tensor, case: Case, kind: str) -> Tensor:
    epsilon = case.given("epsilon", 1e-5 if kind == "layer" else 1e-6)
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    unit = x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
    scale = full[f"{name}.weight"] + (1.0 if case.given("zero_centered", False) else 0.0)
    return unit * scale + full.get(f"{name}.bias", 0.0)


def mlp(
    full: Weights, x: Tensor, case: Case, options: Mapping[str, Any], prefix: str = ""
) -> Tensor:
    """The feed-forward block without the norm in front."""
    act = ACTIVATIONS[options.get("activation", "silu")]
    packed = options.get("packed")
    if packed is not None:
        both = linear(full, f"{prefix}gate_up_proj", x)
        size = both.shape[-1] // 2
        rows = range(size)
        gate = both[..., [2 * i for i in rows] if packed == "interleaved" else list(rows)]
        up = both[
            ..., [2 * i + 1 for i in rows] if packed == "interleaved" else [size + i for i in rows]
        ]
        inner = act(gate) * up
    elif options.get("gated", options.get("activation", "silu") in ("silu", "swiglu", "geglu")):
        inner = act(linear(full, f"{prefix}gate_proj", x)) * linear(full, f"{prefix}up_proj", x)
    else:
        inner = act(linear(full, f"{prefix}up_proj", x))
    return linear(full, f"{prefix}down_proj", inner)


def attention(
    full: Weights, x: Tensor, case: Case, prefix: str, context: Tensor | None = None
) -> Tensor:
    """x [b, s, H]: causal with rotary pairs (i, i + D/2), or all of the context without; head by head."""
    length, width = x.shape[1], case.head_dim
    source = x if context is None else context
    q = linear(full, f"{prefix}q_proj", x).unflatten(-1, (-1, width))
    k = linear(full, f"{prefix}k_proj", source).unflatten(-1, (-1, width))
    v = linear(full, f"{prefix}v_proj", source).unflatten(-1, (-1, width))
    frequency = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)  # tables are fp32 by convention

    def turn(y: Tensor) -> Tensor:
        if context is not None:
            return y
        a, b = y.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    heads = []
    for head in range(case.heads):
        shared = head * case.kv_heads // case.heads
        scores = turn(q[:, :, head]) @ turn(k[:, :, shared]).mT / math.sqrt(width)
        if context is None:
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            scores = scores.masked_fill(~seen, -math.inf)
        heads.append(scores.softmax(-1) @ v[:, :, shared])
    return linear(full, f"{prefix}o_proj", torch.cat(heads, -1))


def block(full: Weights, x: Tensor, case: Case, context: Tensor | None = None) -> Tensor:
    """x [b, s, H] through the whole block, written out by position of the norms."""
    kind, position = case.given("norm", "rms"), case.given("norm_position", "pre")

    def n(name: str, y: Tensor) -> Tensor:
        return norm(full, name, y, case, kind)

    def a(y: Tensor) -> Tensor:
        return attention(full, y, case, "self_attn.")

    def c(y: Tensor) -> Tensor:
        return attention(full, y, case, "cross_attn.", context)

    def m(y: Tensor) -> Tensor:
        return mlp(full, y, case, case.given("mlp", {}), "mlp.")

    if case.given("parallel", False):
        y = n("input_layernorm", x)
        return x + a(y) + m(y)
    if position == "pre":
        x = x + a(n("input_layernorm", x))
        if context is not None:
            x = x + c(n("pre_cross_attn_layernorm", x))
        return x + m(n("post_attention_layernorm", x))
    if position == "post":
        x = n("post_attention_layernorm", x + a(x))
        if context is not None:
            x = n("post_cross_attn_layernorm", x + c(x))
        return n("post_feedforward_layernorm", x + m(x))
    x = x + n("post_attention_layernorm", a(n("input_layernorm", x)))
    if context is not None:
        x = x + n("post_cross_attn_layernorm", c(n("pre_cross_attn_layernorm", x)))
    return x + n("post_feedforward_layernorm", m(n("pre_feedforward_layernorm", x)))


def fill(module: nn.Module, full: Weights) -> None:
    """Give every placed parameter its part of the unsplit tensors; every name has to occur."""
    found = set()
    with torch.no_grad():
        for name, parameter, placement in placements(module):
            parameter.copy_(placement.slice(full[name]))
            found.add(name)
    assert found == set(full), found ^ set(full)


def to_rank(
    x: Tensor, group: ParallelGroup, sequence_parallel: bool, batch_first: bool | None
) -> Tensor:
    """[b, s, H] -> what this rank's layer takes: its tokens, in its layout."""
    if sequence_parallel:
        x = x.split(split_sizes(x.shape[1], group.size), dim=1)[group.rank]
    first = not sequence_parallel if batch_first is None else batch_first
    return (x if first else x.transpose(0, 1)).contiguous()


def from_ranks(
    x: Tensor, group: ParallelGroup, sequence_parallel: bool, batch_first: bool | None, tokens: int
) -> Tensor:
    """The reverse: [b, s, H] on every rank."""
    first = not sequence_parallel if batch_first is None else batch_first
    x = x.transpose(0, 1) if first else x
    if sequence_parallel:
        x = all_gather(x.contiguous(), group, counts=split_sizes(tokens, group.size))
    return x.transpose(0, 1)


def distance(x: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest element."""
    return float((x.detach().double() - wanted).abs().max() / wanted.abs().max())
