"""ParallelMLP: output and every gradient against plain float64, for all of its options; what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.layers import block_oracle as oracle
from tests.layers.block_oracle import Case
from tp_kernels.comm import ParallelGroup, UnsupportedError
from tp_kernels.layers import ParallelMLP, RandomStreams, finalize_gradients, placements

CASES = [
    Case({"activation": name, "gated": gated, "bias": bias})
    for name in ("gelu", "gelu_tanh", "silu", "relu", "relu2")
    for gated, bias in ((False, True), (True, False))
] + [
    Case({"activation": "swiglu", "packed": "blocks"}),
    Case({"activation": "swiglu", "packed": "interleaved"}),
    Case({"activation": "geglu", "packed": "blocks", "bias": True, "norm": "rms"}),
    Case({"activation": "relu2", "packed": "interleaved", "bias": True, "norm": "layer"}),
    Case({"bias": True, "output_bias": False}),
    Case({"gated": False, "activation": "gelu", "bias": False, "output_bias": True}),
    Case({"norm": "rms", "zero_centered": True, "epsilon": 1e-2}),
    Case({"norm": "layer", "bias": True}, tokens=2),  # fewer tokens than ranks
    replace(Case(), intermediate=2),  # a rank without features
    replace(Case({"packed": "blocks", "bias": True}), intermediate=3),
]


def dense(case: Case, shapes: dict[str, tuple[int, ...]], residual: bool) -> dict[str, Tensor]:
    """Output, and gradients of sum(output * weight) by name, in float64; x is [b, s, H]."""
    full = {name: w.requires_grad_() for name, w in oracle.draw(shapes, torch.float64).items()}
    given = inputs(case, torch.float64)
    leaves = {name: given[name].requires_grad_() for name in ("x", "residual")[: 1 + residual]}
    total = sum(leaves.values())
    kind = case.given("norm", None)
    n = total if kind is None else oracle.norm(full, "norm", total, case, kind)
    y = oracle.mlp(full, n, case, case.options)
    loss = (y * given["dy"]).sum()
    if residual:
        loss = loss + (total * given["ds"]).sum()
    loss.backward()
    found = {name: leaf.grad for name, leaf in {**full, **leaves}.items()}
    return {"y": y.detach(), **found} | ({"s": total.detach()} if residual else {})


def inputs(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    shape = (case.batch, case.tokens, case.hidden)
    return oracle.draw(dict.fromkeys(("x", "residual", "dy", "ds"), shape), dtype, seed=6)


def compare(
    provider: str, dtype: torch.dtype, sequence_parallel: bool, batch_first: bool | None
) -> list[tuple[dict[str, float], bytes]]:
    """By case: errors relative to the largest element, and the bits of what all ranks should share."""
    results = []
    with ParallelGroup(provider=provider, timeout=30) as group:
        for case in CASES:
            options = {**case.options, "sequence_parallel": sequence_parallel, "dtype": dtype}
            mlp = ParallelMLP(
                case.hidden, case.intermediate, group=group, batch_first=batch_first, **options
            )
            shapes = {name: place.shape for name, _, place in placements(mlp)}
            oracle.fill(mlp, oracle.draw(shapes, dtype))
            fused = "norm" in case.options
            tensors = {
                name: oracle.to_rank(t, group, sequence_parallel, batch_first)
                for name, t in inputs(case, dtype).items()
            }
            x, residual = tensors["x"].requires_grad_(), tensors["residual"].requires_grad_()
            rows = case.tokens if sequence_parallel else None
            y = mlp(x, rows=rows, residual=residual) if fused else mlp(x, rows)
            found = {}
            if fused:
                y, found["s"] = y
                torch.autograd.backward([y, found["s"]], [tensors["dy"], tensors["ds"]])
                found["residual"] = residual.grad
            else:
                y.backward(tensors["dy"])
            finalize_gradients(mlp)
            found |= {"y": y.detach(), "x": x.grad}
            found = {
                name: oracle.from_ranks(
                    t.detach(), group, sequence_parallel, batch_first, case.tokens
                )
                for name, t in found.items()
            }
            shared = [p.grad for _, p, place in placements(mlp) if place.dim is None]
            found |= {name: place.gather(p.grad) for name, p, place in placements(mlp)}
            wanted = dense(case, shapes, fused)
            assert found.keys() == wanted.keys()
            errors = {name: oracle.distance(found[name], wanted[name]) for name in found}
            bits = b"".join(t.numpy().tobytes() for t in [*shared, found["y"], found["x"]])
            results.append((errors, bits))
    return results


LAYOUTS = [(False, None), (False, False), (True, None), (True, True)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("sequence_parallel", "batch_first"), LAYOUTS)
def test_float64(world, size, sequence_parallel, batch_first):
    outcomes = world(size).run(compare, "none", torch.float64, sequence_parallel, batch_first)
    check(outcomes, 1e-13)  # ~30 roundings of 1.1e-16, sums of at most 22 terms, cancellation by 10


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_float32_through_shared_memory(world, size, sequence_parallel):
    outcomes = world(size).run(compare, "host", torch.float32, sequence_parallel, None)
    check(outcomes, 4e-6)  # as above, with 6e-8


def check(outcomes: list[list[tuple[dict[str, float], bytes]]], bound: float) -> None:
    for index, case in enumerate(CASES):
        for errors, _ in (rank[index] for rank in outcomes):
            worst = max(errors.items(), key=lambda item: item[1])
            assert worst[1] < bound, (case, worst)
        assert len({rank[index][1] for rank in outcomes}) == 1, f"{case}: ranks differ"


def dropped(sequence_parallel: bool, batch_first: bool | None) -> dict[str, Tensor]:
    """Unsplit output, input gradient and one weight gradient with dropout, and the output without."""
    case, layout = Case({"bias": True}), (sequence_parallel, batch_first)
    with ParallelGroup(provider="none", timeout=30) as group:
        mlp = ParallelMLP(
            case.hidden,
            case.intermediate,
            bias=True,
            dropout=0.4,
            streams=RandomStreams(3, group=group),
            group=group,
            sequence_parallel=sequence_parallel,
            batch_first=batch_first,
            dtype=torch.float64,
        )
        shapes = {name: place.shape for name, _, place in placements(mlp)}
        oracle.fill(mlp, oracle.draw(shapes, torch.float64))
        given = inputs(case, torch.float64)
        x = oracle.to_rank(given["x"], group, *layout).requires_grad_()
        rows = case.tokens if sequence_parallel else None
        y = mlp(x, rows)
        y.backward(oracle.to_rank(given["dy"], group, *layout))
        finalize_gradients(mlp)
        found = {"y": y.detach(), "x": x.grad, "without": mlp.eval()(x, rows).detach()}
        found = {n: oracle.from_ranks(t, group, *layout, case.tokens) for n, t in found.items()}
        weight = mlp.gate_proj.weight
        return found | {"weight": mlp.gate_proj.placements["weight"].gather(weight.grad)}


def test_dropout_does_not_depend_on_the_world_size(world):
    (wanted,) = world(1).run(dropped, False, None)
    kept = wanted["y"] != 0
    assert 0.4 < kept.double().mean() < 0.8  # 140 elements, p = 0.4: 0.6 within five deviations
    scaled = torch.where(kept, wanted["without"] / 0.6, 0)
    torch.testing.assert_close(wanted["y"], scaled, rtol=1e-15, atol=0)
    for size in (2, 3):
        for layout in LAYOUTS:
            for found in world(size).run(dropped, *layout):
                assert torch.equal(found["y"] != 0, kept), (size, layout)
                for name, tensor in found.items():
                    torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-13)


def delayed(sequence_parallel: bool) -> list[bool]:
    """Two backward passes, whose weight gradients come later with the same bits."""
    case = Case()
    results = []
    with ParallelGroup(timeout=30) as group:
        for packed in (None, "blocks"):
            options = {"group": group, "sequence_parallel": sequence_parallel, "bias": True}
            pair = [
                ParallelMLP(case.hidden, case.intermediate, packed=packed, **options, delay_wgrad=d)
                for d in (False, True)
            ]
            pair[1].load_state_dict(pair[0].state_dict())
            given = inputs(case, torch.float32)
            for mlp in pair:
                for name in ("x", "residual"):
                    x = oracle.to_rank(given[name], group, sequence_parallel, None)
                    y = mlp(x.requires_grad_(), case.tokens if sequence_parallel else None)
                    y.backward(oracle.to_rank(given["dy"], group, sequence_parallel, None))
            results.append(all(p.grad is None for p in pair[1].parameters()))
            for _ in range(2):
                pair[1].backward_dw()
            grads = [[p.grad for p in mlp.parameters()] for mlp in pair]
            results.append(all(torch.equal(a, b) for a, b in zip(*grads, strict=True)))
    return results


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_delayed_weight_gradients(world, sequence_parallel):
    assert world(2).run(delayed, sequence_parallel) == [[True] * 4] * 2


def test_the_oracle_bites():
    """Gate and up packed in the other way run, and give other numbers."""
    case = Case({"packed": "blocks"})
    shapes = {"gate_up_proj.weight": (2 * 11, 10), "down_proj.weight": (10, 11)}
    full, x = oracle.draw(shapes, torch.float64), inputs(case, torch.float64)["x"]
    blocks = oracle.mlp(full, x, case, {"packed": "blocks"})
    assert oracle.distance(oracle.mlp(full, x, case, {"packed": "interleaved"}), blocks) > 0.1


def test_gates_by_default():
    group = ParallelGroup()
    for options, gated in (
        ({}, True),
        ({"activation": "geglu"}, True),
        ({"activation": "gelu"}, False),
        ({"activation": "relu2"}, False),
        ({"activation": "silu", "gated": False}, False),
        ({"activation": "gelu", "gated": True}, True),
    ):
        assert (ParallelMLP(8, 8, group=group, **options).gate_proj is not None) == gated
    packed = ParallelMLP(8, 9, activation="gelu", packed="blocks", group=group)
    assert packed.gate_up_proj.weight.shape == (18, 8)


def test_refusals():
    group = ParallelGroup()
    for options, words in (
        ({"activation": "swish"}, "activation='swish'; known are gelu"),
        ({"activation": None}, "activation=None"),
        ({"activation": "geglu", "gated": False}, "it is 'gelu' with a gate"),
        ({"packed": "rows"}, "packed='rows'"),
        ({"packed": "blocks", "gated": False}, "nothing to pack"),
        ({"norm": "batch"}, "norm='batch'; known are rms, layer"),
        ({"epsilon": 1e-3}, "epsilon= without norm="),
        ({"zero_centered": True}, "zero_centered= without norm="),
        ({"dropout": 1.5}, "p=1.5"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            ParallelMLP(8, 8, group=group, **options)
    mlp = ParallelMLP(8, 8, group=group)
    x = torch.randn(3, 8)
    with pytest.raises(UnsupportedError, match="through the norm in front, and there is none"):
        mlp(x, residual=x)
    with pytest.raises(UnsupportedError, match="rows="):
        mlp(x, rows=3)
