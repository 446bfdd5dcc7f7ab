"""Loss, logits and every gradient of a Llama made of our layers, against float64 on one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.layers.llama import Llama, Shape, dense_loss, next_token_loss, weights
from tp_kernels.comm import ParallelGroup
from tp_kernels.layers import finalize_gradients, placements

SHAPES = {
    "plain": Shape(),
    "bias": Shape(bias=True),
    "window": Shape(bias=True, sliding_window=3),
    "mha": Shape(heads=4, kv_heads=4),
    "mqa": Shape(heads=5, kv_heads=1),
}


def oracle(shape: Shape, ids: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    full = {name: w.requires_grad_() for name, w in weights(shape, torch.float64).items()}
    loss, logits = dense_loss(full, shape, ids)
    loss.backward()
    return loss.detach(), logits.detach(), {name: w.grad for name, w in full.items()}


def errors(provider: str, dtype: torch.dtype, cases: list[tuple[str, bool]]) -> list[dict]:
    """Per case: error of loss, logits and each gathered gradient, relative to its largest element."""
    ids = torch.randint(0, 37, (3, 7), generator=torch.Generator().manual_seed(2))
    results = []
    with ParallelGroup(provider=provider, timeout=30) as group:
        for name, sequence_parallel in cases:
            shape = SHAPES[name]
            loss64, logits64, grads64 = oracle(shape, ids)
            model = Llama(shape, group, sequence_parallel, dtype).load(weights(shape, dtype))
            group.reset_stats()
            logits = model(ids)
            loss = next_token_loss(logits, ids)
            loss.backward()
            finalize_gradients(model)
            found = {"loss": distance(loss, loss64), "logits": distance(logits, logits64)}
            gathered = {n: place.gather(p.grad) for n, p, place in placements(model)}
            assert set(gathered) == set(grads64)
            found |= {n: distance(g, grads64[n]) for n, g in gathered.items()}
            bits = logits.detach().numpy().tobytes() + b"".join(
                gathered[n].numpy().tobytes() for n in sorted(gathered)
            )
            results.append({"errors": found, "bits": hash(bits), "calls": group.stats()["calls"]})
    return results


def distance(x: Tensor, oracle: Tensor) -> float:
    return float((x.detach().double() - oracle).abs().max() / oracle.abs().max())


CASES = [(name, sp) for name in SHAPES for sp in (False, True)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_float64_through_the_process_group(world, size):
    """Nothing rounds but float64 itself: an error in the calculus has nowhere to hide."""
    for rank in world(size).run(errors, "none", torch.float64, CASES):
        for case, result in zip(CASES, rank, strict=True):
            # rotary tables are fp32 in both; ~100 roundings of 1.1e-16 along the longest path
            worst = max(result["errors"].items(), key=lambda item: item[1])
            assert worst[1] < 1e-13, (case, worst)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_float32_through_shared_memory(world, size):
    """fp32 rounds about 100 times (2 layers x ~25 dependent operations, forward and backward) along a
    path; independent roundings add up to sqrt(100) * 6e-8, and a factor 10 covers cancellation."""
    outcomes = world(size).run(errors, "host", torch.float32, CASES)
    for index, case in enumerate(CASES):
        results = [rank[index] for rank in outcomes]
        worst = max(results[0]["errors"].items(), key=lambda item: item[1])
        assert worst[1] < 6e-6, (case, worst)
        assert len({result["bits"] for result in results}) == 1, f"{case}: ranks differ"
        wanted = "all_gather_linear" if case[1] else "copy_linear.backward"
        assert results[0]["calls"][wanted] == {"host": 4 if case[1] else 5}, results[0]["calls"]


def test_the_oracle_bites(world):
    """A missing reduction of shared KV heads and norms shows up as a large error."""
    (result,) = world(2).run(without_finalize, torch.float64)[:1]
    assert result["layers.0.attention.k_proj.weight"] > 1e-2
    assert result["layers.1.norm1.weight"] > 1e-2
    assert result["layers.0.attention.q_proj.weight"] < 1e-13


def without_finalize(dtype: torch.dtype) -> dict[str, float]:
    ids = torch.randint(0, 37, (3, 7), generator=torch.Generator().manual_seed(2))
    shape = SHAPES["mqa"]
    with ParallelGroup(provider="none", timeout=30) as group:
        model = Llama(shape, group, True, dtype).load(weights(shape, dtype))
        next_token_loss(model(ids), ids).backward()
        _, _, grads = oracle(shape, ids)
        return {n: distance(place.gather(p.grad), grads[n]) for n, p, place in placements(model)}
