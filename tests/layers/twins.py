"""A transformer block twice with equal weights: in plain torch, and of our layers.

Put through the same wrapping, they have to agree in outputs and in all gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.layers.llama import Layer, Shape
from tp_kernels import ParallelGroup
from tp_kernels.layers import finalize_gradients, placements
from tp_kernels.ops import gather_rows, scatter_rows

# One KV head for three query heads: with two ranks both hold it, and its gradient is a sum.
SHAPE = Shape(heads=3, kv_heads=1, head_dim=6, hidden=21, intermediate=29, bias=True)
TOKENS, BATCH = 7, 2  # does not divide by two


class Dense(nn.Module):
    """The block in plain torch: [s, b, H] -> [s, b, H]. Parameters are called as those of `Layer`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        s = SHAPE
        inner, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, s.bias, dtype=dtype)

        self.norm1 = nn.RMSNorm(s.hidden, 1e-6, dtype=dtype)
        self.norm2 = nn.RMSNorm(s.hidden, 1e-6, dtype=dtype)
        self.attention = nn.ModuleDict(
            {
                "q_proj": linear(s.hidden, inner),
                "k_proj": linear(s.hidden, kv),
                "v_proj": linear(s.hidden, kv),
                "o_proj": linear(inner, s.hidden),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(s.hidden, s.intermediate),
                "up_proj": linear(s.hidden, s.intermediate),
                "down_proj": linear(s.intermediate, s.hidden),
            }
        )
        with torch.no_grad():
            for norm in (self.norm1, self.norm2):  # ones would hide a norm that is not applied
                norm.weight.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        a, m = self.attention, self.mlp
        y = self.norm1(x)
        q, k, v = (
            a[name](y).unflatten(-1, (-1, SHAPE.head_dim)).permute(1, 2, 0, 3)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q, k = turn(q), turn(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + a["o_proj"](y.permute(2, 0, 1, 3).flatten(2))
        y = self.norm2(x)
        return x + m["down_proj"](F.silu(m["gate_proj"](y)) * m["up_proj"](y))


def turn(x: Tensor) -> Tensor:
    """Half-split rotary embedding of [b, n, s, D]; the table is in fp32 by convention."""
    half = torch.arange(0, SHAPE.head_dim, 2, dtype=torch.float32)
    angle = torch.arange(x.shape[2], dtype=torch.float32)[:, None] * 10000.0 ** (
        -half / SHAPE.head_dim
    )
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Sharded(nn.Module):
    """The block of our layers with the interface of `Dense`, whole activations in and out."""

    def __init__(self, group: ParallelGroup, sp: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.group, self.sp = group, sp
        self.block = Layer(SHAPE, group, sp, dtype)

    def forward(self, x: Tensor) -> Tensor:
        if not self.sp:
            return self.block(x.transpose(0, 1), None).transpose(0, 1)
        rows = x.shape[0]
        return gather_rows(
            self.block(scatter_rows(x, group=self.group), rows), group=self.group, rows=rows
        )


def twins(group: ParallelGroup, sp: bool, dtype: torch.dtype) -> tuple[Dense, Sharded]:
    """Both blocks with equal weights."""
    torch.manual_seed(17)
    dense, sharded = Dense(dtype), Sharded(group, sp, dtype)
    load(sharded, dense)
    return dense, sharded


@torch.no_grad()
def load(sharded: nn.Module, dense: nn.Module) -> None:
    full = dict(dense.named_parameters())
    for name, parameter, placement in placements(sharded):
        parameter.copy_(placement.slice(full[name.removeprefix("block.")]))


def batch(dtype: torch.dtype, seed: int = 23) -> tuple[Tensor, Tensor]:
    """Input and gradient of the output, the same on every rank."""
    draw = torch.Generator().manual_seed(seed)
    x, dy = (
        torch.randn(TOKENS, BATCH, SHAPE.hidden, generator=draw, dtype=torch.float64)
        for _ in range(2)
    )
    return x.to(dtype), dy.to(dtype)


Results = dict[str, Tensor]


def run(forward: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Results:
    """Output and input gradient; those of the parameters stay where they are."""
    x, dy = batch(dtype)
    y = forward(x.requires_grad_())
    y.backward(dy.to(y.dtype))
    return {"y": y.detach(), "dx": x.grad}


def gradients(module: nn.Module) -> Results:
    """Of every parameter that takes one, unsplit, by the name it has in the dense block."""
    if not isinstance(module, Sharded):
        return {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    finalize_gradients(module)
    found = {}
    for name, parameter, placement in placements(module):
        if parameter.requires_grad:
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            found[name.removeprefix("block.")] = placement.gather(gradient)
    return found


def compare(ours: Results, dense: Results, bound: float = 1e-13) -> None:
    """In float64, where about 50 roundings of 1e-16 lie on a path, and nothing else may differ."""
    assert ours.keys() == dense.keys(), sorted(ours.keys() ^ dense.keys())
    for name, wanted in dense.items():
        got = ours[name]
        assert got.shape == wanted.shape and got.dtype == wanted.dtype, (name, got, wanted)
        assert wanted.abs().max() > 1e-3, f"{name}: nothing to compare"
        error = float((got - wanted).abs().max() / wanted.abs().max())
        assert error < bound, (name, error)
