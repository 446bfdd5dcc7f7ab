"""implementation="cuda" between ranks that address each other's memory, without a GPU.

Kernels of tp_kernels.native are replaced by those of tp_kernels.kernels, which have their signatures and run
in the interpreter; that operands are as the real ones need them is checked on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.kernels.test_ops import cases
from tests.oracle import HALVES, OPERATIONS, check, compute
from tp_kernels import (
    GroupMismatchError,
    ParallelGroup,
    all_gather_linear,
    dispatch,
    linear_all_reduce_rms_norm,
)
from tp_kernels.native import _products
from tp_kernels.ops import _peers, _workspace


@contextmanager
def standing_in() -> Iterator[list[str]]:
    """Yields the names of the kernels that were called."""
    from tp_kernels import kernels

    called: list[str] = []

    def all_reduce(x: Tensor, workspace: Any, *, out: Tensor, bias: Tensor | None) -> Tensor:
        called.append("all_reduce")
        width = x.shape[1]
        if bias is None:
            return kernels.all_reduce(x, workspace, out=out)
        ones = torch.ones(width, dtype=x.dtype)
        return kernels.all_reduce_rms_norm(x, ones, workspace, bias=bias)[1]

    def all_reduce_rms_norm(
        x: Tensor, weight: Tensor, workspace: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        called.append("all_reduce_rms_norm")
        return kernels.all_reduce_rms_norm(x, weight, workspace, **options)

    def linear_reduce_scatter(
        xs: list[Tensor], ws: list[Tensor], workspace: Any, **options: Any
    ) -> Tensor:
        called.append("linear_reduce_scatter")
        loaded("send", xs, ws)
        return kernels.linear_reduce_scatter(xs, ws, workspace, **options)

    def awaited_linear(
        x: Tensor, ws: list[Tensor], workspace: Any, **options: Any
    ) -> tuple[list[Tensor], Tensor]:
        called.append("awaited_linear")
        ys, gathered = kernels.all_gather_linear(x, ws, workspace, **options)
        loaded("await_rows", [gathered] * len(ws), ws)
        return ys, gathered

    def awaited_weight_gradient(
        x: Tensor, other: Tensor, workspace: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        called.append("awaited_weight_gradient")
        dw, gathered = kernels.all_gather_weight_gradient(x, other, workspace, **options)
        loaded("await_sum", [other.t()], [gathered.t()])
        return dw, gathered

    products = SimpleNamespace(
        linear_reduce_scatter=linear_reduce_scatter,
        awaited_linear=awaited_linear,
        awaited_weight_gradient=awaited_weight_gradient,
    )
    collectives = SimpleNamespace(all_reduce=all_reduce, all_reduce_rms_norm=all_reduce_rms_norm)
    with (
        mock.patch.object(dispatch, "_native_obstacle", return_value=None),
        mock.patch.object(_peers, "native", collectives),
        mock.patch.object(_peers, "gemm", products),
    ):
        yield called


def loaded(policy: _products.Policy, xs: Sequence[Tensor], ws: Sequence[Tensor]) -> None:
    why = _products.obstacle(policy, xs, ws)
    assert why is None, why


@pytest.mark.parametrize("size", [2, 3])
def test_values_and_gradients(interpreted, size):
    """Widths that rows of 16 bits cannot be loaded with, also none on some rank, and layouts of all kinds."""
    given = [
        replace(case, implementation="cuda", dtype=HALVES[index % 2], **wide(case.op))
        for op in OPERATIONS
        for index, case in enumerate(cases(op, size))
    ]
    by_rank = interpreted(size).run(against_float64, given)
    for case, *results in zip(given, *by_rank, strict=True):
        assert all(one == results[0] for one in results), f"{case}: ranks have different bits"


def wide(op: str) -> dict[str, Any]:
    """Rows that are gathered have to begin on 16 bytes."""
    if op == "all_gather_linear":
        return {"inner": 16}
    return {"outs": (24,)} if op == "linear_reduce_scatter" else {}


def against_float64(given: list[Any]) -> list[dict[str, str]]:
    results, kernels = [], set()
    with ParallelGroup(timeout=30) as group, standing_in() as called:
        for case in given:
            called.clear()
            results.append(check(case, compute(case, group), group))
            rows = torch.Size(case.leading).numel()
            if rows and case.op != "copy_linear":
                assert called, case
            kernels |= set(called)
    assert kernels == {
        "all_reduce",
        "linear_reduce_scatter",
        "awaited_linear",
        "awaited_weight_gradient",
    }
    return results


def test_sum_and_norm(interpreted):
    interpreted(2).run(sum_and_norm)


def sum_and_norm() -> None:
    """One kernel behind the product; where a gradient is wanted, several, with the same sums."""
    with ParallelGroup(timeout=30, implementation="cuda") as group, standing_in() as called:
        torch.manual_seed(group.rank)
        x = torch.randn(3, 2, 5, dtype=torch.bfloat16)
        w = torch.randn(24, 5, dtype=torch.bfloat16)
        torch.manual_seed(7)
        residual, norm, bias = torch.randn(8, 24).bfloat16().split((6, 1, 1))
        operands = {"bias": bias[0], "residual": residual.view(3, 2, 24)}
        y, s = linear_all_reduce_rms_norm(x, w, norm[0], group=group, **operands)
        assert called == ["all_reduce_rms_norm"] and y.shape == s.shape == (3, 2, 24)
        assert group.stats()["calls"]["linear_all_reduce_rms_norm"] == {"cuda": 1}
        called.clear()
        again, total = linear_all_reduce_rms_norm(
            x, w.requires_grad_(), norm[0], group=group, **operands
        )
        assert called == ["all_reduce"] and torch.equal(total, s)
        torch.testing.assert_close(again, y, rtol=2**-7, atol=0)


def test_ranks_that_want_other_kernels_are_told(interpreted):
    """One of them records a gradient, so that its sum has other rounds."""
    for error in interpreted(2).run(mix_kernels):
        assert "ranks 0 and 1" in error or "ranks 1 and 0" in error, error


def mix_kernels() -> str:
    with ParallelGroup(timeout=30, implementation="cuda") as group, standing_in():
        x, w, norm = torch.ones(2, 8), torch.ones(16, 8), torch.ones(16)
        w.requires_grad_(group.rank == 0)
        with pytest.raises(GroupMismatchError) as caught:
            linear_all_reduce_rms_norm(x, w, norm, group=group)
        return str(caught.value)


def test_results_can_be_written_to(interpreted):
    """No views, which autograd would forbid to write to."""
    interpreted(2).run(write_to_results)


def write_to_results() -> None:
    with ParallelGroup(timeout=30, implementation="cuda") as group, standing_in() as called:
        x = torch.randn(4, 16, dtype=torch.bfloat16, requires_grad=True)
        ws = [torch.randn(n, 16, dtype=torch.bfloat16, requires_grad=True) for n in (8, 5)]
        q, k = all_gather_linear(x, ws, group=group)
        (q.mul_(2.0).sum() + k.sum()).backward()
        assert called[0] == "awaited_linear" and x.grad is not None


def test_operands_are_copied_only_where_they_have_to_be():
    def same(x: Tensor) -> bool:
        return _peers._loadable(x).data_ptr() == x.data_ptr()

    base = torch.randn(64, 72, dtype=torch.bfloat16)
    for x in (base, base[:, :64], base[8:, 16:40], base[:, :5], base[:1, 8:]):
        assert same(x), (x.shape, x.stride())
    for x in (
        base.t(),
        base[:, 1:9],  # address
        base[:, ::2],  # no contiguous dimension
        base[:1].expand(64, 72),  # rows that overlap
        base.view(-1)[: 64 * 71].view(64, 71),  # distance of rows
        base[:, :0],
    ):
        assert not same(x), (x.shape, x.stride())
        made = _peers._loadable(x)
        assert _products.matrix_obstacle("x", made) is None
        assert torch.equal(made[:, : x.shape[1]], x) and not made[:, x.shape[1] :].any()
    for ws in ([base], [base.t(), base.t()], [base, base]):
        made = _peers._loadable_weights(ws)
        assert [w.data_ptr() for w in made] == [w.data_ptr() for w in ws]
    mixed = _peers._loadable_weights([base.t(), base[:, :64].clone()])
    assert all(w.stride(1) == 1 for w in mixed)


def test_a_workspace_has_room_for_the_tiles_of_both_kinds_of_kernels():
    tiles = {tile for tiles in _products.KERNELS.values() for tile in tiles}
    assert max(tiles, key=lambda tile: tile.block_m * tile.block_n) == _workspace.LARGE
