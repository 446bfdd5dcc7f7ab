"""Stages of language models: outputs, gradients and weights of the whole model; what cannot be cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.pipeline import decoders
from tp_kernels.comm import ShapeError, UnsupportedError
from tp_kernels.integrations.checkpoint import SafetensorsReader
from tp_kernels.pipeline.causal_lm import load_stage, split_layers, units_of

FAMILIES = {
    "llama": {},
    "gpt2": {},
    "qwen2": {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2},
    "mistral": {"sliding_window": 4},
    "gemma": {"num_key_value_heads": 2, "head_dim": 8},
    "gemma2": {"sliding_window": 4},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "gpt_neox": {},
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    with decoders.one_thread():
        yield


def through(stages, value):
    for stage in stages:
        value = stage(**value) if isinstance(value, dict) else stage(value)
    return value


@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_of_the_whole_model(kind):
    """The same bits, with and without padding, for layers of several types; the model stays as it was."""
    model = decoders.tiny(kind, **FAMILIES[kind])
    ids, _, right = decoders.training_batch()
    left = right.flip(1)
    expected = [model(ids, attention_mask=mask).logits for mask in (None, left, right)]
    assert units_of(model) == ["embedding", *(f"layer {i}" for i in range(4)), "head"]
    for cut in (1, 2, 3, range(7), (0, 1, 6)):
        stages = split_layers(model, cut)
        assert torch.equal(through(stages, ids), expected[0])
        for mask, logits in zip((left, right), expected[1:], strict=True):
            assert torch.equal(through(stages, {"inputs": ids, "attention_mask": mask}), logits)
    assert torch.equal(model(ids, attention_mask=left).logits, expected[1])


def test_stages_share_the_weights_of_a_model():
    model = decoders.tiny("gpt2")
    stages = split_layers(model, 3)
    names = [name for stage in stages for name in stage.lm.state_dict()]
    assert sorted(names) == sorted(model.state_dict())
    for stage in stages:
        for name, parameter in stage.lm.named_parameters():
            assert parameter is dict(model.named_parameters(remove_duplicate=False))[name]
    assert stages[0].ties == [((0, "lm.transformer.wte.weight"), (2, "lm.lm_head.weight"))]
    assert split_layers(decoders.tiny("llama"), 3)[0].ties == []
    assert "stage 1 of 3: layers 1 to 1" in repr(stages[1])


def test_gradients_of_the_runner(world):
    """The runner on stages, tied weights and masks included: losses and gradients of the whole model."""
    cases = [
        {"kind": "llama"},
        {"kind": "llama", "mask": True, "changes": {"tie_word_embeddings": True}},
        {"kind": "gpt2", "changes": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}},
    ]
    ids, labels, mask = decoders.training_batch()
    found = {size: world(size).run(decoders.trained, cases) for size in (2, 3)}
    for index, case in enumerate(cases):
        model = decoders.tiny(case["kind"], **case.get("changes", {})).double()
        logits = model(ids, attention_mask=mask if case.get("mask") else None).logits
        loss = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        loss.backward()
        expected = dict(model.named_parameters(remove_duplicate=False))
        for ranks in found.values():
            seen = set()
            for result in (rank[index] for rank in ranks):
                assert result["loss"] == pytest.approx(loss.item(), rel=1e-6)
                for name, gradient in result["gradients"].items():
                    seen.add(name)
                    # transformers keeps norms and softmax in fp32 inside
                    torch.testing.assert_close(gradient, expected[name].grad, rtol=1e-5, atol=1e-6)
            assert seen == set(expected)


@pytest.mark.parametrize("tied", [False, True])
def test_load_reads_one_stage(tmp_path, monkeypatch, tied):
    model = decoders.tiny("qwen2", tie_word_embeddings=tied, sliding_window=4)
    model.save_pretrained(tmp_path)
    stored = SafetensorsReader.tensor
    read = []
    monkeypatch.setattr(
        SafetensorsReader, "tensor", lambda self, name: read.append(name) or stored(self, name)
    )
    names = set()
    ids, *_ = decoders.training_batch()
    stages = []
    for index in range(3):
        read.clear()
        stage = load_stage(tmp_path, 3, index)
        stages.append(stage)
        own = {name for name, _ in stage.lm.named_parameters()}
        assert len(read) == len(own), "more was read than the stage holds"
        names |= own
        assert not any(p.is_meta for p in [*stage.parameters(), *stage.buffers()])
        assert not stage.training
    assert names == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert torch.equal(through(stages, ids), model(ids).logits)
    assert stages[1].ties == (
        [((0, "lm.model.embed_tokens.weight"), (2, "lm.lm_head.weight"))] if tied else []
    )


def test_load_reads_slices_of_one_stage(world, tmp_path):
    """Tensor parallelism inside the stages: each rank reads about its half."""
    model = decoders.tiny("llama")
    model.save_pretrained(tmp_path)
    whole = sum(parameter.numel() for parameter in model.parameters())
    results = world(2).run(decoders.loaded, tmp_path, (0, 3, 6))
    logits = model(torch.tensor(decoders.prompts(1))).logits
    for result in results:
        assert result["read"] < 0.52 * whole
        torch.testing.assert_close(result["logits"], logits, rtol=1e-4, atol=1e-4)


def test_sequences_of_modules():
    layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
    stages = split_layers(layers, (0, 2, 5))
    assert [len(stage) for stage in stages] == [2, 3]
    x = torch.randn(2, 3)
    assert torch.equal(through(stages, x), layers(x))
    assert [len(stage) for stage in split_layers(list(layers), 2)] == [2, 3]


def test_refusals():
    def made(kind, **sizes):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=20, **sizes))

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    with pytest.raises(
        UnsupportedError, match=r"OPTForCausalLM cannot be cut .* decoder: OPTDecoder"
    ):
        split_layers(made("opt", ffn_dim=16, word_embed_proj_dim=16, **small), 2)
    granite = made("granite", intermediate_size=16, embedding_multiplier=3.0, **small)
    with pytest.raises(UnsupportedError, match=r"GraniteForCausalLM .* changes hidden states"):
        split_layers(granite, 2)
    with pytest.raises(UnsupportedError, match=r"'mamba' cannot be cut .* linear_attention"):
        split_layers(made("mamba", hidden_size=16, num_hidden_layers=2, state_size=4), 2)
    llama = decoders.tiny("llama")
    with pytest.raises(ShapeError, match="5 stages for 4 decoder layers"):
        split_layers(llama, 5)
    with pytest.raises(ShapeError, match="rise from 0 to 6"):
        split_layers(llama, (0, 3, 3, 6))
    with pytest.raises(UnsupportedError, match="neither a causal language model"):
        split_layers(nn.Linear(2, 2), 1)
    with pytest.raises(ShapeError, match="stage 0 holds 3 units"):
        split_layers(llama, 2)[0].only_layer()
    head = split_layers(llama, range(7))[-1]
    with pytest.raises(UnsupportedError, match="pass position_ids"):
        head(torch.zeros(1, 1, 48), cache=head.new_cache())
