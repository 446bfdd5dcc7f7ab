"""Weight gradients computed after the backward: the bits, the hooks and the order of undelayed ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests.oracle import digest
from tp_kernels.comm import ParallelGroup, UnsupportedError
from tp_kernels.comm.layout import split_range
from tp_kernels.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    backward_dw,
    clip_grad_norm_,
    finalize_gradients,
)
from tp_kernels.layers.linear import column_parallel
from tp_kernels.ops import WeightGradientQueue, copy_linear

ROWS, H, INNER = 5, 6, 7


class Block(nn.Module):
    """Three columns that share one product, a row layer; and a layer used twice, whose weight is shared."""

    def __init__(self, group: ParallelGroup, sp: bool, gathered: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        options |= {"group": group, "sequence_parallel": sp}
        self.columns = nn.ModuleList(
            ColumnParallelLinear(H, INNER, bias=i != 1, gathered=gathered, **options)
            for i in range(3)
        )
        self.row = RowParallelLinear(INNER, H, **options)
        self.twice = ColumnParallelLinear(H, INNER, gathered=gathered, **options)
        self.tied = ColumnParallelLinear(H, INNER, gathered=gathered, **options)
        self.tied.weight = self.twice.weight
        self.back = RowParallelLinear(INNER, H, **options)
        self.rows = ROWS if sp else None

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = column_parallel(x, list(self.columns), self.rows)
        x = x + self.row(torch.tanh(a * b + c))
        for layer in (self.twice, self.tied, self.twice):
            x = x + self.back(torch.tanh(layer(x, self.rows)))
        return x

    def recomputed(self, x: Tensor) -> Tensor:
        return checkpoint(self, x, use_reentrant=False)


def batches(group: ParallelGroup, sp: bool, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(8)
    xs = torch.randn(3, ROWS, 2, H).to(dtype)
    if sp:
        start, stop = split_range(ROWS, group.size, group.rank)
        xs = xs[:, start:stop]
    return [x.clone().requires_grad_() for x in xs]


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: p.grad if getattr(p, "main_grad", None) is None else p.main_grad
        for name, p in module.named_parameters()
    }


def watch(module: nn.Module) -> list[str]:
    """Names of the parameters whose hooks were called, with what they saw."""
    seen: list[str] = []
    for name, p in module.named_parameters():
        p.register_hook(lambda gradient, name=name: seen.append(f"{name} {digest(gradient)}"))
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.append(f"{name} after {digest(p.grad)}")
        )
    return seen


def same_bits(dtype: torch.dtype, gathered: str, sp: bool, recompute: bool, main: bool) -> None:
    options = {"provider": "none" if dtype == torch.float64 else "auto", "timeout": 30}
    with ParallelGroup(**options) as group:
        plain, late = (
            Block(group, sp, gathered, dtype=dtype, delay_wgrad=delay) for delay in (False, True)
        )
        if main:
            for block in (plain, late):
                for p in block.parameters():
                    if p.dim() == 2:
                        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        seen = watch(plain), watch(late)
        for p in (*plain.parameters(), *late.parameters()):
            assert p.grad is None
        inputs = [batches(group, sp, dtype) for _ in range(2)]
        steps = []
        for x in inputs[0]:
            y = plain.recomputed(x) if recompute else plain(x)
            y.square().sum().backward()
            steps.append({k: digest(g) for k, g in gradients(plain).items()})
        for x in inputs[1]:
            y = late.recomputed(x) if recompute else late(x)
            y.square().sum().backward()
        # the backwards give input gradients and nothing else
        assert [digest(x.grad) for x in inputs[0]] == [digest(x.grad) for x in inputs[1]]
        assert all(g is None or not g.any() for g in gradients(late).values()) and not seen[1]
        for step in steps:
            backward_dw(late)
            assert {k: digest(g) for k, g in gradients(late).items()} == step
        assert all(len(layer.delayed) == 0 for layer in (*late.columns, late.row, late.twice))
        # of every pass the same hooks saw the same, in whatever order
        assert seen[0] and sorted(seen[0]) == sorted(seen[1])
        backward_dw(late)  # nothing is left
        assert {k: digest(g) for k, g in gradients(late).items()} == steps[-1]
        finalize_gradients(late)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("dtype", "gathered", "sp", "recompute", "main"),
    [
        (torch.float32, "keep", False, False, False),
        (torch.float32, "keep", True, False, False),
        (torch.float32, "redo", True, True, False),
        (torch.bfloat16, "keep", False, True, False),
        (torch.bfloat16, "redo", True, False, True),
        (torch.bfloat16, "keep", False, False, True),
        (torch.float64, "keep", True, True, False),
    ],
)
def test_bits_and_hooks(world, size, dtype, gathered, sp, recompute, main):
    world(size).run(same_bits, dtype, gathered, sp, recompute, main)


def by_layer() -> None:
    """Each layer's own backward_dw, in any order of the layers; autocast; a frozen weight; no_grad."""
    with ParallelGroup(timeout=30) as group:
        for sp in (False, True):
            plain, late = (Block(group, sp, "keep", delay_wgrad=delay) for delay in (False, True))
            for block in (plain, late):
                block.columns[2].weight.requires_grad_(False)
                block.columns[0].bias.requires_grad_(False)
                with torch.autocast("cpu", torch.bfloat16):
                    for x in batches(group, sp, torch.float32)[:2]:
                        block(x).float().square().sum().backward()
            layers = [late.columns[1], late.back, late.row, late.columns[2], late.columns[0]]
            with torch.no_grad():
                late(batches(group, sp, torch.float32)[0])  # leaves nothing
            for layer in layers:
                for _ in range(2):
                    layer.backward_dw()
            assert late.twice.weight.grad is None
            for _ in range(2):
                backward_dw(nn.ModuleList([late.twice, late.tied]))
            wanted, found = gradients(plain), gradients(late)
            assert wanted["columns.2.weight"] is None and wanted["columns.2.bias"] is not None
            for name, gradient in wanted.items():
                assert (gradient is None) == (found[name] is None), name
                assert gradient is None or digest(gradient) == digest(found[name]), name


def test_by_layer(world):
    world(2).run(by_layer)


def announced() -> None:
    """Who waits for the hooks of a weight with main_grad hears of it when the gradient is there."""
    with ParallelGroup(timeout=30) as group:
        layer = RowParallelLinear(INNER, H, group=group, delay_wgrad=True)
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        layer.weight.grad_added_to_main_grad = False
        seen = watch(layer)
        layer(torch.ones(2, layer.weight.shape[1])).sum().backward()
        assert not seen and not layer.weight.grad_added_to_main_grad
        backward_dw(layer)
        assert layer.weight.grad_added_to_main_grad
        assert torch.equal(layer.weight.main_grad, torch.full_like(layer.weight, 2.0))
        zeros = digest(torch.zeros_like(layer.weight))
        assert {f"weight {zeros}", f"weight after {zeros}"} < set(seen) and len(seen) == 4


def test_announced(world):
    world(2).run(announced)


def test_compiled(world):
    world(2).run(compiled)


def compiled() -> None:
    with ParallelGroup(timeout=60) as group:
        results = []
        for compile in (False, True):
            torch._dynamo.reset()
            block = Block(group, True, "keep", delay_wgrad=True)
            forward: Callable[[Tensor], Tensor] = (
                torch.compile(block, backend="aot_eager") if compile else block
            )
            x = batches(group, True, torch.float32)[0]
            forward(x).square().sum().backward()
            assert block.row.weight.grad is None
            backward_dw(block)
            results.append(digest(x.grad, *(p.grad for p in block.parameters())))
        assert results[0] == results[1]


def refusals() -> None:
    with ParallelGroup(timeout=30) as group:
        block = Block(group, False, "keep", delay_wgrad=True)
        for x in batches(group, False, torch.float32)[:2]:
            block(x).sum().backward()
        copied = copy.deepcopy(block.row)
        assert len(block.row.delayed) == 2 and len(copied.delayed) == 0
        assert len(pickle.loads(pickle.dumps(block.row.delayed))) == 0
        backward_dw(block)
        for function in (finalize_gradients, lambda m: clip_grad_norm_(m, 1.0)):
            with pytest.raises(
                UnsupportedError, match=r"columns\.0 \(ColumnP.*\), .*row \(Row.*backward_dw"
            ):
                function(block)
        backward_dw(block)
        finalize_gradients(block)
        x, w = torch.ones(2, 3), torch.ones(4, 3, requires_grad=True)
        with pytest.raises(UnsupportedError, match="a tensor that was computed"):
            copy_linear(x, w * 2, group=group, delay=[WeightGradientQueue()])


def test_refusals(world):
    world(2).run(refusals)


def under_fsdp() -> None:
    """FSDP2 takes gradients in the backward: what comes later would be lost."""
    mesh = init_device_mesh("cpu", (2,))
    groups = [torch.distributed.new_group([rank]) for rank in range(2)]
    group = ParallelGroup(groups[mesh.get_local_rank()])
    layer = ColumnParallelLinear(H, INNER, group=group, delay_wgrad=True)
    fully_shard(layer, mesh=mesh)
    layer(torch.ones(2, H)).sum().backward()
    with pytest.raises(UnsupportedError, match="under fully_shard"):
        backward_dw(layer)


def test_fsdp_is_refused(world):
    world(2).run(under_fsdp)
