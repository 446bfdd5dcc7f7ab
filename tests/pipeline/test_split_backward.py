"""The split backward against the plain one: bits of every gradient, hooks, and what is not put off."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tp_kernels import ParallelGroup, UnsupportedError
from tp_kernels.layers import ColumnParallelLinear, use_main_grads
from tp_kernels.ops._weight_gradient import Pending, deliver
from tp_kernels.pipeline.split_backward import SplitBackward


class Twice(nn.Module):
    """One linear used twice, one output of several that is not used, one parameter that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.unused = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.once(x)
        self.unused(x)
        return self.twice(self.norm(F.gelu(self.twice(y))))


class Products(nn.Module):
    """Every way to write a product with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(6, 6)) for _ in range(3))
        self.d, self.bias = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(5))
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.matmul(x, self.a) + (x @ self.b).sin() + x.matmul(self.c)
        x = torch.addmm(self.bias, x.view(-1, 6), self.d).view(*x.shape[:-1], 5)
        return x * self.scale


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(6, 4, 3, padding=1, groups=2)
        self.two = nn.Conv2d(1, 3, (3, 2), stride=(1, 2), dilation=(1, 1))
        self.same = nn.Conv1d(4, 4, 3, padding="same")  # not put off

    def forward(self, x: Tensor) -> Tensor:
        y = self.same(self.one(x.transpose(1, 2)))  # [b, 4, s]
        return self.two(y.unsqueeze(1))


class Tied(nn.Module):
    """An embedding whose weight is the head's: its gradient has a part that is no product."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = (
            nn.Embedding(9, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 9, bias=False),
        )
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mid(self.embed((x[..., 0] * 3).abs().long() % 9) + x))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.a.weight.requires_grad_(False)
        self.b.bias.requires_grad_(False)
        self.c.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.a, self.b = Twice(), nn.Sequential(nn.Dropout(0.5), Twice())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.a, x, use_reentrant=self.reentrant)
        return checkpoint(self.b, x, use_reentrant=self.reentrant)


class Delaying(nn.Module):
    """Layers of ours beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = ColumnParallelLinear(6, 6, group=ParallelGroup(), delay_wgrad=True)
        self.other = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.ours(x).relu())


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Received(nn.Module):
    """A right operand that is no parameter: what a stage received, a leaf that requires a gradient."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.a, self.checkpointed = nn.Linear(6, 6), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        def product(x: Tensor) -> Tensor:
            return F.linear(self.a(x[0]), x[1]) @ x[2]

        return checkpoint(product, x, use_reentrant=False) if self.checkpointed else product(x)


class Keys(nn.Module):
    """The leaf itself is the right operand."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        def product(k: Tensor) -> Tensor:
            return F.linear(self.a(x), k) + x @ k

        return checkpoint(product, k, use_reentrant=False)


class InnerGradient(nn.Module):
    """torch.autograd.grad inside of a checkpoint, which runs again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            (g,) = torch.autograd.grad(self.a(x).sin().sum(), x, retain_graph=True)
            return self.b(self.a(x) + g)

        return checkpoint(inner, x, use_reentrant=False)


class ThenOtherwise(nn.Module):
    """A weight used by a linear, and then by something else, in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return self.a(x) * self.a.weight.pow(2).sum() + self.a(x.sin())

        return checkpoint(inner, x, use_reentrant=False)


class Shapes(nn.Module):
    """A bias of one element, a weight of one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bias = nn.Linear(6, 6, bias=False), nn.Parameter(torch.randn(1))
        self.row = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.a.weight, self.bias)
        y = y + torch.addmm(self.bias, y.view(-1, 6), self.a.weight).view_as(y)
        return self.a(y) + F.linear(y, self.row).unsqueeze(-1)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "twice": Twice,
    "products": Products,
    "convolutions": Convolutions,
    "tied": Tied,
    "frozen": Frozen,
    "checkpoint": lambda: Checkpointed(False),
    "reentrant": lambda: Checkpointed(True),
    "delaying": Delaying,
    "attending": Attending,
    "received": lambda: Received(False),
    "received, checkpointed": lambda: Received(True),
    "inner gradient": InnerGradient,
}


def backward(split: SplitBackward, loss: Tensor, decided: frozenset[int]) -> list[Pending]:
    return split.backward([loss], [torch.ones_like(loss)], decided)


def watch(module: nn.Module) -> list[str]:
    """What the hooks of all parameters see, as it comes."""
    seen: list[str] = []
    for name, p in module.named_parameters():
        if not p.requires_grad:
            continue
        p.register_hook(lambda g, name=name: seen.append(f"{name} {digest(g)}"))
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.append(f"{name} after {digest(p.grad)}")
        )
    return seen


def digest(x: Tensor | None) -> str:
    return "None" if x is None else x.detach().double().flatten().numpy().tobytes().hex()


def gradients(module: nn.Module) -> dict[str, str]:
    return {name: digest(p.grad) for name, p in module.named_parameters()}


def batches(dtype: torch.dtype, count: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(3, 8, 6, dtype=dtype, requires_grad=True) for _ in range(count)]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bits_and_hooks(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = MODULES[name]().to(dtype)
    late = copy.deepcopy(plain)
    split = SplitBackward(late)
    seen = watch(plain), watch(late)
    here, there = batches(dtype), batches(dtype)
    steps = []
    for index, x in enumerate(here):
        torch.manual_seed(index)
        plain(x).square().sum().backward()
        for layer in plain.modules():
            if getattr(layer, "delayed", None) is not None:
                layer.backward_dw()
        steps.append(gradients(plain))
    left = []
    for index, x in enumerate(there):
        torch.manual_seed(index)
        with split.recording() as decided:
            loss = late(x).square().sum()
        pending = backward(split, loss, decided)
        assert pending
        left.append(pending)
    assert [digest(x.grad) for x in here] == [digest(x.grad) for x in there]
    put_off = {id(t) for p in left[0] for t in (p.weight, p.bias) if t is not None}
    for p in late.parameters():
        assert p.grad is None or id(p) not in put_off
    for step, pending in zip(steps, left, strict=True):
        deliver(pending)
        now = gradients(late)
        for name_, p in late.named_parameters():
            if id(p) in put_off:  # the others have had all micro-batches since
                assert now[name_] == step[name_], name_
    assert gradients(late) == steps[-1]
    assert sorted(seen[0]) == sorted(seen[1])  # each hook as often, with the same bits


def test_what_is_put_off() -> None:
    """By name, as `explain` tells it; what is not, with the reason."""
    wanted = {
        "twice": {
            "once.weight": "later",
            "twice.weight": "later",
            "norm.weight": "layer_norm",
            "unused.bias": "later",
        },
        "products": dict.fromkeys("abcd", "later") | {"bias": "later", "scale": "mul"},
        "convolutions": {
            "one.weight": "later",
            "two.bias": "later",
            "same.weight": "conv1d",
        },
        "tied": {"embed.weight": "shared with Embedding", "mid.weight": "later"},
        "frozen": {"a.weight": "frozen", "b.weight": "later", "c.weight": "frozen"},
        "delaying": {"ours.weight": "delay_wgrad=True", "other.weight": "later"},
        "attending": {
            "layer.self_attn.in_proj_weight": "multi_head_attention_forward",
            "layer.linear1.weight": "later",
        },
    }
    for name, expected in wanted.items():
        module = MODULES[name]()
        split = SplitBackward(module)
        with split.recording():
            module(batches(torch.float32)[0])
        told = dict(line.split(": ", 1) for line in split.explain())
        for parameter, how in expected.items():
            assert how in told[parameter], (name, parameter, told)
            assert how == "later" or told[parameter] != "later"


def test_nothing_deferred_is_what_is_computed_now() -> None:
    """The input gradient alone needs no product of a weight gradient."""
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    split, x = SplitBackward(module), torch.randn(64, 64, requires_grad=True)
    with split.recording() as decided:
        y = module(x).sum()
    with torch.profiler.profile() as profile:
        pending = backward(split, y, decided)
    assert sum(e.count for e in profile.key_averages() if e.key == "aten::mm") == 4
    with torch.profiler.profile() as profile:
        deliver(pending)
    assert sum(e.count for e in profile.key_averages() if e.key == "aten::mm") == 4


def test_autocast() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6))
    late = copy.deepcopy(plain)
    here, there = batches(torch.float32)[0], batches(torch.float32)[0]
    with torch.autocast("cpu", torch.bfloat16):
        y = plain(here)
    y.float().square().sum().backward()
    split = SplitBackward(late)
    with torch.autocast("cpu", torch.bfloat16), split.recording() as decided:
        y = late(there)
    assert y.dtype == torch.bfloat16
    pending = backward(split, y.float().square().sum(), decided)
    assert pending
    deliver(pending)
    assert gradients(plain) == gradients(late)
    assert digest(here.grad) == digest(there.grad)


def test_main_grad() -> None:
    torch.manual_seed(0)
    plain = Twice().bfloat16()
    late = copy.deepcopy(plain)
    for module in (plain, late):
        use_main_grads(module)
    split = SplitBackward(late)
    for x in batches(torch.bfloat16):
        plain(x).square().sum().backward()
        with split.recording() as decided:
            y = late(x)
        pending = backward(split, y.square().sum(), decided)
        deliver(pending)
    for a, b in zip(plain.parameters(), late.parameters(), strict=True):
        assert torch.equal(a.main_grad, b.main_grad)
        assert a.grad is None and b.grad is None
    assert plain.twice.weight.main_grad.any()


def test_gradients_taken_inside_of_a_module() -> None:
    """torch.autograd.grad in a forward leaves nothing behind; a second derivative is refused."""

    class Inner(nn.Module):
        def __init__(self, twice: bool) -> None:
            super().__init__()
            self.a, self.b, self.twice = nn.Linear(6, 6), nn.Linear(6, 6), twice

        def forward(self, x: Tensor) -> Tensor:
            (g,) = torch.autograd.grad(self.a(x).sin().sum(), x, create_graph=self.twice)
            return self.b(x + g)

    torch.manual_seed(0)
    plain = Inner(False)
    late = copy.deepcopy(plain)
    split = SplitBackward(late)
    x = batches(torch.float32)[0]
    plain(x).sum().backward()
    with split.recording() as decided:
        y = late(x)
    pending = backward(split, y.sum(), decided)
    deliver(pending)
    assert gradients(plain) == gradients(late)
    with (
        pytest.raises(UnsupportedError, match="second derivative"),
        SplitBackward(twice := Inner(True)).recording(),
    ):
        twice(x)


def test_written_to_in_between() -> None:
    module = nn.Linear(6, 6)
    split, x = SplitBackward(module), torch.randn(4, 6)
    with split.recording() as decided:
        y = module(x)
    pending = backward(split, y.sum(), decided)
    x.zero_()
    with pytest.raises(UnsupportedError, match="written to in place"):
        deliver(pending)


def test_compiled_modules_are_left_alone() -> None:
    for module in (torch.compile(nn.Linear(6, 6), backend="eager"), nn.Linear(6, 6)):
        if type(module) is nn.Linear:
            module.compile(backend="eager")
        split = SplitBackward(nn.Sequential(module))
        assert split.obstacle and "compiled" in split.obstacle
        assert "nothing put off" in split.explain()[0]
        with split.recording() as decided:
            y = split.module(torch.randn(3, 6))
        pending = backward(split, y.sum(), decided)
        assert not pending and all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("kind", [ThenOtherwise, Keys, Shapes])
def test_values_of_mixed_uses(kind: type[nn.Module]) -> None:
    """The same function in the forward and when it runs again, also of micro-batches that overlap."""
    torch.manual_seed(0)
    plain = kind().double()
    late = copy.deepcopy(plain)
    split = SplitBackward(late)
    given = []
    for module in (plain, late):
        inputs = [x[0] for x in batches(torch.float64)]
        keys = [torch.eye(6, dtype=torch.float64).requires_grad_() for _ in inputs]
        losses = []
        for x, k in zip(inputs, keys, strict=True):
            args = (x, k) if kind is Keys else (x,)
            x.retain_grad()
            if module is plain:
                losses.append((plain(*args).square().sum(), None))
            else:
                with split.recording() as decided:
                    losses.append((late(*args).square().sum(), decided))
        for loss, decided in losses:
            if module is plain:
                loss.backward()
            else:
                deliver(backward(split, loss, decided))
        given.append([x.grad for x in inputs] + [k.grad for k in keys])
    for p, q in zip(plain.parameters(), late.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)
    for a, b in zip(*given, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def test_complex() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(6, 6, dtype=torch.complex128)
    late = copy.deepcopy(plain)
    split, x = SplitBackward(late), torch.randn(4, 6, dtype=torch.complex128)
    plain(x).abs().sum().backward()
    with split.recording() as decided:
        y = late(x).abs().sum()
    deliver(backward(split, y, decided))
    assert torch.equal(plain.weight.grad, late.weight.grad)
    assert torch.equal(plain.bias.grad, late.bias.grad)
