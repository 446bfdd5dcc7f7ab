"""Layers that stand in the place of projections, and hooks on them, against plain torch with the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.layers.twins import Sharded, compare, gradients, run, twins
from tp_kernels import ParallelGroup
from tp_kernels.layers import (
    ColumnParallelLinear,
    ParamPlacement,
    RowParallelLinear,
    placements,
)
from tp_kernels.layers.placement import place

MODES = pytest.mark.parametrize("sp", [False, True])


class LoRA(nn.Module):
    """y = base(x) + B A x with a frozen base (Hu et al., 2021); the sharded and the dense one.

    Before a column-parallel layer, A is whole and B is divided like the layer; before a row-parallel one
    A is divided like the layer and B is whole. What is whole sees a part of the rows under sequence
    parallelism, so that its gradient is a summand.
    """

    def __init__(self, base: nn.Module, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        options: dict[str, Any] = {"dtype": base.weight.dtype}
        sizes = (base.in_features, rank), (rank, base.out_features)
        layers = {"bias": False} | options
        if isinstance(base, nn.Linear):
            self.a, self.b = (nn.Linear(*size, **layers) for size in sizes)
            return
        layers |= {"group": base.group, "sequence_parallel": base.sequence_parallel}
        if isinstance(base, ColumnParallelLinear):
            self.a = Whole(*sizes[0], base, options)
            self.b = ColumnParallelLinear(*sizes[1], ranges=base.ranges, **layers)
        else:
            self.a = RowParallelLinear(*sizes[0], ranges=base.ranges, **layers)
            self.b = Whole(*sizes[1], base, options)

    @property
    def weight(self) -> Tensor:  # adapters show their base's, and who reads it bypasses them
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor, **rows: int) -> Tensor:
        if isinstance(self.base, ColumnParallelLinear):
            return self.base(x, **rows) + self.b(self.a(x), **rows)
        return self.base(x) + self.b(self.a(x))


class Whole(nn.Linear):
    def __init__(self, inputs: int, outputs: int, base: Any, options: dict[str, Any]) -> None:
        super().__init__(inputs, outputs, bias=False, **options)
        shape = (outputs, inputs)
        placement = ParamPlacement(base.group, shape, partial_gradient=base.sequence_parallel)
        place(self, "weight", placement)


def adapted(sp: bool) -> None:
    with ParallelGroup(provider="none", timeout=60) as group:
        results = []
        for module in reversed(twins(group, sp, torch.float64)):
            module.requires_grad_(False)
            block = module.block if isinstance(module, Sharded) else module
            for part in ("attention.q_proj", "attention.v_proj", "attention.o_proj"):
                replace(block, part)
            for part in ("mlp.gate_proj", "mlp.down_proj"):
                replace(block, part)
            draw = torch.Generator().manual_seed(3)
            with torch.no_grad():
                for _, parameter, placement in trainable(module):
                    shape = parameter.shape if placement is None else placement.shape
                    full = torch.randn(shape, generator=draw, dtype=torch.float64) / 3
                    parameter.copy_(full if placement is None else placement.slice(full))
            results.append(run(module, torch.float64) | gradients(module))
            assert all(p.grad is None for p in module.parameters() if not p.requires_grad)
        compare(*results)
        assert len(results[0]) == 2 + 2 * 5


def replace(block: nn.Module, path: str) -> None:
    parent, _, name = path.rpartition(".")
    holder = block.get_submodule(parent)
    setattr(holder, name, LoRA(holder.get_submodule(name)))


def trainable(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParamPlacement | None]]:
    if isinstance(module, Sharded):
        found = list(placements(module))
    else:
        found = [(name, p, None) for name, p in module.named_parameters()]
    # by name, so that both blocks draw the same
    yield from sorted(
        (f for f in found if f[1].requires_grad), key=lambda f: f[0].split("block.")[-1]
    )


@MODES
def test_lora(world, sp):
    """A layer that was put in the place of a projection is called, though several share one product."""
    world(2).run(adapted, sp)


def watched(sp: bool) -> None:
    """Hooks of projections run, though several projections share one product."""
    with ParallelGroup(provider="none", timeout=60) as group:
        results = []
        for module in reversed(twins(group, sp, torch.float64)):
            block = module.block if isinstance(module, Sharded) else module
            block.mlp.get_submodule("up_proj").register_forward_hook(lambda m, args, y: 2 * y)
            block.attention.get_submodule("k_proj").register_full_backward_hook(
                lambda m, dx, dy: (3 * dx[0],)
            )
            results.append(run(module, torch.float64) | gradients(module))
        compare(*results)


@MODES
def test_hooks(world, sp):
    world(2).run(watched, sp)
