"""all_reduce_rms_norm and linear_all_reduce_rms_norm: one step or several, the same bits and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.oracle import digest
from tp_kernels import (
    ParallelGroup,
    ShapeError,
    UnsupportedError,
    all_reduce_rms_norm,
    linear_all_reduce_rms_norm,
    split_range,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPSILON = 1e-5
ROWS, IN, OUT = (2, 3), 40, 33


def draw(dtype: torch.dtype, leading: tuple[int, ...], seed: int) -> dict[str, Tensor]:
    """The unsplit arguments, equal on all ranks."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "x": normal(*leading, IN),
        "w": normal(OUT, IN),
        "bias": normal(OUT),
        "residual": normal(*leading, OUT),
        "weight": normal(OUT),
    }


def oracle(full: dict[str, Tensor], bias: bool, residual: bool) -> tuple[Tensor, Tensor]:
    wide = {name: value.double() for name, value in full.items()}
    total = wide["x"] @ wide["w"].t()
    total = total + wide["bias"] if bias else total
    total = total + wide["residual"] if residual else total
    scale = (total.pow(2).mean(-1, keepdim=True) + EPSILON).rsqrt()
    return total * scale * wide["weight"], total


def mine(full: dict[str, Tensor], group: ParallelGroup) -> tuple[Tensor, Tensor]:
    start, stop = split_range(IN, group.size, group.rank)
    return full["x"][..., start:stop], full["w"][:, start:stop]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_one_step_has_the_bits_of_several(world, size):
    results = world(size).run(compare)
    assert all(result == results[0] for result in results), "ranks have different bits"


def compare() -> list[str]:
    digests = []
    # The last one is more than a window, which takes the separate steps.
    for window in (1 << 20, 1024):
        with (
            ParallelGroup(timeout=30, window=window) as group,
            ParallelGroup(timeout=30, provider="none") as apart,
        ):
            for seed, dtype in enumerate(DTYPES):
                for leading in ((), (1,), (16,), ROWS, (0,)):
                    for with_bias, with_residual in ((0, 0), (1, 0), (0, 1), (1, 1)):
                        full = draw(dtype, leading, seed)
                        x, w = mine(full, group)
                        bias = full["bias"] if with_bias else None
                        residual = full["residual"] if with_residual else None
                        kept = None if residual is None else residual.clone()
                        calls = [
                            linear_all_reduce_rms_norm(
                                *(x, w, full["weight"]),
                                group=one,
                                bias=bias,
                                residual=residual,
                                epsilon=EPSILON,
                            )
                            for one in (group, apart)
                        ]
                        partial = torch.nn.functional.linear(x, w)
                        calls += [
                            all_reduce_rms_norm(
                                *(partial, full["weight"]),
                                group=one,
                                residual=residual,
                                epsilon=EPSILON,
                            )
                            for one in (group, apart)
                        ]
                        case = (window, dtype, leading, with_bias, with_residual)
                        assert residual is None or torch.equal(residual, kept), case
                        for fused, separate in (calls[:2], calls[2:]):
                            for a, b in zip(fused, separate, strict=True):
                                assert a.shape == (*leading, OUT) and a.dtype == dtype
                                assert digest(a) == digest(b), case
                        check(full, calls[0], bool(with_bias), bool(with_residual), dtype, group)
                        digests += [digest(value) for call in calls for value in call]
            if group.size > 1:
                counts = group.stats()["calls"]
                fused = counts.get("linear_all_reduce_rms_norm", {}).get("host", 0)
                assert (fused > 0) and (window < 4096 or set(counts) <= FUSED), counts
    return digests


FUSED = {"linear_all_reduce_rms_norm", "all_reduce_rms_norm", "linear_all_reduce", "all_reduce"}


def check(
    full: dict[str, Tensor],
    results: tuple[Tensor, Tensor],
    bias: bool,
    residual: bool,
    dtype: torch.dtype,
    group: ParallelGroup,
) -> None:
    """Elementwise against float64: a rounding of each partial product, of the sum and of the residual."""
    y, total = oracle(full, bias, residual)
    eps, eps32 = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    terms = full["x"].double().abs() @ full["w"].double().abs().t()
    terms = terms + (full["bias"].double().abs() if bias else 0)
    terms = terms + (full["residual"].double().abs() if residual else 0)
    bound = ((group.size + 2) * eps / 2 + IN * eps32) * terms
    assert ((results[1].double() - total).abs() <= bound).all()
    # |y| moves with its own row by at most twice the largest relative error of the row's root mean square
    norm = total.pow(2).mean(-1, keepdim=True).add(EPSILON).sqrt()
    spread = bound.pow(2).mean(-1, keepdim=True).sqrt() / norm
    weight = full["weight"].double().abs()
    allowed = (bound / norm + total.abs() / norm * spread) * 1.1 * weight
    allowed = allowed + (eps + (IN + 4) * eps32) * y.abs() + torch.finfo(dtype).tiny
    assert ((results[0].double() - y).abs() <= allowed).all()


@pytest.mark.parametrize("size", [1, 3])
def test_gradients(world, size):
    world(size).run(gradients)


def gradients() -> None:
    full = {name: value.double() for name, value in draw(torch.float32, ROWS, 7).items()}
    want = {name: value.clone().requires_grad_() for name, value in full.items()}
    y, total = oracle_graph(want)
    (y.sin().sum() + total.cos().sum()).backward()
    with ParallelGroup(timeout=30) as group:
        start, stop = split_range(IN, group.size, group.rank)
        have = {name: value.clone().requires_grad_() for name, value in full.items()}
        x = full["x"][..., start:stop].clone().requires_grad_()
        w = full["w"][:, start:stop].clone().requires_grad_()
        y, total = linear_all_reduce_rms_norm(
            *(x, w, have["weight"]),
            group=group,
            bias=have["bias"],
            residual=have["residual"],
            epsilon=EPSILON,
        )
        (y.sin().sum() + total.cos().sum()).backward()
    pairs = {
        "x": (x.grad, want["x"].grad[..., start:stop]),
        "w": (w.grad, want["w"].grad[:, start:stop]),
        **{name: (have[name].grad, want[name].grad) for name in ("bias", "residual", "weight")},
    }
    # The norm computes in fp32 inside whatever the dtype: a mean over OUT squares, its root and two
    # products, and the same again in the gradient; sums of rows then hold terms of size up to 4.
    tolerance = 4 * (OUT + 8) * torch.finfo(torch.float32).eps
    for name, (a, b) in pairs.items():
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def oracle_graph(want: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    total = want["x"] @ want["w"].t() + want["bias"] + want["residual"]
    scale = (total.pow(2).mean(-1, keepdim=True) + EPSILON).rsqrt()
    return total * scale * want["weight"], total


def test_wrong_arguments(world):
    world(2).run(refusals)


def refusals() -> None:
    with ParallelGroup(timeout=30) as group:
        x, weight = torch.ones(3, 8), torch.ones(8)
        for bad, match in (
            ({"weight": torch.ones(7)}, r"weight is \(7,\), the rows are \(3, 8\)"),
            ({"residual": torch.ones(3, 7)}, r"residual is \(3, 7\)"),
            ({"residual": torch.ones(3, 8).half()}, "float16"),
        ):
            arguments = {"weight": weight, "residual": None} | bad
            with pytest.raises(ShapeError, match=match):
                all_reduce_rms_norm(x, group=group, **arguments)
            with pytest.raises(ShapeError, match=match):
                linear_all_reduce_rms_norm(
                    x,
                    torch.eye(8),
                    arguments["weight"],
                    group=group,
                    residual=arguments["residual"],
                )
        with pytest.raises(UnsupportedError, match="ParallelGroup"):
            all_reduce_rms_norm(x, weight, group=None)
        # nothing was sent: the group still works
        y, total = all_reduce_rms_norm(x, weight, group=group)
        assert torch.equal(total, torch.full((3, 8), 2.0)) and y.shape == (3, 8)
