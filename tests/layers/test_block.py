"""ParallelTransformerBlock: output and every gradient against plain float64; dropout; what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.layers import block_oracle as oracle
from tests.layers.block_oracle import Case
from tp_kernels.comm import ParallelGroup
from tp_kernels.layers import ParallelTransformerBlock, finalize_gradients, placements

LAYER = {"norm": "layer", "epsilon": 1e-3}
BIASES = {"attention": {"qkv_bias": True, "output_bias": True}}
CASES = [
    Case(),
    Case({"norm_position": "post", **LAYER, **BIASES, "mlp": {"gated": False, "bias": True}}),
    Case({"norm_position": "sandwich", "zero_centered": True, "mlp": {"activation": "geglu"}}),
    Case({"parallel": True, **LAYER, **BIASES, "mlp": {"packed": "blocks", "output_bias": True}}),
    replace(Case({**LAYER, "mlp": {"packed": "interleaved"}}), tokens=3),  # fewer tokens than ranks
    Case({"cross_attention": {}, "attention": {"qkv_bias": True}}),
    Case({"cross_attention": {"output_bias": True}, "norm_position": "post", **LAYER}),
    Case({"cross_attention": {}, "norm_position": "sandwich", "mlp": {"activation": "relu2"}}),
]


def inputs(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    shape = (case.batch, case.tokens, case.hidden)
    shapes = {"x": shape, "dy": shape}
    if "cross_attention" in case.options:
        shapes["context"] = (case.batch, case.context, case.hidden)
    return oracle.draw(shapes, dtype, seed=6)


def dense(case: Case, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Output, and gradients of sum(output * weight) by name, in float64; x is [b, s, H]."""
    full = {name: w.requires_grad_() for name, w in oracle.draw(shapes, torch.float64).items()}
    given = inputs(case, torch.float64)
    dy = given.pop("dy")
    leaves = {name: t.requires_grad_() for name, t in given.items()}
    y = oracle.block(full, leaves["x"], case, leaves.get("context"))
    (y * dy).sum().backward()
    return {"y": y.detach()} | {name: leaf.grad for name, leaf in {**full, **leaves}.items()}


def compare(
    provider: str,
    dtype: torch.dtype,
    cases: list[Case],
    sequence_parallel: bool,
    batch_first: bool | None,
) -> list[tuple[dict[str, float], bytes]]:
    """By case: errors relative to the largest element, and the bits of what all ranks should share."""
    results = []
    layout = (sequence_parallel, batch_first)
    with ParallelGroup(provider=provider, timeout=30) as group:
        for case in cases:
            block = build(case, group, dtype, *layout)
            shapes = {name: place.shape for name, _, place in placements(block)}
            oracle.fill(block, oracle.draw(shapes, dtype))
            given = inputs(case, dtype)
            leaves = {name: oracle.to_rank(t, group, *layout) for name, t in given.items()}
            dy = leaves.pop("dy")
            for leaf in leaves.values():
                leaf.requires_grad_()
            more = {"rows": case.tokens} if sequence_parallel else {}
            if "context" in leaves:
                rows = {"context_rows": case.context} if sequence_parallel else {}
                more |= {"context": leaves["context"], "cross_attention": rows}
            y = block(leaves["x"], **more)
            y.backward(dy)
            finalize_gradients(block)
            found = {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}
            found = {
                name: oracle.from_ranks(t, group, *layout, given.get(name, given["x"]).shape[1])
                for name, t in found.items()
            }
            shared = [p.grad for _, p, place in placements(block) if place.dim is None]
            bits = b"".join(t.numpy().tobytes() for t in [*shared, *found.values()])
            found |= {name: place.gather(p.grad) for name, p, place in placements(block)}
            wanted = dense(case, shapes)
            assert found.keys() == wanted.keys()
            results.append(
                ({name: oracle.distance(found[name], wanted[name]) for name in found}, bits)
            )
    return results


def build(
    case: Case,
    group: ParallelGroup,
    dtype: torch.dtype,
    sequence_parallel: bool,
    batch_first: bool | None,
) -> ParallelTransformerBlock:
    return ParallelTransformerBlock(
        case.hidden,
        case.heads,
        case.intermediate,
        case.kv_heads,
        case.head_dim,
        group=group,
        dtype=dtype,
        sequence_parallel=sequence_parallel,
        batch_first=batch_first,
        **case.options,
    )


LAYOUTS = [(False, None), (False, False), (True, None), (True, True)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("sequence_parallel", "batch_first"), LAYOUTS)
def test_float64(world, size, sequence_parallel, batch_first):
    layout = (sequence_parallel, batch_first)
    outcomes = world(size).run(compare, "none", torch.float64, CASES, *layout)
    check(outcomes, CASES, 1e-13)  # ~100 roundings of 1.1e-16 along a path, cancellation by 10


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_float32_through_shared_memory(world, size, sequence_parallel):
    outcomes = world(size).run(compare, "host", torch.float32, CASES, sequence_parallel, None)
    check(outcomes, CASES, 6e-6)  # as above, with 6e-8


def check(
    outcomes: list[list[tuple[dict[str, float], bytes]]], cases: list[Case], bound: float
) -> None:
    for index, case in enumerate(cases):
        for errors, _ in (rank[index] for rank in outcomes):
            worst = max(errors.items(), key=lambda item: item[1])
            assert worst[1] < bound, (case, worst)
        assert len({rank[index][1] for rank in outcomes}) == 1, f"{case}: ranks differ"
