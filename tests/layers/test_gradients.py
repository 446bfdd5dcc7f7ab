"""Partial gradients completed, gradients clipped, parameters counted: as of the unsplit model."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.oracle import digest
from tp_kernels.comm import ParallelGroup, UnsupportedError
from tp_kernels.layers import (
    ColumnParallelLinear,
    ParamPlacement,
    RowParallelLinear,
    backward_dw,
    clip_grad_norm_,
    count_parameters,
    finalize_gradients,
    gradient_of,
    placements,
    use_main_grads,
)
from tp_kernels.layers.placement import place

# (unsplit shape, what a rank of so many holds along dimension 0 or 1, whether its gradient is partial)
Kind = tuple[tuple[int, ...], int | None, Callable[[int], list[Any]], bool]


def even(size: int) -> Callable[[int], list[Any]]:
    return lambda world: [(size * r // world, size * (r + 1) // world) for r in range(world)]


def overlapping(world: int) -> list[Any]:
    """Two heads of three rows; where there are more ranks, several hold the same head."""
    return [
        (3 * (2 * r // world), 3 * ((2 * (r + 1) - 1) // world + 1)) if world > 1 else (0, 6)
        for r in range(world)
    ]


def packed(world: int) -> list[Any]:
    """Eight rows that one rank each holds, then two heads as above, for keys and for values."""
    return [
        ((8 * r // world, 8 * (r + 1) // world), (8 + a, 8 + b), (14 + a, 14 + b))
        for r, (a, b) in enumerate(overlapping(world))
    ]


KINDS: dict[str, Kind] = {
    "columns": ((7, 4), 0, even(7), False),
    "rows": ((5, 9), 1, even(9), False),
    "heads": ((6, 4), 0, overlapping, False),
    "packed": ((20, 4), 0, packed, False),
    "packed_bias": ((20,), 0, packed, False),
    "norm": ((4,), None, lambda world: [], True),
    "whole": ((3,), None, lambda world: [], False),
}


class Placed(nn.Module):
    """A parameter of every kind, one without placement, one tied, one frozen."""

    def __init__(self, group: ParallelGroup, dtype: torch.dtype) -> None:
        super().__init__()
        for name, (shape, dim, ranges, partial) in KINDS.items():
            placement = ParamPlacement(group, shape, dim, tuple(ranges(group.size)), partial)
            place(self, name, placement)
            local = placement.slice(unsplit(name, shape)).to(dtype)
            setattr(self, name, nn.Parameter(local.clone()))
        self.unplaced = nn.Parameter(unsplit("unplaced", (2, 2)).to(dtype))
        self.tied = self.columns
        place(self, "tied", self.placements["columns"])
        self.frozen = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)


def unsplit(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64
    )


def full_gradient(name: str, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
    draw = torch.Generator().manual_seed(100 + sum(map(ord, name)))
    return scale * torch.randn(shape, generator=draw, dtype=torch.float64)


def give_gradients(model: Placed, rank: int, dtype: torch.dtype, scale: float = 1.0) -> None:
    """What the backward leaves: each holder of a part of a gradient has a summand of it."""
    for name, p, placement in placements(model):
        shape, dim, ranges, partial = KINDS[name]
        whole = full_gradient(name, shape, scale)
        size = placement.group.size
        holders = (
            torch.full(shape, float(size)) if partial else holders_of(shape, dim, ranges, size)
        )
        p.grad = placement.slice(whole / holders.double()).to(dtype).clone()
    if model.unplaced.requires_grad:
        model.unplaced.grad = full_gradient("unplaced", (2, 2), scale).to(dtype)


def holders_of(
    shape: tuple[int, ...], dim: int | None, ranges: Callable[[int], list[Any]], size: int
) -> Tensor:
    """How many ranks hold each element; 1 of what is whole and complete everywhere."""
    count = torch.zeros(shape)
    if dim is None:
        return count + 1
    for held in ranges(size):
        for start, stop in (held,) if isinstance(held[0], int) else held:
            count.narrow(dim, start, stop - start).add_(1)
    return count


def dense(dtype: torch.dtype, scale: float = 1.0) -> dict[str, nn.Parameter]:
    """The unsplit parameters with their gradients."""
    shapes = {name: kind[0] for name, kind in KINDS.items()} | {"unplaced": (2, 2)}
    model = {name: nn.Parameter(unsplit(name, shape).to(dtype)) for name, shape in shapes.items()}
    for name, p in model.items():
        p.grad = full_gradient(name, shapes[name], scale).to(dtype)
    return model


def finalize(dtype: torch.dtype, main: bool) -> None:
    with ParallelGroup(provider="none" if dtype == torch.float64 else "auto", timeout=30) as group:
        model, whole = Placed(group, dtype), dense(dtype)
        give_gradients(model, group.rank, dtype)
        if main:
            for p in model.parameters():
                if p.grad is not None:
                    p.main_grad, p.grad = p.grad.float(), None
        finalize_gradients(model)
        eps = torch.finfo(dtype).eps
        for name, p, placement in placements(model):
            got = p.main_grad if main else p.grad
            assert gradient_of(p) is got
            wanted = placement.slice(full_gradient(name, KINDS[name][0]))
            # up to 4 rounded summands, and the sum
            assert ((got.double() - wanted).abs() <= 6 * eps * wanted.abs()).all(), name
            assert got.dtype == (torch.float32 if main else dtype)
        assert model.frozen.grad is None and len(whole) == len(KINDS) + 1


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("dtype", "main"),
    [
        (torch.float64, False),
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
    ],
)
def test_finalize(world, size, dtype, main):
    world(size).run(finalize, dtype, main)


def without_gradients() -> None:
    """None counts as zero on its rank, and stays None where no rank has a gradient."""
    with ParallelGroup(timeout=30) as group:
        model = Placed(group, torch.float32)
        if group.rank == 0:
            model.norm.grad = torch.ones(4)
            model.heads.grad = torch.ones_like(model.heads)
        finalize_gradients(model)
        assert torch.equal(model.norm.grad, torch.ones(4))
        assert model.packed.grad is None and model.columns.grad is None
        if not model.placements["heads"].overlapping:
            assert group.size == 2 and (model.heads.grad is None) == (group.rank > 0)
            return
        mine = range(*model.placements["heads"].pieces()[0])
        first = range(*model.placements["heads"].pieces(0)[0])
        wanted = torch.tensor([float(row in first) for row in mine])
        assert torch.equal(model.heads.grad, wanted.unsqueeze(1).expand(-1, 4))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parameters_without_gradient(world, size):
    world(size).run(without_gradients)


def only_what_is_shared() -> int:
    """Elements that finalize_gradients sends of a packed parameter."""
    from tp_kernels.layers import gradients

    sent = []
    reduce = gradients.all_reduce
    gradients.all_reduce = lambda x, *args, **kw: sent.append(x.numel()) or reduce(x, *args, **kw)
    try:
        with ParallelGroup(timeout=30) as group:
            model = Placed(group, torch.float32)
            for name in KINDS:
                if name != "packed":
                    getattr(model, name).requires_grad_(False)
            finalize_gradients(model)
    finally:
        gradients.all_reduce = reduce
    return sum(sent)


def test_only_shared_parts_are_sent(world):
    assert world(4).run(only_what_is_shared) == [12 * 4 + 1] * 4  # both heads twice; a flag
    assert world(2).run(only_what_is_shared) == [0] * 2  # a head for each


def clip(
    dtype: torch.dtype, order: float, max_norm: float, scale: float, main: bool
) -> tuple[str, float]:
    """Digest of the norm, equal on all ranks, and the norm; gradients are compared here."""
    with ParallelGroup(provider="none" if dtype == torch.float64 else "auto", timeout=30) as group:
        model, whole = Placed(group, dtype), dense(dtype, scale)
        give_gradients(model, group.rank, dtype, scale)
        if main:
            for p in model.parameters():
                if p.grad is not None:
                    p.main_grad, p.grad = p.grad.float(), None
        finalize_gradients(model)
        wide = [p.grad.double().clone() for p in whole.values()]
        for p, gradient in zip(whole.values(), wide, strict=True):
            p.grad, p.data = None, p.data.double()
            p.grad = gradient
        wanted = torch.nn.utils.clip_grad_norm_(list(whole.values()), max_norm, order)
        norm = clip_grad_norm_(model, max_norm, order)
        assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        eps = 16 * torch.finfo(torch.float32 if main else dtype).eps
        if main:  # the gradients of this test were rounded to bf16 before
            eps = 16 * torch.finfo(dtype).eps
        assert abs(float(norm) - float(wanted)) <= eps * float(wanted), (float(norm), float(wanted))
        for name, p, placement in placements(model):
            got = gradient_of(p)
            clipped = placement.slice(whole[name].grad)
            assert ((got.double() - clipped).abs() <= eps * clipped.abs()).all(), name
        got, clipped = gradient_of(model.unplaced), whole["unplaced"].grad
        assert ((got.double() - clipped).abs() <= eps * clipped.abs()).all()
        return digest(norm), float(norm)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("dtype", "order", "max_norm", "scale", "main"),
    [
        (torch.float64, 2.0, 1.0, 1.0, False),
        (torch.float64, 1.0, 3.0, 1.0, False),
        (torch.float64, 3.5, 1e6, 1.0, False),  # nothing to clip
        (torch.float64, inf, 0.5, 1.0, False),
        (torch.float32, 2.0, 1.0, 1e12, False),
        (torch.bfloat16, 2.0, 1.0, 1.0, False),
        (torch.bfloat16, 2.0, 1.0, 1.0, True),
    ],
)
def test_clipping(world, size, dtype, order, max_norm, scale, main):
    results = world(size).run(clip, dtype, order, max_norm, scale, main)
    assert len(set(results)) == 1


def same_bits_everywhere() -> str:
    """Replicated gradients that differ in their last bits between ranks must not pull the ranks apart."""
    with ParallelGroup(timeout=30) as group:
        model = Placed(group, torch.float32)
        give_gradients(model, group.rank, torch.float32)
        for p in (model.whole, model.unplaced):
            p.grad *= 1 + group.rank * 1e-6
        return digest(clip_grad_norm_(model, 1.0))


def test_norm_has_the_same_bits_on_all_ranks(world):
    assert len(set(world(3).run(same_bits_everywhere))) == 1


def odd_models() -> None:
    """Several modules, several groups, no gradients, nan, refusals."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    with ParallelGroup(timeout=30) as group, ParallelGroup(pair, timeout=30) as half:
        torch.manual_seed(1)
        one = ColumnParallelLinear(4, 8, group=group)
        two = RowParallelLinear(8, 4, group=half)
        for layer in (one, two):
            for p in layer.parameters():
                p.grad = torch.full_like(p, 2.0)
        # 32 + 8 elements on four ranks, 32 + 4 on each pair
        norm = clip_grad_norm_([one, two], 1e9)
        assert abs(float(norm) - (4.0 * 76) ** 0.5) < 1e-4
        assert abs(float(clip_grad_norm_(nn.ModuleList([one, two]), 1e9)) - float(norm)) == 0
        assert count_parameters(nn.ModuleList([one, two])) == 76
        for layer in (one, two):
            layer.zero_grad()
        assert float(clip_grad_norm_([one, two], 1.0)) == 0.0
        assert float(clip_grad_norm_(nn.Identity(), 1.0)) == 0.0
        if group.rank == 3:
            one.bias.grad = torch.full_like(one.bias, float("nan"))
        else:
            one.bias.grad = torch.zeros_like(one.bias)
        for order in (2.0, inf):
            with pytest.raises(RuntimeError, match="norm of order"):
                clip_grad_norm_(one, 1.0, order, error_if_nonfinite=True)
            assert clip_grad_norm_(one, 1.0, order).isnan()
        with pytest.raises(UnsupportedError, match="pass the model"):
            clip_grad_norm_(one.parameters(), 1.0)
        for order in (0.0, -inf):
            with pytest.raises(UnsupportedError, match="is not positive"):
                clip_grad_norm_(one, 1.0, order)


def test_odd_models(world):
    world(4).run(odd_models)


def sharded_again(order: float) -> tuple[str, str]:
    """FSDP2 divides the gradients over the other dimension of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    with ParallelGroup(mesh["tensor"], provider="none", timeout=60) as group:
        model = Placed(group, torch.float64)
        fully_shard(model, mesh=mesh["data"])
        for name, p, placement in placements(model):
            part = placement.slice(full_gradient(name, KINDS[name][0]))
            if p.requires_grad:
                p.grad = nn.Parameter(distributed(part, p)).detach()
        model.unplaced.grad = distributed(full_gradient("unplaced", (2, 2)), model.unplaced)
        whole = dense(torch.float64)
        wanted = torch.nn.utils.clip_grad_norm_(list(whole.values()), 1.0, order)
        norm = clip_grad_norm_(model, 1.0, order)
        assert abs(float(norm - wanted)) < 1e-14 * float(wanted)
        for name, p, placement in placements(model):
            clipped = placement.slice(whole[name].grad)
            torch.testing.assert_close(p.grad.full_tensor(), clipped, rtol=1e-14, atol=0)
        assert count_parameters(model) == sum(p.numel() for p in whole.values()) + 3
        return digest(norm), str(group.rank)


def distributed(full: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


@pytest.mark.parametrize("order", [2.0, inf])
def test_clipping_under_fsdp(world, order):
    assert len({bits for bits, _ in world(4).run(sharded_again, order)}) == 1


def counts() -> tuple[int, int]:
    with ParallelGroup(timeout=30) as group:
        model = Placed(group, torch.float32)
        model.heads.requires_grad_(False)
        return count_parameters(model), count_parameters(model, trainable_only=True)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_counts(world, size):
    # 28 + 45 + 24 + 80 + 20 + 4 + 3 placed, 4 unplaced, 3 frozen; tied ones once
    assert world(size).run(counts) == [(211, 184)] * size


def main_grads() -> None:
    """What ops add and what autograd accumulates, over two micro-batches; then from zero again."""
    with ParallelGroup(timeout=30) as group:
        for sp in (False, True):
            torch.manual_seed(2)
            options = {"group": group, "sequence_parallel": sp, "delay_wgrad": True}
            layers = [ColumnParallelLinear(4, 8, **options), RowParallelLinear(8, 4, **options)]
            model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.LayerNorm(4))
            model[0].weight.requires_grad_(False)
            for step in range(2):
                use_main_grads(model)
                for p in model.parameters():
                    assert not p.requires_grad or not p.main_grad.any(), step
                for scale in (1.0, 3.0):
                    model(torch.full((3, 4), scale)).square().sum().backward()
                    backward_dw(model)
                assert all(p.grad is None for p in model.parameters())
                found = {}
                for name, p in model.named_parameters():
                    if p.requires_grad:
                        found[name], p.main_grad = gradient_of(p).clone(), None
                # without the buffers everything is in .grad; of the hooks nothing is left to do
                for scale in (1.0, 3.0):
                    model(torch.full((3, 4), scale)).square().sum().backward()
                    backward_dw(model)
                plain = {}
                for name, p in model.named_parameters():
                    plain[name], p.grad = p.grad, None
                for name, gradient in found.items():
                    torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=1e-6)
                    assert gradient.any() or name == "3.bias"
            model[2].bias.grad = torch.ones(4)
            model[2].bias.main_grad = torch.ones(4)
            with pytest.raises(UnsupportedError, match="in main_grad and in grad"):
                gradient_of(model[2].bias)
            with pytest.raises(UnsupportedError, match="in main_grad and in grad"):
                clip_grad_norm_(model, 1.0)


def test_main_grads_of_a_model(world):
    world(2).run(main_grads)
