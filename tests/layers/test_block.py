"""ParallelTransformerBlock: output and every gradient against plain float64; dropout; what it refuses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.layers import block_oracle as oracle
from tests.layers.block_oracle import Case
from tp_kernels.comm import ParallelGroup, UnsupportedError
from tp_kernels.layers import (
    KVCache,
    ParallelTransformerBlock,
    RandomStreams,
    finalize_gradients,
    placements,
)

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


def dropped(
    norm_position: str, parallel: bool, sequence_parallel: bool, checkpointing: bool
) -> dict[str, Tensor]:
    """Unsplit output and gradients with dropout everywhere, plain or with activations computed again."""
    layout = (sequence_parallel, None)
    with ParallelGroup(provider="none", timeout=30) as group:
        streams = RandomStreams(3, group=group)
        case = Case(
            {
                "norm_position": norm_position,
                "parallel": parallel,
                "dropout": 0.3,
                "attention": {"dropout": 0.2},
                "mlp": {"dropout": 0.1},
                "streams": streams,
            }
        )
        block = build(case, group, torch.float64, *layout)
        shapes = {name: place.shape for name, _, place in placements(block)}
        oracle.fill(block, oracle.draw(shapes, torch.float64))
        given = inputs(case, torch.float64)
        x = oracle.to_rank(given["x"], group, *layout).requires_grad_()
        run = partial(streams.checkpoint, block) if checkpointing else block
        rows = case.tokens if sequence_parallel else None
        y = run(run(x, rows=rows), rows=rows)  # twice, so that masks differ between uses
        y.backward(oracle.to_rank(given["dy"], group, *layout))
        finalize_gradients(block)
        found = {"y": y.detach(), "x": x.grad}
        found = {n: oracle.from_ranks(t, group, *layout, case.tokens) for n, t in found.items()}
        return found | {name: place.gather(p.grad) for name, p, place in placements(block)}


@pytest.mark.parametrize(
    ("norm_position", "parallel"),
    [("pre", False), ("post", False), ("sandwich", False), ("pre", True)],
)
def test_dropout_does_not_depend_on_the_world_size(world, norm_position, parallel):
    (wanted,) = world(1).run(dropped, norm_position, parallel, False, False)
    for size in (1, 2, 3):
        for sequence_parallel in (False, True):
            ways = (norm_position, parallel, sequence_parallel)
            for plain, again in zip(
                world(size).run(dropped, *ways, False),
                world(size).run(dropped, *ways, True),
                strict=True,
            ):
                assert plain.keys() == again.keys() == wanted.keys()
                for name, tensor in wanted.items():
                    assert torch.equal(plain[name], again[name]), (size, name, "replayed")
                    assert oracle.distance(plain[name], tensor) < 1e-13, (size, name)


def masks() -> list[dict[str, float]]:
    """What dropout does in a block: share of zeros, and the error of what is left."""
    results = []

    def look(
        module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Tensor], y: Tensor
    ) -> None:
        added = y - options["residual"]
        kept = added.abs() > 1e-12
        error = (added - torch.where(kept, args[0] / 0.75, 0)).abs().max()
        results.append({"kept": float(kept.double().mean()), "error": float(error)})

    with ParallelGroup(provider="none", timeout=30) as group:
        case = Case({"dropout": 0.25, "streams": RandomStreams(5, group=group)}, tokens=100)
        for position in ("pre", "post", "sandwich"):
            case.options["norm_position"] = position
            block = build(case, group, torch.float64, False, None)
            block.dropout.register_forward_hook(look, with_kwargs=True)
            x = inputs(case, torch.float64)["x"]
            block(x)
    return results


def test_what_is_dropped(world):
    """Two sublayers of every position add what dropout leaves of 2000 elements."""
    (results,) = world(1).run(masks)
    assert len(results) == 6
    for result in results:
        assert abs(result["kept"] - 0.75) < 0.05  # five deviations
        assert result["error"] < 1e-14


def decode() -> tuple[Tensor, Tensor]:
    """The same tokens at once, and one by one with caches; with a context that is projected once."""
    with ParallelGroup(timeout=30) as group, torch.no_grad():
        torch.manual_seed(5)
        case = Case({"cross_attention": {}})
        block = build(case, group, torch.float32, False, None).eval()
        given = inputs(case, torch.float32)
        x, context = given["x"], given["context"]
        own, cross = KVCache(), {"cache": KVCache()}
        steps = [block(x[:, :3], cache=own, context=context, cross_attention=cross)]
        for at in range(3, case.tokens):
            steps.append(block(x[:, at : at + 1], cache=own, cross_attention=cross))
        return block(x, context=context), torch.cat(steps, dim=1)


def test_caches(world):
    for size in (1, 3):
        for whole, steps in world(size).run(decode):
            torch.testing.assert_close(steps, whole, rtol=0, atol=2e-6)


def delayed(sequence_parallel: bool) -> list[bool]:
    """Weight gradients come later with the same bits; those of norms at once."""
    case = Case({"cross_attention": {}})
    with ParallelGroup(timeout=30) as group:
        layout = (sequence_parallel, None)
        plain = build(case, group, torch.float32, *layout)
        late = build(
            replace(case, options={**case.options, "delay_wgrad": True}),
            group,
            torch.float32,
            *layout,
        )
        late.load_state_dict(plain.state_dict())
        given = {
            name: oracle.to_rank(t, group, *layout)
            for name, t in inputs(case, torch.float32).items()
        }
        more = {"rows": case.tokens, "cross_attention": {"context_rows": case.context}}
        for block in (plain, late):
            y = block(given["x"], context=given["context"], **(more if sequence_parallel else {}))
            y.backward(given["dy"])
        waiting = [name for name, p in late.named_parameters() if p.grad is None]
        matrices = [name for name, p in late.named_parameters() if p.dim() == 2]
        late.backward_dw()
        pairs = zip(plain.parameters(), late.parameters(), strict=True)
        return [waiting == matrices, all(torch.equal(a.grad, b.grad) for a, b in pairs)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_delayed_weight_gradients(world, sequence_parallel):
    assert world(2).run(delayed, sequence_parallel) == [[True, True]] * 2


def test_refusals():
    group = ParallelGroup()
    sizes = (8, 2, 12)
    for options, words in (
        ({"norm": "batch"}, "norm='batch'; known are rms, layer"),
        ({"norm": None}, "norm=None"),
        ({"norm_position": "middle"}, "norm_position='middle'; known are pre, post, sandwich"),
        ({"parallel": True, "norm_position": "sandwich"}, "one norm in front"),
        ({"parallel": True, "cross_attention": {}}, "one norm in front"),
        ({"mlp": {"dtype": torch.float64}}, "dtype for a part of the block"),
        ({"attention": {"sequence_parallel": True}}, "sequence_parallel for a part"),
        ({"cross_attention": {"batch_first": False}}, "batch_first for a part"),
        ({"dropout": -0.1}, "p=-0.1"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            ParallelTransformerBlock(*sizes, group=group, **options)
    x = torch.randn(2, 3, 8)
    block = ParallelTransformerBlock(*sizes, group=group)
    with pytest.raises(UnsupportedError, match="a context, but no cross-attention"):
        block(x, context=x)
    with pytest.raises(UnsupportedError, match="rows="):
        block(x, rows=3)
    with pytest.raises(UnsupportedError, match="needs context="):
        ParallelTransformerBlock(*sizes, cross_attention={}, group=group)(x)
    block = ParallelTransformerBlock(*sizes, group=group, sequence_parallel=True)
    with pytest.raises(UnsupportedError, match="KV cache under sequence_parallel"):
        block(x, cache=KVCache())
