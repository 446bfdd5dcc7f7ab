"""RMSNorm and LayerNorm: the dense layers, their gradients summed over the ranks that divide the tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.oracle import digest
from tp_kernels import ParallelGroup, ShapeError, split_range
from tp_kernels.layers import LayerNorm, RMSNorm, finalize_gradients

HIDDEN = 11
CASES = [
    (kind, zero_centered, residual)
    for kind in (RMSNorm, LayerNorm)
    for zero_centered in (False, True)
    for residual in (False, True)
]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("parallel", [False, True])
def test_against_float64(world, size, parallel):
    for digests in zip(*world(size).run(compare, parallel), strict=True):
        assert len(set(digests)) == 1  # of what is whole on every rank


def compare(parallel: bool) -> list[str]:
    """Tokens that divide by nothing, and fewer than ranks; float64 throughout."""
    digests = []
    with ParallelGroup(provider="none", timeout=30) as group:
        for tokens in (7, 2):
            for kind, zero_centered, with_residual in CASES:
                torch.manual_seed(tokens)
                x, residual, dy, ds = torch.randn(4, tokens, 2, HIDDEN, dtype=torch.float64)
                layer = kind(
                    HIDDEN,
                    group=group,
                    sequence_parallel=parallel,
                    zero_centered=zero_centered,
                    dtype=torch.float64,
                )
                with torch.no_grad():
                    for p in layer.parameters():
                        p.normal_()
                whole = [
                    t.detach().clone().requires_grad_() for t in (x, residual, *layer.parameters())
                ]
                exact = dense(kind, whole, zero_centered, with_residual, layer.epsilon)
                torch.autograd.backward(exact, [dy, ds][: len(exact)])

                start, stop = split_range(tokens, group.size, group.rank)
                part = slice(start, stop) if parallel else slice(None)
                a, b = (t[part].clone().requires_grad_() for t in (x, residual))
                found = layer(a, b) if with_residual else (layer(a),)
                torch.autograd.backward(found, [t[part] for t in (dy, ds)][: len(found)])
                finalize_gradients(layer)
                where = (kind.__name__, zero_centered, with_residual, tokens)
                close = lambda one, other, where=where: torch.testing.assert_close(
                    one, other, rtol=1e-11, atol=1e-12, msg=str(where)
                )
                for y, whole_y in zip(found, exact, strict=True):
                    close(y, whole_y[part])
                close(a.grad, whole[0].grad[part])
                if with_residual:
                    close(b.grad, whole[1].grad[part])
                for p, q in zip(layer.parameters(), whole[2:], strict=True):
                    close(p.grad, q.grad)
                    digests.append(digest(p.grad))
    return digests


def dense(
    kind: type, tensors: list[Tensor], zero_centered: bool, with_residual: bool, epsilon: float
) -> list[Tensor]:
    x, residual, weight, *bias = tensors
    s = x + residual if with_residual else x
    scale = 1 + weight if zero_centered else weight
    if kind is LayerNorm:
        y = torch.nn.functional.layer_norm(s, (HIDDEN,), scale, *bias, eps=epsilon)
    else:
        y = torch.nn.functional.rms_norm(s, (HIDDEN,), scale, eps=epsilon)
    return [y, s] if with_residual else [y]


def test_parameters_and_placements():
    with ParallelGroup() as group:
        for kind, zero_centered, _ in CASES:
            for parallel in (False, True):
                layer = kind(
                    5, group=group, sequence_parallel=parallel, zero_centered=zero_centered
                )
                assert torch.equal(layer.weight, torch.full((5,), 0.0 if zero_centered else 1.0))
                names = ["weight", "bias"] if kind is LayerNorm else ["weight"]
                assert list(layer.state_dict()) == names == list(layer.placements)
                for placement in layer.placements.values():
                    assert placement.partial_gradient is parallel and placement.shape == (5,)
        assert LayerNorm(5, bias=False, group=group).bias is None
        assert "bias=False" in repr(LayerNorm(5, bias=False, group=group))
        meta = LayerNorm(5, group=group, device="meta", dtype=torch.bfloat16)
        assert meta.bias.is_meta and meta.bias.dtype == torch.bfloat16
        with pytest.raises(ShapeError, match="must be positive"):
            RMSNorm(0, group=group)


def test_options_of_a_model_in_16_bits():
    """Autocast: rows in bfloat16, weights in float32, and the residual in either."""
    with ParallelGroup() as group:
        layer = RMSNorm(HIDDEN, group=group)
        x, residual = torch.randn(2, 3, HIDDEN)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x.bfloat16())
            z, s = layer(x.bfloat16(), residual)
        assert y.dtype == torch.bfloat16 and z.dtype == s.dtype == torch.float32
        y.float().sum().backward()
        assert layer.weight.grad.dtype == torch.float32
