"""Column- and row-parallel layers with every option against float64 on unsplit tensors, all gradients."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tp_kernels.comm import ParallelGroup, ShapeError, UnsupportedError
from tp_kernels.comm.layout import split_range
from tp_kernels.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    finalize_gradients,
)

ROWS, BATCH, K, N = 7, 3, 10, 11  # nothing divides by a world size


@dataclass(frozen=True)
class Dense:
    """The unsplit layer: operands, and of a gradient dy of y the value and the magnitude of each result."""

    x: Tensor  # [R, b, K]
    w: Tensor
    b: Tensor
    dy: Tensor  # [R, b, N]

    def results(self) -> dict[str, tuple[Tensor, Tensor, int]]:
        """By name (value, sum of the magnitudes of its summands, their number)."""

        def of(x: Tensor, w: Tensor, b: Tensor, dy: Tensor) -> dict[str, Tensor]:
            rows, grads = x.reshape(-1, K), dy.reshape(-1, N)
            return {
                "y": x @ w.t() + b,
                "dx": dy @ w,
                "dw": grads.t() @ rows,
                "db": grads.sum(0),
            }

        values = of(self.x, self.w, self.b, self.dy)
        sizes = of(self.x.abs(), self.w.abs(), self.b.abs(), self.dy.abs())
        summands = {"y": K + 1, "dx": N, "dw": ROWS * BATCH, "db": ROWS * BATCH}
        return {name: (values[name], sizes[name], summands[name]) for name in values}


def dense(dtype: torch.dtype) -> Dense:
    draw = torch.Generator().manual_seed(5)
    shapes = ((ROWS, BATCH, K), (N, K), (N,), (ROWS, BATCH, N))
    parts = [torch.randn(s, generator=draw, dtype=torch.float64).to(dtype) for s in shapes]
    return Dense(*(part.double() for part in parts))


def check(case: Any, found: dict[str, Tensor], wanted: dict[str, tuple[Tensor, ...]]) -> None:
    """Each element within the roundings of its own sum."""
    assert found.keys() == wanted.keys()
    for name, (value, size, count) in wanted.items():
        got = found[name]
        assert got.shape == value.shape, (case, name, got.shape, value.shape)
        # a partial product of each rank is rounded, and so is the sum
        limit = (2 * count**0.5 + 4) * torch.finfo(got.dtype).eps * size
        worst = ((got.double() - value).abs() / limit).max()
        assert worst <= 1, (case, name, float(worst))


def part(t: Tensor, dim: int, group: ParallelGroup) -> Tensor:
    start, stop = split_range(t.shape[dim], group.size, group.rank)
    return t.narrow(dim, start, stop - start)


def turned(t: Tensor, batch_first: bool | None) -> Tensor:
    return t.transpose(0, 1) if batch_first else t


COLUMN = [
    (sp, first, gather, skip, passed, gathered)
    for sp, first, gather, skip, passed, gathered in product(
        (False, True), (None, True), (False, True), (False, True), (False, True), ("keep", "redo")
    )
    if not (gather and skip) and (sp or gathered == "keep")
]


def columns(dtype: torch.dtype, provider: str) -> int:
    """Number of cases."""
    whole = dense(dtype)
    with ParallelGroup(timeout=30, provider=provider) as group:
        for case in COLUMN:
            sp, first, gather, skip, passed, gathered = case
            torch.manual_seed(1)
            layer = ColumnParallelLinear(
                K,
                N,
                group=group,
                sequence_parallel=sp,
                batch_first=first,
                gather_output=gather,
                skip_bias_add=skip,
                gathered=gathered,
                dtype=dtype,
            )
            weight = None
            if passed:
                own = layer.weight.detach().clone()
                weight = part(whole.w, 0, group).to(dtype).requires_grad_()
                with torch.no_grad():
                    layer.bias.copy_(part(whole.b, 0, group))
            else:
                layer.load_dense(whole.w, whole.b)
            x = (part(whole.x, 0, group) if sp else whole.x).to(dtype)
            x = turned(x, first).clone().requires_grad_()
            y = layer(x, ROWS if sp else None, weight)
            if skip:
                y, bias = y
                assert bias is layer.bias
                y = y + bias
            dy = whole.dy if gather else part(whole.dy, -1, group)
            y.backward(turned(dy, first).to(dtype))
            finalize_gradients(layer)
            place = layer.placements
            wanted = whole.results()
            if not gather:
                wanted["y"] = (*(part(t, -1, group) for t in wanted["y"][:2]), wanted["y"][2])
            if sp:
                wanted["dx"] = (*(part(t, 0, group) for t in wanted["dx"][:2]), wanted["dx"][2])
            found = {
                "y": turned(y, first),
                "dx": turned(x.grad, first),
                "dw": place["weight"].gather((weight if passed else layer.weight).grad),
                "db": place["bias"].gather(layer.bias.grad),
            }
            check(case, found, wanted)
            if passed:
                assert layer.weight.grad is None and torch.equal(layer.weight, own)
    return len(COLUMN)


ROW = list(product((False, True), (None, True), (False, True), (False, True), (False, True)))


def rows(dtype: torch.dtype, provider: str) -> int:
    whole = dense(dtype)
    with ParallelGroup(timeout=30, provider=provider) as group:
        for case in ROW:
            sp, first, parallel, skip, passed = case
            torch.manual_seed(1)
            layer = RowParallelLinear(
                K,
                N,
                group=group,
                sequence_parallel=sp,
                batch_first=first,
                input_is_parallel=parallel,
                skip_bias_add=skip,
                dtype=dtype,
            )
            layer.load_dense(whole.w, whole.b)
            weight = None
            if passed:
                weight = (-layer.weight.detach()).requires_grad_()
            x = (part(whole.x, -1, group) if parallel else whole.x).to(dtype)
            x = turned(x, first).clone().requires_grad_()
            y = layer(x, ROWS if sp else None, weight)
            if skip:
                y, bias = y
                assert bias is layer.bias
            if passed:  # minus the weight is used, so that the layer's own would be seen
                y = -y if skip else 2 * layer.bias.detach() - y
            y = y + bias if skip else y
            dy = part(whole.dy, 0, group) if sp else whole.dy
            y.backward(turned(dy, first).to(dtype))
            finalize_gradients(layer)
            sign = -1 if passed and not skip else 1  # of the bias inside of the turned result
            wanted = whole.results()
            if sp:
                wanted["y"] = (*(part(t, 0, group) for t in wanted["y"][:2]), wanted["y"][2])
            if parallel:
                wanted["dx"] = (*(part(t, -1, group) for t in wanted["dx"][:2]), wanted["dx"][2])
            used = -weight.grad if passed else layer.weight.grad
            found = {
                "y": turned(y, first),
                "dx": turned(x.grad, first),
                "dw": layer.placements["weight"].gather(used),
                "db": sign * layer.bias.grad,
            }
            check(case, found, wanted)
            assert (layer.weight.grad is None) == passed
    return len(ROW)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("dtype", "provider"), [(torch.float64, "none"), (torch.bfloat16, "auto")])
def test_column(world, size, dtype, provider):
    assert world(size).run(columns, dtype, provider) == [36] * size


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("dtype", "provider"), [(torch.float64, "none"), (torch.bfloat16, "auto")])
def test_row(world, size, dtype, provider):
    assert world(size).run(rows, dtype, provider) == [32] * size


def converted() -> None:
    """out_dtype is a conversion of the rounded result, and its gradient comes back in the dtype of x."""
    with ParallelGroup(timeout=30) as group:
        for kind, options in (
            (ColumnParallelLinear, {"gather_output": True}),
            (ColumnParallelLinear, {"skip_bias_add": True}),
            (RowParallelLinear, {"input_is_parallel": False}),
        ):
            torch.manual_seed(2)
            plain = kind(K, N, group=group, dtype=torch.bfloat16, **options)
            wide = kind(K, N, group=group, dtype=torch.bfloat16, out_dtype=torch.float32, **options)
            wide.load_state_dict(plain.state_dict())
            x = torch.randn(4, K, dtype=torch.bfloat16)
            y, z = plain(x), wide(x)
            if "skip_bias_add" in options:
                assert y[1] is plain.bias and z[1] is wide.bias
                y, z = y[0], z[0]
            assert z.dtype == torch.float32 and torch.equal(y.float(), z)
            y.sum().backward()
            z.sum().backward()
            assert torch.equal(plain.weight.grad, wide.weight.grad)


def test_output_dtype(world):
    world(2).run(converted)


def test_a_layer_without_bias_has_none_to_return():
    group = ParallelGroup()
    for kind in (ColumnParallelLinear, RowParallelLinear):
        y, bias = kind(K, N, bias=False, skip_bias_add=True, group=group)(torch.ones(2, K))
        assert y.shape == (2, N) and bias is None


def refusals() -> None:
    with ParallelGroup(timeout=30) as group:

        def column(**options: Any) -> ColumnParallelLinear:
            return ColumnParallelLinear(4, 6, group=group, **options)

        def row(**options: Any) -> RowParallelLinear:
            return RowParallelLinear(6, 4, group=group, **options)

        with pytest.raises(
            UnsupportedError, match="all features with this rank's part of the bias"
        ):
            column(gather_output=True, skip_bias_add=True)
        with pytest.raises(UnsupportedError, match="or under sequence_parallel=True"):
            column(gathered="redo")
        with pytest.raises(UnsupportedError, match="gathered='often'"):
            column(gathered="often", sequence_parallel=True)
        for kind in (column, row):
            with pytest.raises(UnsupportedError, match="no floating-point dtype"):
                kind(out_dtype=torch.int32)
            with pytest.raises(UnsupportedError, match="rows= has a meaning only"):
                kind()(torch.ones(2, kind().weight.shape[1]), rows=2)
            with pytest.raises(ShapeError, match=r"weight= is \(5, 5\)"):
                kind()(torch.ones(2, kind().weight.shape[1]), weight=torch.ones(5, 5))
            sharded = kind(sequence_parallel=True, batch_first=True)
            with pytest.raises(ShapeError, match=r"batch_first=True\): x is \(2, \d\)"):
                sharded(torch.ones(2, sharded.weight.shape[1]))
        with pytest.raises(ShapeError, match="x has 4 rows, but rows=5"):
            row(sequence_parallel=True)(torch.ones(4, row().weight.shape[1]), rows=5)
        with pytest.raises(ShapeError, match="its share of rows=7"):
            column(sequence_parallel=True)(torch.ones(2, 4), rows=7)
        with pytest.raises(ShapeError, match=r"together 5"):
            row(input_is_parallel=False)(torch.ones(2, 5))
        pieces = [
            ((0, 1), (3, 4)),
            ((1, 3), (4, 6)),
        ]  # packed: their order is not that of the ranks
        overlap = [(0, 4), (3, 6)]
        with pytest.raises(ShapeError, match="overlap; the ranks would add"):
            row(ranges=overlap)
        with pytest.raises(UnsupportedError, match="one range of features per rank"):
            column(gather_output=True, ranges=overlap)
        for ranges in (pieces, [(3, 6), (0, 3)]):
            with pytest.raises(UnsupportedError, match="one range of features per rank"):
                column(gather_output=True, ranges=ranges)
            with pytest.raises(UnsupportedError, match="one range of features per rank"):
                row(input_is_parallel=False, ranges=ranges)


def test_refusals(world):
    world(2).run(refusals)


def kept(gathered: str) -> list[int]:
    """Rows of the inputs that the layer keeps for its backward."""
    with ParallelGroup(timeout=30) as group:
        layer = ColumnParallelLinear(
            K, N, group=group, sequence_parallel=True, gathered=gathered, bias=False
        )
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            layer(torch.ones(5, K))
        return [t.shape[0] for t in saved if t.shape[1:] == (K,) and t.shape[0] >= 5]


def test_what_is_kept_of_a_gathered_input(world):
    assert world(3).run(kept, "keep") == [[15]] * 3
    assert world(3).run(kept, "redo") == [[5]] * 3
