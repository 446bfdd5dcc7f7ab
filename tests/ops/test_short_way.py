"""The short way: when it is gone, that it is another way to the same rounds and bits, and its failures."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from threading import Timer

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracle import digest
from tp_kernels import GroupMismatchError, ParallelGroup, ShapeError, UnsupportedError, split_sizes
from tp_kernels.comm.collectives import all_gather, all_reduce, reduce_scatter
from tp_kernels.comm.short_way import GATHER_FIRST_ROWS, SHORT_ROWS, ShortWay
from tp_kernels.ops import (
    all_gather_linear,
    copy_linear,
    linear_all_reduce,
    linear_reduce_scatter,
)

OPS = {
    "linear_all_reduce": linear_all_reduce,
    "linear_reduce_scatter": linear_reduce_scatter,
    "all_gather_linear": all_gather_linear,
    "copy_linear": copy_linear,
}
SEVERAL = ("all_gather_linear", "copy_linear")
COLLECTIVES: dict[str, Callable[[Tensor, ParallelGroup], Tensor]] = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
}
DEPTH, WIDTH = 6, 10


def integers(*shape: int, start: int = 0) -> Tensor:
    """Small ones: sums and products are exact in any order and dtype."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + start) % 5 - 2).float().view(shape)


def layer() -> tuple[Tensor, Tensor]:
    return integers(WIDTH, DEPTH), integers(WIDTH, start=1)


class Other(Tensor):
    """May mean anything."""


class Watch(TorchDispatchMode):
    """Wants to see every op."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", OPS)
def test_when_it_is_gone(world, op):
    world(2).run(ask, op)


def ask(op: str) -> None:
    x, (w, b) = integers(4, DEPTH), layer()
    with ParallelGroup(timeout=30) as group:
        function = getattr(group.short, op)
        rows = (None,) if op == "all_gather_linear" else ()

        def answers(x: Tensor, w: Tensor = w, b: Tensor | None = b) -> bool:
            return function(x, w, b, *rows) is not None

        parameter = torch.nn.Parameter(w)
        assert answers(x) and answers(x, w, None) and answers(x[:1], w)
        assert answers(integers(200, DEPTH)) and answers(x.bfloat16(), w.bfloat16(), b.bfloat16())
        with torch.no_grad():
            assert answers(x, parameter)
        with torch.inference_mode():
            assert answers(x, parameter)

        assert not answers(x, w, torch.nn.Parameter(b))
        assert not answers(x, parameter) and not answers(x.requires_grad_())
        x = x.detach()
        assert not answers(x.double(), w.double(), b.double())
        assert not answers(x.bfloat16()) and not answers(x, w, b.double())
        assert not answers(x.t().contiguous().t()) and not answers(x, w.t().contiguous().t())
        assert not answers(x[:, 1:]) and not answers(x, w, b[1:]) and not answers(x, w[0])
        assert not answers(x[:0]) and not answers(x, w[:0], b[:0])
        assert not answers(x.as_subclass(Other)) and not answers(x, w.as_subclass(Other))
        assert not answers(x.to("meta")) and not answers("x")
        with torch.autocast("cpu", torch.bfloat16):
            assert not answers(x)
        with Watch():
            assert not answers(x)
        answer = torch.vmap(lambda row: row + float(answers(row)))(torch.zeros_like(x))
        assert not answer.any()
        for transform in (torch.func.grad, torch.func.functionalize):
            assert not transform(lambda x: (x * float(answers(x))).sum())(x).any()
        assert not torch.func.jvp(lambda x: x * float(answers(x)), (x,), (x,))[0].any()
        with torch.autograd.forward_ad.dual_level():
            assert not answers(torch.autograd.forward_ad.make_dual(x, x))
        if op in SEVERAL:
            assert not function(x, [w, w], [None, b], *rows)  # zeros are to be filled in


@pytest.mark.parametrize("op", OPS)
def test_ops_use_it(world, op):
    world(2).run(use_it, op)


def use_it(op: str) -> None:
    x, (w, b) = integers(4, DEPTH), layer()
    with ParallelGroup(timeout=30) as group:

        def used(**options: str) -> bool:
            before = group.short.counts()[op]
            OPS[op](x, w, b, group=group, **options)
            return group.short.counts()[op] > before

        assert used() and used(implementation="host") and used(activation="gelu")
        assert not used(implementation="chunked") and not used(implementation="reference")
    with ParallelGroup(timeout=30, implementation="chunked") as group:
        assert not used()


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("window", [64, 96, 256, 2 << 20])  # the first are too small for layers
def test_ranks_may_part_ways(world, thread, window):
    """Rank 1 goes the ordinary way only: the same rounds, or the ranks would find a mismatch."""
    world(3).run(part_ways, thread, window)


def part_ways(thread: bool, window: int) -> None:
    with ParallelGroup(timeout=30, communication_thread=thread, window=window) as group:
        size, rank = group.size, group.rank
        if rank == 1:
            group.short = ShortWay()
        w, b = layer()
        for rows in (1, 2, SHORT_ROWS, SHORT_ROWS + 1, GATHER_FIRST_ROWS + 1, 200):
            whole = integers(rows, DEPTH)
            mine = whole.split(split_sizes(rows, size))[rank]
            y = whole @ w.t()
            share = split_sizes(rows, size)
            assert torch.equal(linear_all_reduce(whole, w, b, group=group), size * y + b)
            part = linear_reduce_scatter(whole, w, b, group=group)
            assert torch.equal(part, (size * y + b).split(share)[rank])
            gathered = all_gather_linear(mine, w, b, group=group, rows=rows)
            assert torch.equal(gathered, y + b)
            assert torch.equal(all_reduce(y, group), size * y)
            assert torch.equal(reduce_scatter(y, group), (size * y).split(share)[rank])
            assert torch.equal(all_gather(y + rank, group), torch.cat([y + r for r in range(size)]))


@pytest.mark.parametrize("size", [2, 3])
def test_shapes(world, size):
    """Outputs have the shape and the bits that the ordinary way gives them."""
    world(size).run(compare_shapes)


def compare_shapes() -> None:
    with ParallelGroup(timeout=30) as group:
        short, ordinary = group.short, ShortWay()
        shapes = [(), (1,), (2,), (5,), (0, 3), (3, 1, 2), (2, 3, 1, 1, 1, 1, 1), (1,) * 8]
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            w, b = (t.to(dtype) for t in layer())
            wide = integers(WIDTH, DEPTH + 3)[:, :DEPTH].to(dtype)  # rows apart
            for leading in shapes:
                x = integers(*leading, DEPTH, start=group.rank).to(dtype)
                for op, function in OPS.items():
                    for weights, biases in [(w, b), (w, None), (wide, b)] + (
                        [([w, wide], [b, b]), ((w, wide), None), ([w, wide], [None, b])]
                        if op in SEVERAL
                        else []
                    ):
                        results = []
                        for way in (short, ordinary):
                            group.short = way
                            results.append(function(x, weights, biases, group=group))
                        assert described(results[0]) == described(results[1]), (op, leading)
                for name, function in COLLECTIVES.items():
                    results = []
                    for way in (short, ordinary):
                        group.short = way
                        results.append(function(x, group))
                    assert described(results[0]) == described(results[1]), (name, leading)


def described(result: Tensor | tuple[Tensor, ...]) -> object:
    if isinstance(result, Tensor):
        assert result.is_contiguous()
        return result.shape, result.dtype, digest(result)
    return [described(one) for one in result]


def test_failures_are_those_of_the_group(world):
    world(2).run(fail)


def fail() -> None:
    w, b = layer()
    with ParallelGroup(timeout=30) as group:
        with pytest.raises(GroupMismatchError, match="linear_all_reduce"):
            linear_all_reduce(integers(2 + group.rank, DEPTH), w, b, group=group)
        with pytest.raises(GroupMismatchError):  # as ever after
            all_reduce(w, group)
    with pytest.raises(UnsupportedError, match="closed"):
        linear_all_reduce(integers(2, DEPTH), w, b, group=group)
    with ParallelGroup(timeout=30) as group:
        with pytest.raises(TypeError, match="arguments"):
            group.short.all_reduce(w)
        with pytest.raises(TypeError):
            group.short.linear_all_reduce()


def test_it_counts_and_lets_go_of_the_group(world):
    world(2).run(count)


def count() -> None:
    w, b = layer()
    group = ParallelGroup(timeout=30)
    for _ in range(3):
        linear_all_reduce(w, w[:2], None, group=group)
    copy_linear(w, w, None, group=group)
    expected = {"linear_all_reduce": {"host": 3}, "copy_linear": {"local": 1}}
    assert group.stats()["calls"] == group.stats()["calls"] == expected
    group.reset_stats()
    assert group.stats()["calls"] == {}
    all_reduce(b, group)
    group.close()
    assert group.stats()["calls"] == {"all_reduce": {"host": 1}}
    there = weakref.ref(group)
    del group
    gc.collect()
    assert there() is None


def test_results_are_tensors_like_others(world):
    world(2).run(use)


def use() -> None:
    w, _ = layer()
    with ParallelGroup(timeout=30) as group:
        y = linear_all_reduce(integers(3, DEPTH), w, None, group=group)
        z = y.clone()
        assert y.data_ptr() % 64 == 0 and not y.requires_grad and not y.is_inference()
        assert torch.equal(y.add_(1), z + 1)
        view = y[1:]
        del y
        assert torch.equal(view, z[1:] + 1)  # the memory lives as long as any view
        leaf = view.detach().requires_grad_()
        leaf.square().sum().backward()
        assert torch.equal(leaf.grad, 2 * view)
        with torch.inference_mode():
            assert linear_all_reduce(integers(3, DEPTH), w, None, group=group).is_inference()


def test_lists_may_change_while_a_call_waits(world):
    world(2).run(clear_lists)


def clear_lists() -> None:
    x, before = integers(2, DEPTH), torch.get_num_threads()
    with ParallelGroup(timeout=30) as group:
        for threads in (1, 2):  # our product, torch's product
            torch.set_num_threads(threads)
            w, b = layer()
            ws, bs = [w.clone(), w.clone()], [b.clone(), b.clone()]
            if group.rank == 1:
                time.sleep(0.3)
            else:
                timer = Timer(0.1, lambda ws=ws, bs=bs: (ws.clear(), bs.clear()))
                timer.start()
            ys = all_gather_linear(x, ws, bs, group=group)
            expected = torch.cat([x, x]) @ w.t() + b
            assert all(torch.equal(y, expected) for y in ys) and len(ys) == 2
            if group.rank == 0:
                timer.join()
                assert not ws
        torch.set_num_threads(before)


@pytest.mark.parametrize("short", [True, False])
def test_equal_sizes_of_other_shapes_are_a_mismatch(world, short):
    world(2).run(transpose_one, short)


def transpose_one(short: bool) -> None:
    with ParallelGroup(timeout=30) as group:
        if not short:
            group.short = ShortWay()
        m, n = (32, 64) if group.rank else (64, 32)
        with pytest.raises(GroupMismatchError):
            linear_all_reduce(integers(m, DEPTH), integers(n, DEPTH), group=group)


@pytest.mark.parametrize("short", [True, False])
def test_negative_views_and_lost_memory(world, short):
    world(2).run(negate, short)


def negate(short: bool) -> None:
    x, (w, b) = integers(2, DEPTH), layer()
    minus = lambda t: torch._neg_view(-t)
    with ParallelGroup(timeout=30) as group:
        if not short:
            group.short = ShortWay()
        for op, function in OPS.items():
            expected = described(function(x, w, b, group=group))
            assert described(function(minus(x), minus(w), minus(b), group=group)) == expected, op
        for name, function in COLLECTIVES.items():
            assert described(function(minus(x), group)) == described(function(x, group)), name
            with pytest.raises(ShapeError, match="negative view"):
                function(x, group, out=minus(function(x, group)))
        y = minus(x)
        with pytest.raises(ShapeError, match="negative view"):
            all_reduce(y, group, y)
    lost = w.clone()
    lost.untyped_storage().resize_(0)
    with ParallelGroup(timeout=30) as group:
        if not short:
            group.short = ShortWay()
        with pytest.raises((ValueError, RuntimeError)):
            copy_linear(x, lost, group=group)
