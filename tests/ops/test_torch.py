"""The ops as citizens of torch: opcheck, compile, checkpoint, functional calls, autocast, grad modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.oracle import digest
from tp_kernels import (
    ParallelGroup,
    UnsupportedError,
    all_gather_linear,
    copy_linear,
    linear_all_reduce,
    linear_reduce_scatter,
)
from tp_kernels.ops import (
    copy_to_ranks,
    gather_features,
    gather_rows,
    linear_cross_entropy,
    reduce_from_ranks,
    reduce_scatter_rows,
    scatter_features,
    scatter_rows,
    vocab_parallel_cross_entropy,
)

HIDDEN, INNER = 10, 6
CHECKS = (
    "test_schema",
    "test_faketensor",
    "test_autograd_registration",
    "test_aot_dispatch_dynamic",
)


def samples(group: ParallelGroup) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Arguments of this rank for every registered op; five rows on each rank."""
    name, counts, rows = group.name, [5] * group.size, 5 * group.size
    rest = (name, "auto")

    def t(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=True)

    yield "all_gather_linear", (t(5, 4), [t(3, 4), t(2, 4)], [t(3), t(2)], counts, False, *rest)
    if group.size > 1:
        yield "all_gather_linear", (t(5, 4), [t(3, 4)], [], counts, True, *rest)
    yield "copy_linear", (t(5, 4), [t(3, 4), t(2, 4)], [], *rest)
    yield "copy_linear", (t(2, 5, 4), [t(3, 4)], [t(3)], *rest)
    yield "linear_all_reduce", (t(5, 4), t(3, 4), t(3), *rest)
    yield "linear_all_reduce", (t(5, 4), t(3, 4), None, *rest)
    yield "linear_reduce_scatter", (t(rows, 4), t(3, 4), t(3), counts, *rest)
    few, many, w, dy = (torch.randn(n, k) for n, k in ((5, 4), (rows, 4), (3, 4), (rows, 3)))
    for x, y in ((True, True), (True, False), (False, True)):
        yield "all_gather_linear_backward", ([dy], many, [w], counts, True, x, [y], *rest)
        yield "copy_linear_backward", ([dy], many, [w], x, [y], *rest)
        yield "linear_reduce_scatter_backward", (dy[:5], many, w, counts, x, y, True, *rest)
    yield "all_gather_linear_backward", ([dy], few, [w], counts, False, True, [True], *rest)
    yield "gather_rows", (t(5, 4), counts, False, name)
    yield "gather_rows", (t(5, 4), counts, True, name)
    yield "scatter_rows", (t(rows, 4), counts, name)
    yield "gather_features", (t(5, 4), [4] * group.size, name)
    yield "scatter_features", (t(5, rows), counts, name)
    yield from loss_samples(group, t)
    for op in ("reduce_from_ranks", "copy_to_ranks"):
        yield op, (t(5, 4), name)
    yield "reduce_scatter_rows", (t(rows, 4), name)
    yield "all_reduce", (many, name)
    yield from local_samples()


def local_samples() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """As samples, for the ops that send nothing."""

    def t(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=True)

    plain, x = "reference", torch.randn(3, 4)
    key = torch.tensor(7)
    for how in ("host", plain):
        yield "dropout", (t(3, 4), None, key, 0.3, 1, 2, 9, how)
        yield "dropout", (t(3, 4, 2).transpose(0, 1), t(4, 3, 2), key, 0.3, 0, 0, 4, how)
    yield "gated", (t(3, 4), t(3, 4), "gelu", plain)
    yield "gated_backward", (x, x.cos(), x.sin(), "silu", plain)
    table = torch.randn(1, 3, 2)
    yield "apply_rotary", (t(2, 3, 4, 5), table.cos(), table.sin(), True, False, plain)
    weight = torch.randn(4)
    yield "norm", (t(3, 4), None, t(4), None, 1e-5, False, True, plain)
    yield "norm", (t(3, 4), t(3, 4), t(4), t(4), 1e-5, True, False, plain)
    saved = (weight, torch.rand(3), torch.rand(3))
    yield "norm_backward", (x, x.cos(), x.sin(), *saved, True, False, plain)
    yield "norm_backward", (x, None, x.sin(), *saved[:2], None, False, True, plain)


def loss_samples(
    group: ParallelGroup, t: Callable[..., Tensor]
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Six words on every rank."""
    name, size, labels = group.name, group.size, torch.tensor([0, 3, -100, 5, 2])
    plain = (6 * size, 6 * group.rank, -100, 0.0, 0.0, None)
    full = (6 * size, 6 * group.rank, -100, 0.1, 0.01, 20.0)
    for options in (plain, full):
        yield "vocab_parallel_cross_entropy", (t(5, 6), labels, *options, name, "auto")
        yield "linear_cross_entropy", (t(5, 4), t(6, 4), labels, t(6), 0, 2, *options, name)
        d_loss, logits, saved = torch.ones(5), torch.randn(5, 6), torch.ones(2, 5)
        backward = (d_loss, logits, labels, saved, *options, name, "auto")
        yield "vocab_parallel_cross_entropy_backward", backward
        x, w, b = torch.randn(5, 4), torch.randn(6, 4), torch.randn(6)
        for need in ((True, True, True), (True, False, False), (False, True, False)):
            backward = (d_loss, x, w, labels, b, saved, *need, 0, 2, *options, name)
            yield "linear_cross_entropy_backward", backward
    labels = torch.zeros(5 * size, dtype=torch.int64)
    yield "linear_cross_entropy", (t(5, 4), t(6, 4), labels, None, 1, 2, *plain, name)


@pytest.mark.parametrize("size", [1, 2])
def test_opcheck(world, size):
    world(size).run(check_registrations)


def check_registrations() -> None:
    with ParallelGroup(timeout=60) as group:
        checked = set()
        for name, args in samples(group):
            op = getattr(torch.ops.tp_kernels, name).default
            # tracing through autograd, the slow check, depends on the number of ranks in no way
            torch.library.opcheck(op, args, test_utils=CHECKS if group.size == 1 else CHECKS[:3])
            checked.add(name)
    assert checked == registered_ops()


def registered_ops() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {name.split("::")[1] for name in names if name.startswith("tp_kernels::")}


def parameters(seed: int, requires_grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER), (HIDDEN,), (INNER, HIDDEN))
    shapes += ((HIDDEN, INNER),)
    return [
        torch.randn(shape, generator=generator).requires_grad_(requires_grad) for shape in shapes
    ]


def network(x: Tensor, weights: list[Tensor], group: ParallelGroup) -> Tensor:
    """All four ops and both residual layouts: rows of each rank in, all rows out."""
    gate, up, down, bias, opening, closing = weights
    a, b = all_gather_linear(x, [gate, up], group=group, activation="silu")
    h = x + linear_reduce_scatter(a * b, down, bias, group=group)
    h = gather_rows(h, group=group)
    h = copy_linear(h, opening, group=group, activation="gelu_tanh")
    return linear_all_reduce(h, closing, group=group)


def outcome(function: Callable[..., Tensor], rows: int, group: ParallelGroup) -> str:
    """Digest of a network's output and all its gradients."""
    weights = parameters(group.rank)
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(9)).requires_grad_()
    y = function(x, weights, group)
    y.backward(torch.ones_like(y).cumsum(0))
    return digest(y, x.grad, *(w.grad for w in weights))


def test_compiled_is_eager_to_the_bit(world):
    for eager, compiled, graphs in world(2).run(compile_and_compare):
        assert eager == compiled
        assert graphs == 2  # static, then with a symbolic number of rows


def compile_and_compare() -> tuple[list[str], list[str], int]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    with ParallelGroup(timeout=60) as group:
        results = [
            [outcome(function, rows, group) for rows in (4, 7, 5, 90)]
            for function in (network, compiled)
        ]
    return *results, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_compiled_uneven_rows(world):
    for eager, compiled in world(2).run(compile_uneven):
        assert eager == compiled


def uneven(x: Tensor, weights: list[Tensor], group: ParallelGroup) -> Tensor:
    """Any number of rows, all of them on every rank in between."""
    h = linear_reduce_scatter(x, weights[2].t(), group=group)
    return all_gather_linear(h, weights[2], group=group, rows=x.shape[0])


def compile_uneven() -> tuple[list[str], list[str]]:
    torch._dynamo.reset()
    compiled = torch.compile(uneven, backend="aot_eager", fullgraph=True, dynamic=True)
    with ParallelGroup(timeout=60) as group:
        results = []
        for function in (uneven, compiled):
            digests = []
            for rows in (7, 5, 4, 101, 2):
                w = parameters(group.rank)[2].detach().requires_grad_()
                x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows))
                y = function(x.requires_grad_(), [None, None, w], group)
                y.sum().backward()
                digests.append(digest(y, x.grad, w.grad))
            results.append(digests)
    return results[0], results[1]


class Network(nn.Module):
    def __init__(self, group: ParallelGroup) -> None:
        super().__init__()
        self.group = group
        self.weights = nn.ParameterList(parameters(group.rank))

    def forward(self, x: Tensor) -> Tensor:
        return network(x, list(self.weights), self.group)


def test_checkpoint_and_functional_call(world):
    world(2).run(recompute_and_call)


def recompute_and_call() -> None:
    with ParallelGroup(timeout=30) as group:
        plain = outcome(network, 5, group)

        def recomputed(x: Tensor, weights: list[Tensor], group: ParallelGroup) -> Tensor:
            return checkpoint(network, x, weights, group, use_reentrant=False)

        def functional(x: Tensor, weights: list[Tensor], group: ParallelGroup) -> Tensor:
            named = {f"weights.{i}": w for i, w in enumerate(weights)}
            return torch.func.functional_call(module, named, (x,))

        module = Network(group)
        assert outcome(recomputed, 5, group) == plain
        assert outcome(functional, 5, group) == plain
        assert all(w.grad is None for w in module.parameters())


@pytest.mark.parametrize("size", [1, 2])
def test_second_derivatives_are_refused(world, size):
    world(size).run(differentiate_twice)


def differentiate_twice() -> None:
    """Communication inside a backward records nothing: a second derivative would be wrong."""
    with ParallelGroup(timeout=30) as group:
        weights = parameters(group.rank)
        x = torch.randn(2, HIDDEN, requires_grad=True)
        for y in (
            all_gather_linear(x, weights[0], group=group),
            copy_linear(x, weights[0], group=group),
            linear_all_reduce(x, weights[0], group=group),
            linear_reduce_scatter(x, weights[0], group=group),
        ):
            with pytest.raises(UnsupportedError, match="no second derivative"):
                torch.autograd.grad(y.square().sum(), x, create_graph=True)
        outcome(network, 3, group)  # the group works on


@pytest.mark.parametrize("size", [1, 2])
def test_autocast(world, size):
    world(size).run(autocast)


def autocast() -> None:
    """Products in bf16, gradients in fp32: what F.linear does."""
    with ParallelGroup(timeout=30) as group:
        for dtype in (torch.bfloat16, torch.float16):
            weights = parameters(group.rank)
            x = torch.randn(4, HIDDEN, requires_grad=True)
            with torch.autocast("cpu", dtype):
                y = copy_linear(x, weights[0], weights[3][:INNER], group=group)
                z = F.linear(x, weights[0], weights[3][:INNER])
                full = network(x, weights, group)
            assert y.dtype == z.dtype == full.dtype == dtype
            assert digest(y) == digest(z)
            full.float().sum().backward()
            assert {t.grad.dtype for t in (x, *weights)} == {torch.float32}
            double = torch.randn(4, HIDDEN, dtype=torch.float64)
            with torch.autocast("cpu", dtype):
                wide = weights[0].double()
                y, z = copy_linear(double, wide, group=group), F.linear(double, wide)
            assert y.dtype == z.dtype == torch.float64


@pytest.mark.parametrize("made_in_inference_mode", [False, True])
def test_inference_mode_then_training(world, made_in_inference_mode):
    world(2).run(infer_then_train, made_in_inference_mode)


def infer_then_train(made_in_inference_mode: bool) -> None:
    """Views of shared memory are cached: one made in inference mode has to serve training, too."""
    with torch.inference_mode(made_in_inference_mode):
        group = ParallelGroup(timeout=30, window=8192)
    with group:
        for rows in (3, 80):
            weights = parameters(group.rank)
            x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(9))
            with torch.inference_mode():
                first = digest(network(x, weights, group))
                made_here = network(x.clone(), [w.clone() for w in weights], group)
                assert digest(made_here) == first
            with torch.no_grad():
                assert digest(network(x, weights, group)) == first
            y = network(x, weights, group)
            y.sum().backward()
            assert digest(y) == first
            assert all(w.grad.isfinite().all() for w in weights)


@pytest.mark.parametrize("size", [1, 2])
def test_tangents_are_refused(world, size):
    """No op has forward-mode derivatives; without them the answer would be wrong."""
    world(size).run(push_tangents)


def push_tangents() -> None:
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    with ParallelGroup(timeout=30) as group, torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        for op in (copy_linear, linear_all_reduce, linear_reduce_scatter, all_gather_linear):
            with pytest.raises(UnsupportedError, match="forward-mode"):
                op(dual, w, group=group)
        assert linear_all_reduce(x, w, group=group).sum() == 24 * group.size


class Cut(torch.autograd.Function):
    """Passes on no gradient at all."""

    @staticmethod
    def forward(ctx, *xs):
        return xs[0].new_zeros(())

    @staticmethod
    def backward(ctx, dy):
        return None


def test_no_gradient_is_a_gradient_of_zeros(world):
    world(2).run(cut_gradients)


def cut_gradients() -> None:
    with ParallelGroup(timeout=30) as group:
        for name, call in differentiable(group):
            leaves = [torch.ones(4, 3, requires_grad=True) for _ in range(2)]
            Cut.apply(call(*leaves)).backward()
            assert all(leaf.grad is None or not leaf.grad.any() for leaf in leaves), name


def differentiable(group: ParallelGroup) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    for op in (copy_linear, linear_all_reduce, linear_reduce_scatter, all_gather_linear):
        yield op.__name__, lambda x, w, op=op: op(x, w, group=group)
    for gradient in ("slice", "reduce_scatter"):
        yield (
            f"gather_rows {gradient}",
            lambda x, w, g=gradient: gather_rows(x, group=group, gradient=g),
        )
    yield "scatter_rows", lambda x, w: scatter_rows(x, group=group)
    yield "reduce_scatter_rows", lambda x, w: reduce_scatter_rows(x, group=group)
    yield "scatter_features", lambda x, w: scatter_features(x, group=group)
    yield "gather_features", lambda x, w: gather_features(x, [3, 3], group=group)
    labels = torch.tensor([0, 2, -100, 1])
    options = {"group": group, "reduction": "none"}
    yield (
        "vocab_parallel_cross_entropy",
        lambda x, w: vocab_parallel_cross_entropy(
            x, labels, vocab_size=3 * group.size, z_loss=0.1, **options
        ),
    )
    yield (
        "linear_cross_entropy",
        lambda x, w: linear_cross_entropy(x, w, labels, vocab_size=4 * group.size, **options),
    )
    yield "copy_to_ranks", lambda x, w: copy_to_ranks(x, group=group)
    yield "reduce_from_ranks", lambda x, w: reduce_from_ranks(x, group=group)


def test_results_may_be_written_to(world):
    """As those of torch's layers, while gradients are recorded."""
    world(2).run(write_to_results)


def write_to_results() -> None:
    with ParallelGroup(timeout=30) as group:
        for name, call in differentiable(group):
            grads = []
            for in_place in (False, True):
                leaves = [torch.ones(4, 3, requires_grad=True) for _ in range(2)]
                y = call(*leaves)
                y = y.mul_(2) if in_place else y * 2
                y.sum().backward()
                grads.append(digest(leaves[0].grad))
            assert grads[0] == grads[1], name


def test_tracing_is_refused(world):
    """A tracer that does not see the op would take its result for a constant."""
    world(2).run(trace)


def trace() -> None:
    w, x = torch.eye(3), torch.ones(2, 3)
    with ParallelGroup(timeout=30) as group, torch.no_grad():
        for op in (copy_linear, linear_all_reduce, linear_reduce_scatter, all_gather_linear):
            with pytest.raises(UnsupportedError, match=r"torch\.compile"):
                torch.jit.trace(lambda x, op=op: op(x, w, group=group) + 1, (x,))


@pytest.mark.parametrize("implementation", ["host", "triton", "cuda"])
def test_gradients_with_a_pending_sign(interpreted, implementation):
    """Conjugates hand on a gradient whose sign is a bit of the tensor; its memory has the other sign."""
    interpreted(2).run(conjugate, implementation)


def conjugate(implementation: str) -> None:
    with ParallelGroup(timeout=20, implementation=implementation) as group:
        for name, op in differentiable(group):
            seen: list[bool] = []
            gradients = []
            for pending in (True, False):
                torch.manual_seed(group.rank)
                leaves = [torch.randn(4, 3, requires_grad=True) for _ in range(2)]
                y = op(*leaves)
                if pending:
                    y.register_hook(lambda gradient, seen=seen: seen.append(gradient.is_neg()))
                    z = torch.complex(torch.zeros_like(y), y).conj()
                    (z.real + z.imag).sum().backward()
                else:
                    (-y).sum().backward()
                gradients.append([leaf.grad for leaf in leaves])
            assert seen == [True], name
            for one, other in zip(*gradients, strict=True):
                assert (one is None) == (other is None), name
                assert one is None or torch.equal(one, other), name
