"""What a rank computes for `tp-kernels bench block`: layers, decoding and training steps, and the oracle.

The oracle is the same block in float64 on unsplit weights, in plain torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from tp_kernels.comm import ParallelGroup
from tp_kernels.layers import (
    ColumnParallelLinear,
    KVCache,
    ParallelAttention,
    ParallelMLP,
    RotaryOptions,
    RowParallelLinear,
    finalize_gradients,
    placements,
)
from tp_kernels.ops.elementwise import rms_norm

from .pool import Case, group_of_rank
from .products import random
from .slices import Work

PARTS = ("mlp", "attention", "block")
EPSILON = 1e-5
ROPE_THETA = 10000.0
CONTEXT = 128  # tokens before the one that is decoded
# Of the root mean square of what is checked: above what rounding does to the largest element, and a
# thousandth of what a rank contributes.
TOLERANCE = 3e-4


@dataclass(frozen=True)
class Preset:
    """Sizes of a transformer block."""

    like: str
    heads: int
    kv_heads: int
    intermediate: int


PRESETS = {
    64: Preset("a tiny model for tests", 4, 2, 160),
    576: Preset("SmolLM2-135M", 9, 3, 1536),
    2048: Preset("Llama-3.2-1B", 32, 8, 8192),
}


class Block(nn.Module):
    """x + attention(norm(x)), then that + mlp(norm(that))."""

    def __init__(self, attention: ParallelAttention, mlp: ParallelMLP, norms: list[Tensor]) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp
        self.input_norm, self.post_norm = (nn.Parameter(norm.clone()) for norm in norms)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attention(rms_norm(x, self.input_norm, EPSILON), cache=cache)
        return x + self.mlp(rms_norm(x, self.post_norm, EPSILON))


@lru_cache(maxsize=1)
def weights(hidden: int) -> dict[str, Tensor]:
    """The unsplit weights [N, K] and norm weights."""
    preset = PRESETS[hidden]
    kv, wide = preset.kv_heads * (hidden // preset.heads), preset.intermediate
    shapes = {
        "q_proj": (hidden, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, hidden),
        "gate_proj": (wide, hidden),
        "up_proj": (wide, hidden),
        "down_proj": (hidden, wide),
    }
    found = {
        name: random(10 + index, *shape) / math.sqrt(shape[1])
        for index, (name, shape) in enumerate(shapes.items())
    }
    return found | {
        name: 1 + random(20 + i, hidden) / 8 for i, name in enumerate(("input", "post"))
    }


@lru_cache(maxsize=1)
def past(hidden: int) -> tuple[Tensor, Tensor]:
    """Keys and values [1, n_kv, CONTEXT, D] of the tokens before."""
    preset = PRESETS[hidden]
    shape = (1, preset.kv_heads, CONTEXT, hidden // preset.heads)
    return random(30, *shape), random(31, *shape)


class Layer:
    """This rank's part of a layer, with the weights of the oracle; all implementations share it."""

    def __init__(self, part: str, hidden: int) -> None:
        preset, group, whole = PRESETS[hidden], group_of_rank(), weights(hidden)
        self.attention = ParallelAttention(
            hidden, preset.heads, preset.kv_heads, rotary=RotaryOptions(ROPE_THETA), group=group
        )
        mlp = ParallelMLP(hidden, preset.intermediate, group=group)
        for module in (self.attention, mlp):
            for name, child in module.named_children():
                if isinstance(child, ColumnParallelLinear | RowParallelLinear):
                    child.load_dense(whole[name])
        self.module: nn.Module = {
            "mlp": mlp,
            "attention": self.attention,
            "block": Block(self.attention, mlp, [whole["input"], whole["post"]]),
        }[part]

    def use(self, group: ParallelGroup) -> None:
        """Communicate through `group` from now on."""
        for child in self.module.modules():
            if isinstance(child, ColumnParallelLinear | RowParallelLinear):
                child.group = group


@lru_cache(maxsize=1)
def layer(part: str, hidden: int) -> Layer:
    return Layer(part, hidden)


@lru_cache(maxsize=4)
def group_for(implementation: str) -> ParallelGroup:
    """A group that runs every op in one way."""
    return ParallelGroup(implementation=implementation)


def work(group: ParallelGroup, case: Case, implementation: str) -> Work:
    """One step of the layer: forward, or forward and backward."""
    hidden, rows = case["hidden"], case["rows"]
    here = layer(case["part"], hidden)
    module = here.module
    own = group if group.size == 1 else group_for(implementation)
    use = partial(here.use, own)
    x = random(1, 1, rows, hidden)
    cache, options = None, {}
    if rows == 1 and case["part"] != "mlp":
        cache = KVCache()
        first, last = here.attention.shard.kv
        keys, values = past(hidden)
        cache.append(keys[:, first:last], values[:, first:last])
        options = {"cache": cache}

    def forward() -> Tensor:
        if cache is not None:
            cache.crop(CONTEXT)  # the same token again
        with torch.inference_mode():
            return module(x, **options)

    def check() -> float:
        (y,) = oracle(case["part"], hidden, rows, backward=False)
        return error_of(forward(), y)

    if case["pass"] == "forward":
        return Work(forward, check, use)
    leaf, dy = x.requires_grad_(), random(2, 1, rows, hidden)
    parameters = list(module.parameters())

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(module(leaf), [leaf, *parameters], dy)

    def check_gradients() -> float:
        return gradient_error(module, backward(), oracle(case["part"], hidden, rows, backward=True))

    return Work(backward, check_gradients, use)


def gradient_error(module: nn.Module, found: tuple[Tensor, ...], exact: list[Any]) -> float:
    """Of dx and of this rank's part of every gradient, completed over the ranks."""
    dx, by_name = exact
    for parameter, gradient in zip(module.parameters(), found[1:], strict=True):
        parameter.grad = gradient.clone()
    finalize_gradients(module)
    errors = [error_of(found[0], dx)]
    for name, parameter, placement in placements(module):
        assert parameter.grad is not None
        short = name.split(".")[-2]
        errors.append(error_of(parameter.grad, placement.slice(by_name[short])))
    if isinstance(module, Block):
        for parameter, short in ((module.input_norm, "input"), (module.post_norm, "post")):
            assert parameter.grad is not None
            errors.append(error_of(parameter.grad, by_name[short]))
    for parameter in module.parameters():
        parameter.grad = None
    return max(errors)


def error_of(found: Tensor, exact: Tensor) -> float:
    """Largest error in units of TOLERANCE times the root mean square of `exact`."""
    if found.shape != exact.shape or not bool(torch.isfinite(found).all()):
        return math.inf
    scale = float(exact.pow(2).mean().sqrt())
    return float((found.double() - exact).abs().max()) / (TOLERANCE * scale)


@lru_cache(maxsize=1)
def oracle(part: str, hidden: int, rows: int, backward: bool) -> list[Any]:
    """[y], or [dx, gradients by weight], in float64 on unsplit weights."""
    whole = {name: weight.double() for name, weight in weights(hidden).items()}
    x = random(1, 1, rows, hidden).double()
    used = list(_used(part))
    if backward:
        for tensor in (x, *(whole[name] for name in used)):
            tensor.requires_grad_()
    with torch.set_grad_enabled(backward):
        y = _dense(part, hidden, whole, x)
    if not backward:
        return [y]
    leaves = [x, *(whole[name] for name in used)]
    dy = random(2, 1, rows, hidden).double()
    dx, *gradients = torch.autograd.grad(y, leaves, dy)
    return [dx, dict(zip(used, gradients, strict=True))]


def _used(part: str) -> Iterator[str]:
    if part != "mlp":
        yield from ("q_proj", "k_proj", "v_proj", "o_proj")
    if part != "attention":
        yield from ("gate_proj", "up_proj", "down_proj")
    if part == "block":
        yield from ("input", "post")


def _dense(part: str, hidden: int, w: dict[str, Tensor], x: Tensor) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return w[name] * (x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt())

    def mlp(x: Tensor) -> Tensor:
        gate = nn.functional.silu(x @ w["gate_proj"].t())
        return (gate * (x @ w["up_proj"].t())) @ w["down_proj"].t()

    attention: Callable[[Tensor], Tensor] = lambda x: _attention(hidden, w, x)
    if part == "mlp":
        return mlp(x)
    if part == "attention":
        return attention(x)
    x = x + attention(norm(x, "input"))
    return x + mlp(norm(x, "post"))


def _attention(hidden: int, w: dict[str, Tensor], x: Tensor) -> Tensor:
    preset, rows = PRESETS[hidden], x.shape[1]
    width = hidden // preset.heads
    q, k, v = (
        (x[0] @ w[name].t()).view(rows, -1, width).transpose(0, 1)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    before = CONTEXT if rows == 1 else 0
    place = torch.arange(before, before + rows, dtype=torch.float64)
    turn = place[:, None] * ROPE_THETA ** -(torch.arange(0, width, 2).double() / width)
    q, k = (_turned(t, turn.cos(), turn.sin()) for t in (q, k))
    if before:
        keys, values = past(hidden)
        k = torch.cat((keys[0].double(), k), 1)
        v = torch.cat((values[0].double(), v), 1)
    serving = [head * preset.kv_heads // preset.heads for head in range(preset.heads)]
    scores = q @ k[serving].transpose(1, 2) / math.sqrt(width)
    if rows > 1:
        scores = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), -math.inf)
    y = scores.softmax(-1) @ v[serving]
    return (y.transpose(0, 1).reshape(rows, hidden) @ w["o_proj"].t()).unsqueeze(0)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
