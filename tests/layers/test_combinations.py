"""Layers inside what people wrap around them, against plain torch inside the same.

A wrapping that loses something on the way (a gradient that is not reduced, a weight that is not the one that
was given) shows as a difference from plain torch.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.layers.twins import Dense, Sharded, batch, compare, gradients, load, run, twins
from tp_kernels import ParallelGroup, UnsupportedError

MODES = pytest.mark.parametrize("sp", [False, True])

Wrap = Callable[[nn.Module], tuple[Callable[[Tensor], Tensor], nn.Module]]
"""From a block: what to call, and the module whose parameters then have the gradients."""


def in_both(wrap: Wrap, sp: bool, bound: float = 1e-13) -> None:
    """Body of a rank: the same wrapping around both blocks."""
    torch._dynamo.reset()
    with ParallelGroup(provider="none", timeout=60) as group:
        results = []
        for module in reversed(twins(group, sp, torch.float64)):
            forward, holder = wrap(module)
            found = run(forward, torch.float64)
            results.append(found | gradients(holder))
        compare(*results, bound)


def plain(module: nn.Module) -> Any:
    return module, module


def aot_eager(module: nn.Module) -> Any:
    return torch.compile(module, backend="aot_eager", fullgraph=True), module


def inductor(module: nn.Module) -> Any:
    return torch.compile(module, fullgraph=True), module


def checkpointed(module: nn.Module) -> Any:
    return lambda x: checkpoint(module, x, use_reentrant=False), module


def checkpointed_reentrant(module: nn.Module) -> Any:
    return lambda x: checkpoint(module, x, use_reentrant=True), module


def copied(module: nn.Module) -> Any:
    """A copy, whose original has other weights by the time it is used, and still works."""
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()

    def forward(x: Tensor) -> Tensor:
        assert torch.equal(module(x), x), "a block of zeros passes its input on"
        return twin(x)

    return forward, twin


def functional(module: nn.Module) -> Any:
    """Other weights than the module's own, passed at the call."""
    given = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(math.nan)

    def forward(x: Tensor) -> Tensor:
        y = torch.func.functional_call(module, given, (x,))
        for name, parameter in module.named_parameters():  # `gradients` looks there
            given[name].register_post_accumulate_grad_hook(
                lambda w, p=parameter: setattr(p, "grad", w.grad)
            )
        return y

    return forward, module


@MODES
@pytest.mark.parametrize(
    "wrap",
    [plain, aot_eager, checkpointed, checkpointed_reentrant, copied, functional],
    ids=lambda f: f.__name__,
)
def test_wrapped(world, wrap, sp):
    world(2).run(in_both, wrap, sp)


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler for inductor")
@MODES
def test_inductor(world, sp):
    # Its cos and sin of the fp32 rotary table are of another library, an ulp away.
    world(2).run(in_both, inductor, sp, 2**-20)


def transformed() -> None:
    """Of torch.func, functional_call works (above); what would differentiate a backward does not."""
    with ParallelGroup(provider="none", timeout=60) as group:
        _, block = twins(group, True, torch.float64)
        x, dy = batch(torch.float64)
        given = {name: p.detach() for name, p in block.named_parameters()}

        def call(x: Tensor) -> Tensor:
            return torch.func.functional_call(block, given, (x,))

        def loss(x: Tensor) -> Tensor:
            return (call(x) * dy).sum()

        for transform in (
            lambda: torch.func.grad(loss)(x),
            lambda: torch.func.vjp(call, x),
            lambda: torch.func.jvp(call, (x,), (x,)),
            lambda: torch.func.vmap(call)(x[None]),
        ):
            with pytest.raises(UnsupportedError, match="functional_call, then backward"):
                transform()
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf), leaf)  # the way out
        assert first.abs().min() > 0


def test_transforms_are_refused(world):
    world(2).run(transformed)


def autocast(sp: bool, dtype: torch.dtype) -> None:
    """Products in `dtype`, the rest in fp32: as far from float64 as plain torch is under autocast."""
    with ParallelGroup(provider="none", timeout=60) as group:
        exact, _ = twins(group, sp, torch.float64)
        found = []
        for module in (*twins(group, sp, torch.float32), exact):
            load_same(module, exact)
            with torch.autocast("cpu", dtype, enabled=module is not exact):
                results = run(module, torch.float64 if module is exact else torch.float32)
            found.append(results | gradients(module))
        dense, ours, truth = found
        assert ours.keys() == dense.keys() == truth.keys()
        for name, wanted in truth.items():
            assert ours[name].dtype == dense[name].dtype, name
            theirs, mine = (float((r[name] - wanted).norm() / wanted.norm()) for r in (dense, ours))
            assert theirs > torch.finfo(dtype).eps / 100, f"{name}: nothing was rounded"
            assert theirs / 2 < mine < 2 * theirs, (name, theirs, mine)


def load_same(module: nn.Module, exact: Dense) -> None:
    if isinstance(module, Sharded):
        load(module, exact)
    else:
        module.load_state_dict(exact.state_dict())


@MODES
def test_autocast(world, sp):
    world(2).run(autocast, sp, torch.bfloat16)


def serialised(sp: bool) -> None:
    """Pickled modules and saved states give the numbers of the original, and nothing is shared with it."""
    with ParallelGroup(provider="none", timeout=60) as group:
        _, block = twins(group, sp, torch.float64)
        file, state = io.BytesIO(), io.BytesIO()
        torch.save(block, file)
        torch.save(block.state_dict(), state)
        copies = [pickle.loads(pickle.dumps(block))]
        copies.append(torch.load(io.BytesIO(file.getvalue()), weights_only=False))
        torch.manual_seed(1)
        copies.append(Sharded(group, sp, torch.float64))
        copies[-1].load_state_dict(torch.load(io.BytesIO(state.getvalue())))
        before = run(block, torch.float64) | gradients(block)
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.fill_(math.nan)
        for twin in copies:
            found = run(twin, torch.float64) | gradients(twin)
            assert found.keys() == before.keys()
            assert all(torch.equal(found[name], before[name]) for name in before)


@MODES
def test_serialised(world, sp):
    world(2).run(serialised, sp)


def on_meta(sp: bool) -> None:
    """Made without memory, then materialised and loaded."""
    with ParallelGroup(provider="none", timeout=60) as group:
        dense, _ = twins(group, sp, torch.float64)
        with torch.device("meta"):
            block = Sharded(group, sp, torch.float64)
        assert all(p.is_meta for p in block.parameters())
        block.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.fill_(math.nan)
        load(block, dense)
        results = [run(m, torch.float64) | gradients(m) for m in (block, dense)]
        compare(*results)


@MODES
def test_meta(world, sp):
    world(2).run(on_meta, sp)
