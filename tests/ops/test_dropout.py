"""dropout: Philox by its known answers, masks that are parts of one mask, gradients, every implementation."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from tests.oracle import digest
from tp_kernels import ShapeError, UnsupportedError, split_range
from tp_kernels.comm import short_way
from tp_kernels.ops import dropout
from tp_kernels.ops._local import IMPLEMENTATIONS, explain_local
from tp_kernels.ops.dropout import words

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KEY = 0x1234_5678_9ABC_DEF0
ONES = 0xFFFFFFFF


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 by the definition in the paper, in numbers of any size."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            second >> 32 ^ c1 ^ k0,
            second & ONES,
            first >> 32 ^ c3 ^ k1,
            first & ONES,
        )
        k0, k1 = k0 + 0x9E3779B9 & ONES, k1 + 0xBB67AE85 & ONES
    return c0, c1, c2, c3


def key_of(number: int = KEY) -> Tensor:
    return torch.tensor(number)


def mask_of(shape: tuple[int, ...], p: float, key: int = KEY) -> Tensor:
    """Which elements of an unsplit tensor are kept, one by one."""
    count = math.prod(shape)
    kept = [
        philox((i >> 2 & ONES, i >> 34, 0, 0), (key & ONES, key >> 32))[i & 3] >= p * 2**32
        for i in range(count)
    ]
    return torch.tensor(kept, dtype=torch.bool).view(shape)


def test_known_answers():
    """Of the file that goes with the paper (Random123, kat_vectors)."""
    zeros = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((0, 0, 0, 0), (0, 0)) == zeros
    ones = (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox((ONES,) * 4, (ONES,) * 2) == ones
    pi = (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(counter, (0xA4093822, 0x299F31D0)) == pi
    assert tuple(words(key_of(0), torch.arange(4)).tolist()) == zeros


def test_words_of_large_indexes_and_keys():
    draw = random.Random(1)
    for _ in range(200):
        index, key = draw.getrandbits(62), draw.getrandbits(63)
        group = index >> 2
        expected = philox((group & ONES, group >> 32, 0, 0), (key & ONES, key >> 32))[index & 3]
        assert int(words(key_of(key), torch.tensor([index]))) == expected


@pytest.mark.parametrize("implementation", ["host", "reference"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_values(dtype, implementation):
    implementation = "reference" if dtype == torch.float64 else implementation
    torch.manual_seed(0)
    x, residual = torch.randn(2, 3, 5, 13).to(dtype)
    p = 0.3
    wide = torch.promote_types(dtype, torch.float32)
    scaled = x.to(wide) * (1 / (1 - p))
    mask = mask_of(tuple(x.shape), p)
    more = {"key": key_of(), "implementation": implementation}
    plain = torch.where(mask, scaled, 0)
    assert torch.equal(dropout(x, p, **more), plain.to(dtype))
    added = (plain + residual.to(wide)).to(dtype)
    assert torch.equal(dropout(x, p, residual=residual, **more), added)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_any_strides_are_one_mask(order, dtype):
    """By every implementation on the CPU, for parts along every dimension."""
    torch.manual_seed(0)
    drawn, more = torch.randn(2, 2, 3, 36).to(dtype)
    x, residual = drawn.permute(order), more.permute(order)
    spread = torch.stack((x, x + 1), -1)[..., 0]
    for dim in range(3):
        where = {"key": key_of(), "dim": dim, "start": 4, "size": 43}
        y = dropout(x, 0.4, **where)
        part = mask_of((*x.shape[:dim], 43, *x.shape[dim + 1 :]), 0.4)
        assert torch.equal(y != 0, part.narrow(dim, 4, x.shape[dim]))
        assert y.stride() == torch.empty_like(x).stride()
        for name in ("reference", "host"):
            assert torch.equal(y, dropout(x, 0.4, **where, implementation=name))
            assert torch.equal(y, dropout(spread, 0.4, **where, implementation=name))
            sums = dropout(x, 0.4, residual=residual, **where, implementation=name)
            expected = torch.where(y != 0, x.float() * (1 / 0.6), 0) + residual.float()
            assert torch.equal(sums, expected.to(dtype))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(("shape", "dim"), [((5, 3, 7), 0), ((3, 5, 7), 1), ((2, 7, 3, 4), 1)])
def test_parts_are_those_of_the_unsplit_mask(shape, dim, world):
    """Tokens first, tokens second, heads of attention; also ranks with nothing."""
    x = torch.ones(shape)
    whole = dropout(x, 0.5, key=key_of())
    assert torch.equal(whole != 0, mask_of(shape, 0.5))
    parts = []
    for rank in range(world):
        start, stop = split_range(shape[dim], world, rank)
        mine = x.narrow(dim, start, stop - start)
        place = {"dim": dim, "start": start, "size": shape[dim]}
        parts.append(dropout(mine, 0.5, key=key_of(), **place))
    assert torch.equal(torch.cat(parts, dim), whole)


def test_share_and_independence():
    """Of a million elements, within six standard deviations; of neighbours and of two keys as well."""
    x, p = torch.ones(1000, 1000), 0.1
    first, second = (dropout(x, p, key=key_of(k)) == 0 for k in (5, 6))
    for dropped, share in (
        (first, p),
        (first & second, p * p),
        (first[:, 1:] & first[:, :-1], p * p),
        (first[1:] & first[:-1], p * p),
    ):
        deviation = math.sqrt(share * (1 - share) / dropped.numel())
        assert abs(dropped.double().mean() - share) < 6 * deviation


def test_all_and_nothing():
    x = torch.tensor([1.0, math.inf, math.nan, 0.0])
    residual = torch.arange(4.0)
    for name in ("host", "reference"):
        more = {"key": key_of(), "implementation": name}
        assert torch.equal(dropout(x, 1.0, **more), torch.zeros(4))
        assert torch.equal(dropout(x, 1 - 2**-40, **more), torch.zeros(4))
        assert torch.equal(dropout(x, 1.0, residual=residual, **more), residual)
        y = dropout(x, 0.0, **more)
        assert digest(y[[0, 1, 3]]) == digest(x[[0, 1, 3]]) and y[2].isnan()
        assert dropout(x[:0], 0.5, **more).shape == (0,)
        # dropped: nothing of what was there
        assert not dropout(torch.full((400,), math.nan), 0.5, **more).isnan().all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_gradients(dtype):
    """dx is dropped as x was, the residual's is dy; and nothing is kept but the key."""
    torch.manual_seed(0)
    x, residual, dy = torch.randn(3, 4, 5, 6).to(dtype)
    x.requires_grad_(), residual.requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = dropout(x, 0.25, key=key_of(), dim=1, start=3, size=11, residual=residual)
    y.backward(dy)
    mask = mask_of((4, 11, 6), 0.25)[:, 3:8]
    wide = torch.promote_types(dtype, torch.float32)
    expected = torch.where(mask, dy.to(wide) * (1 / 0.75), 0).to(dtype)
    assert torch.equal(x.grad, expected) and torch.equal(residual.grad, dy)
    assert [t.numel() for t in kept] == [1]


def test_expanded_gradient_and_wider_residual():
    x = torch.randn(4, 5, dtype=torch.bfloat16, requires_grad=True)
    residual = torch.randn(4, 5, requires_grad=True)
    y = dropout(x, 0.5, key=key_of(), residual=residual)
    y.sum().backward()
    mask = mask_of((4, 5), 0.5)
    assert y.dtype == torch.float32 and x.grad.dtype == torch.bfloat16
    assert torch.equal(x.grad, mask * torch.tensor(2.0, dtype=torch.bfloat16))
    exact = torch.where(mask, 2 * x.detach().float(), 0) + residual.detach()
    assert torch.equal(y.detach(), exact)


def test_compiled_is_eager_to_the_bit():
    def step(x: Tensor, residual: Tensor, key: Tensor, start: int) -> Tensor:
        return dropout(
            x.sin(), 0.3, key=key, dim=1, start=start, size=40, residual=residual
        ).square()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for rows, start in ((3, 0), (3, 7), (5, 2)):
        results = []
        for function in (step, compiled):
            torch.manual_seed(rows)
            x, residual = torch.randn(2, 4, rows, 6)
            x.requires_grad_(), residual.requires_grad_()
            y = function(x, residual, key_of(), start)
            y.sum().backward()
            results.append(digest(y, x.grad, residual.grad))
        assert results[0] == results[1]


def test_interpreted_kernel_has_the_same_bits(interpreted):
    interpreted(1).run(interpreted_cases)


def interpreted_cases() -> None:
    """Groups of four and single elements, indexes of more than 34 bits, more dimensions than a launch has."""
    far = 1 << 36
    cases = [
        ((3, 5, 36), (0, 1, 2), 0, 4, 60),
        ((3, 5, 36), (1, 0, 2), 1, far, far + 60),
        ((3, 37), (0, 1), 0, far + 3, far + 60),
        ((7, 9), (1, 0), 1, 3, 60),
        ((2, 3, 2, 3, 5), (3, 2, 1, 0, 4), 2, 1, 9),
        ((1, 1), (0, 1), 0, 0, 1),
        ((0, 4), (0, 1), 0, 0, 5),
    ]
    for seed, (shape, order, dim, start, size) in enumerate(cases):
        torch.manual_seed(seed)
        dtype = DTYPES[seed % 3]
        x, residual = (torch.randn(shape).to(dtype).permute(order) for _ in range(2))
        for more in ({}, {"residual": residual}):
            place = {"key": key_of(), "dim": dim, "start": start, "size": size} | more
            y = dropout(x, 0.3, **place, implementation="triton")
            assert digest(y) == digest(dropout(x, 0.3, **place)), (shape, order, more.keys())


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_probabilities_are_refused(p):
    with pytest.raises(UnsupportedError, match="probability"):
        dropout(torch.ones(3), p, key=key_of())


def test_refused():
    x = torch.ones(2, 3)
    wrong_keys = (torch.tensor([1]), torch.tensor(1.0), torch.tensor(1, dtype=torch.int32))
    for key in (*wrong_keys, torch.empty((), dtype=torch.int64, device="meta")):
        with pytest.raises(UnsupportedError, match="draw_key"):
            dropout(x, 0.5, key=key)
    for more in (
        {"dim": 2},
        {"start": -1},
        {"start": 1, "size": 2},
        {"residual": x[:1]},
    ):
        with pytest.raises(ShapeError):
            dropout(x, 0.5, key=key_of(), **more)
    with pytest.raises(ShapeError, match="scalar"):
        dropout(x[0, 0], 0.5, key=key_of())
    with pytest.raises(UnsupportedError, match="int64"):
        dropout(x.long(), 0.5, key=key_of())
    with pytest.raises(UnsupportedError, match=r"triton.*TRITON_INTERPRET"):
        dropout(x, 0.5, key=key_of(), implementation="triton")
    with pytest.raises(UnsupportedError, match="known are auto, host"):
        dropout(x, 0.5, key=key_of(), implementation="cuda")
    with pytest.raises(UnsupportedError, match="float64"):
        dropout(x.double(), 0.5, key=key_of(), implementation="host")


def test_why_an_implementation_runs():
    assert short_way._host is not None
    for name in IMPLEMENTATIONS:
        choice = explain_local(name)
        assert choice.implementation == ("host" if name == "dropout" else "reference")
        choice = explain_local(name, device="cuda")
        assert choice.implementation == "reference" and "triton" in choice.rejected
        wide = explain_local(name, dtype=torch.float64)
        assert wide.implementation == "reference" and "float64" in wide.rejected["triton"]
    with pytest.raises(UnsupportedError, match="known ops are"):
        explain_local("softmax")
