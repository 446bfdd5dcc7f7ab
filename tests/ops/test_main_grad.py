"""Weight gradients added to `main_grad`: against float64; what autograd, hooks and compilers see of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.oracle import digest
from tp_kernels import (
    ParallelGroup,
    ShapeError,
    UnsupportedError,
    all_gather_linear,
    copy_linear,
    linear_all_reduce,
    linear_reduce_scatter,
)
from tp_kernels.ops import _gemm
from tp_kernels.ops._gemm import add_weight_gradient

HALVES = (torch.bfloat16, torch.float16)
Call = Callable[..., Tensor | tuple[Tensor, ...]]


def calls(
    group: ParallelGroup, rows: int, k: int
) -> Iterator[tuple[str, Call, tuple[int, ...], bool]]:
    """(name, call, shape of x, whether x is gathered) of every way a weight gradient is made."""
    for gathered in ("keep", "redo"):
        yield (
            f"all_gather_linear {gathered}",
            lambda x, w, b, g=gathered: all_gather_linear(x, w, b, group=group, gathered=g),
            (rows, k),
            True,
        )
    yield "copy_linear", lambda x, w, b: copy_linear(x, w, b, group=group), (rows, k), False
    for op in (linear_all_reduce, linear_reduce_scatter):
        yield (
            op.__name__,
            lambda x, w, b, op=op: op(x, w[0], b[0] if b else None, group=group),
            (rows, k),
            False,
        )


def outputs(y: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [y] if isinstance(y, Tensor) else list(y)


def accumulate(dtype: torch.dtype, main_dtype: torch.dtype, implementation: str) -> None:
    """Two micro-batches on top of what was there, the first weight of two with a main_grad."""
    rows, k = 6, 20
    provider = "none" if dtype == torch.float64 else "auto"
    options = {"provider": provider, "implementation": implementation, "timeout": 30}
    with ParallelGroup(**options) as group:
        for name, call, shape, gathered in calls(group, rows, k):
            draw = torch.Generator().manual_seed(group.rank)
            ws = [nn.Parameter(torch.randn(n, k, generator=draw).to(dtype)) for n in (9, 4)]
            w = ws[0]
            w.main_grad = main = torch.randn(9, k, generator=draw).to(main_dtype)
            total, size = main.double().clone(), main.double().abs()
            plain = [p.detach().clone().requires_grad_() for p in ws]
            for _ in range(2):
                x = torch.randn(shape, generator=draw).to(dtype).requires_grad_()
                ys = outputs(call(x, ws, None))
                dys = [torch.randn(y.shape, generator=draw).to(dtype) for y in ys]
                torch.autograd.backward(ys, dys)
                other = x.detach().clone().requires_grad_()
                torch.autograd.backward(outputs(call(other, plain, None)), dys)
                assert digest(x.grad) == digest(other.grad), name
                exact, magnitude = product(group, x.detach(), dys[0], gathered)
                total, size = total + exact, size + magnitude
            assert w.main_grad is main and w.grad is None, name
            assert len(ys) == 1 or digest(ws[1].grad) == digest(plain[1].grad)
            summands = 2 * rows * group.size + 1
            eps = torch.finfo(torch.float32 if dtype in HALVES else dtype).eps
            limit = 2 * summands**0.5 * eps * size
            if main_dtype in HALVES:  # rounded once per micro-batch
                limit = limit + 2 * torch.finfo(main_dtype).eps * size
            worst = ((main.double() - total).abs() / limit).max()
            assert worst <= 1, (name, float(worst))


def product(group: ParallelGroup, x: Tensor, dy: Tensor, gathered: bool) -> tuple[Tensor, Tensor]:
    """dy^T x in float64 with all rows of both, and the sum of the magnitudes."""
    from tp_kernels.comm.collectives import all_gather

    x, dy = x.double(), dy.double()
    if gathered:
        x = all_gather(x, group)
    elif dy.shape[0] != x.shape[0]:
        dy = all_gather(dy, group, x.shape[0])
    return dy.t() @ x, dy.abs().t() @ x.abs()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "main_dtype"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_main_grad(world, size, dtype, main_dtype):
    world(size).run(accumulate, dtype, main_dtype, "auto")


@pytest.mark.parametrize("implementation", ["reference", "chunked", "triton"])
def test_main_grad_of_implementations(interpreted, implementation):
    interpreted(2).run(accumulate, torch.bfloat16, torch.float32, implementation)


def hooks() -> None:
    """Hooks of a weight see nothing, or, where a data-parallel wrapper waits for them, zeros."""
    with ParallelGroup(timeout=30) as group:
        for name, call, shape, _ in calls(group, 4, 6):
            for announced in (False, True):
                w, seen = nn.Parameter(torch.ones(5, 6)), []
                w.register_hook(lambda gradient, seen=seen: seen.append(gradient.clone()))
                w.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append("after"))
                w.main_grad = torch.zeros(5, 6)
                if announced:
                    w.grad_added_to_main_grad = False
                x = torch.ones(shape)  # the first layer of a model: its input needs no gradient
                outputs(call(x, [w], None))[0].sum().backward()
                assert w.main_grad.abs().min() > 0, name
                if announced:
                    zeros, after = seen
                    assert w.grad_added_to_main_grad and after == "after"
                    assert not zeros.any() and not w.grad.any()
                else:
                    assert seen == [] and w.grad is None
                assert hasattr(w, "grad_added_to_main_grad") == announced


def test_hooks(world):
    world(2).run(hooks)


def ordinary_ways() -> None:
    """Frozen weights, no_grad, autocast, checkpoints: the sum is that of autograd."""
    with ParallelGroup(timeout=30) as group:
        for name, call, shape, _ in calls(group, 4, 6):

            def loss(x: Tensor, w: Tensor, call: Call = call) -> Tensor:
                return outputs(call(x, [w], [torch.ones(5)]))[0].float().square().sum()

            def recomputed(x: Tensor, w: Tensor, reentrant: bool) -> Tensor:
                # not as an argument: reentrant checkpoints pass detached copies, without attributes
                return checkpoint(lambda x: loss(x, w), x, use_reentrant=reentrant)

            def autocast(x: Tensor, w: Tensor) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16):
                    return loss(x, w)

            for way in (
                loss,
                lambda x, w: recomputed(x, w, False),
                lambda x, w: recomputed(x, w, True),
                autocast,
            ):
                torch.manual_seed(3 + group.rank)
                x = torch.randn(shape, requires_grad=True)
                w, plain = (nn.Parameter(torch.full((5, 6), 0.3)) for _ in range(2))
                w.main_grad = torch.zeros(5, 6)
                way(x, w).backward()
                way(x, plain).backward()
                # autocast rounds the gradient of a plain weight to bf16
                eps = 2**-8 if way is autocast else 1e-6
                assert w.grad is None and plain.grad.abs().max() > 0.1, name
                torch.testing.assert_close(
                    w.main_grad, plain.grad, rtol=eps, atol=eps * float(plain.grad.abs().max())
                )
            w.main_grad.zero_()
            with torch.no_grad():
                assert not loss(x, w).requires_grad
            w.requires_grad_(False)
            loss(x, w).backward()
            assert not loss(x.detach(), w).requires_grad
            assert not w.main_grad.any()


def test_ordinary_ways(world):
    world(2).run(ordinary_ways)


def compiled() -> None:
    """Compilers leave such calls out of their graphs; transforms and modes, which cannot, are refused."""
    with ParallelGroup(timeout=60) as group:
        for name, call, shape, _ in list(calls(group, 4, 6))[1::3]:  # compiling is slow
            torch._dynamo.reset()

            def loss(x: Tensor, w: Tensor, call: Call = call) -> Tensor:
                return outputs(call(x * 2, [w], None))[0].square().sum()

            results = []
            for function in (loss, torch.compile(loss, backend="aot_eager")):
                torch.manual_seed(group.rank)
                w = nn.Parameter(torch.randn(5, 6))
                w.main_grad = torch.zeros(5, 6)
                x = torch.randn(shape, requires_grad=True)
                function(x, w).backward()
                assert w.grad is None, name
                results.append(digest(w.main_grad, x.grad))
            assert results[0] == results[1], name
            torch._dynamo.reset()
            with pytest.raises(torch._dynamo.exc.Unsupported):
                torch.compile(loss, backend="aot_eager", fullgraph=True)(x, w)
            with (
                pytest.raises(UnsupportedError, match=r"plain backward\(\)"),
                Largest(),
            ):
                loss(x, w)


def test_compiled(world):
    world(2).run(compiled)


def test_buffers_that_do_not_fit_are_refused(world):
    world(2).run(refuse)


def refuse() -> None:
    with ParallelGroup(timeout=30) as group:
        for _, call, shape, _ in calls(group, 4, 6):
            w, x = nn.Parameter(torch.ones(5, 6)), torch.ones(shape)
            for wrong, error, words in (
                (torch.zeros(6, 5), ShapeError, r"main_grad is \(6, 5\)"),
                (torch.zeros(5, 6, dtype=torch.bfloat16), UnsupportedError, "bfloat16"),
                (torch.zeros(5, 6, device="meta"), UnsupportedError, "on meta"),
            ):
                w.main_grad = wrong
                with pytest.raises(error, match=words):
                    call(x, [w], None)
            w.main_grad = None  # as none at all
            outputs(call(x, [w], None))[0].sum().backward()
            assert w.grad is not None


def test_wide_products_take_little_memory(monkeypatch):
    """Rows of 16-bit numbers are widened block by block, into the buffer whatever its strides."""
    monkeypatch.setattr(_gemm, "WIDENED_ROWS", 16)
    torch.manual_seed(0)
    dy, x = torch.randn(50, 7).bfloat16(), torch.randn(50, 9).bfloat16()
    exact = dy.double().t() @ x.double()
    for main in (torch.ones(7, 9), torch.ones(9, 7).t(), torch.ones(7, 18)[:, ::2]):
        with Largest() as largest:
            add_weight_gradient(main, dy, x)
        assert largest.elements <= 16 * 9
        torch.testing.assert_close(main.double(), exact + 1, rtol=0, atol=1e-4)
    rounded = torch.ones(7, 9, dtype=torch.bfloat16)
    add_weight_gradient(rounded, dy, x)
    assert torch.equal(rounded, (exact + 1).bfloat16())


class Largest(TorchDispatchMode):
    """Elements of the largest fp32 tensor that was made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.elements = max(self.elements, result.numel())
        return result
