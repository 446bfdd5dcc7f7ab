"""What ranks run in the tests of the transformers integration."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tp_kernels.comm import ParallelGroup
from tp_kernels.integrations.transformers import load_parallel, parallelize
from tp_kernels.layers import (
    finalize_gradients,
    load_full_state_dict,
    load_sharded,
    placements,
    save_sharded,
)

PROMPTS = (
    "Why is the sky blue?",
    "Write one sentence about the sea.",
    "List three prime numbers and say why they are prime.",
    "What is the capital of France?",
    "Explain gravity to a child.",
)


def small(kind: str, dtype: torch.dtype, *, tied: bool = False, **changes: Any) -> PreTrainedModel:
    """A two-layer model of a family, with the same weights in every process and dtype."""
    sizes = {
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 70,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(kind, **(sizes | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=draw, dtype=torch.float32) * 0.2
            parameter.copy_(values + (parameter.dim() == 1))
    return model.to(dtype)


def batch() -> dict[str, Tensor]:
    """3 x 7 tokens, the second row padded on the left."""
    ids = torch.randint(1, 101, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def training_errors(
    cases: list[dict[str, Any]], provider: str, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Per case: largest errors of loss, logits and gathered gradients against stock float64."""
    results = []
    with ParallelGroup(provider=provider, timeout=30) as group:
        for case in cases:
            stock = small(case["kind"], torch.float64, tied=case.get("tied", False))
            expected = stock(**batch())
            expected.loss.backward()
            model = small(case["kind"], dtype, tied=case.get("tied", False))
            if case.get("frozen"):
                model.model.embed_tokens.requires_grad_(False)
                model.model.layers[0].requires_grad_(False)
            parallelize(model, group, sequence_parallel=case["sequence_parallel"])
            if case.get("checkpointing"):
                model.gradient_checkpointing_enable({"use_reentrant": False})
                model.train()
            forward = model
            if case.get("compiled"):
                torch._dynamo.reset()
                forward = torch.compile(model, backend="aot_eager")
            if case.get("copied"):
                model = forward = copy.deepcopy(model)
            found = forward(**batch(), use_cache=False)
            found.loss.backward()
            finalize_gradients(model)
            errors = {
                "loss": distance(found.loss, expected.loss),
                "logits": distance(found.logits, expected.logits),
            }
            oracle = dict(stock.named_parameters())
            names = []
            for name, parameter, placement in placements(model):
                names.append(name)
                if parameter.grad is None:
                    assert not parameter.requires_grad, f"{name} has no gradient"
                    continue
                whole = placement.gather(parameter.grad)
                errors[name] = distance(whole, oracle[name].grad)
            assert sorted(names) == sorted(oracle), "parameters are not those of the stock model"
            results.append(errors)
    return results


def distance(x: Tensor, oracle: Tensor) -> float:
    oracle = oracle.detach()
    return float((x.detach().double() - oracle).abs().max() / oracle.abs().max())


def chat(checkpoint: Path, prompts: list[str]) -> dict[str, Tensor]:
    """Chat prompts as one batch, padded on the left."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        for prompt in prompts
    ]
    return dict(tokenizer(texts, return_tensors="pt", padding=True))


def greedy(model: PreTrainedModel, checkpoint: Path, prompts: list[str]) -> list[list[int]]:
    inputs = chat(checkpoint, prompts)
    new = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    return model.generate(**inputs, **new)[:, inputs["input_ids"].shape[1] :].tolist()


def all_answers(model: PreTrainedModel, checkpoint: Path) -> list[list[list[int]]]:
    """64 greedy tokens for five prompts one by one, and for three in one batch."""
    singles = [greedy(model, checkpoint, [prompt]) for prompt in PROMPTS]
    return [*singles, greedy(model, checkpoint, list(PROMPTS[:3]))]


def parallel_answers(checkpoint: Path) -> dict[str, Any]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    with ParallelGroup(timeout=60) as group, torch.inference_mode():
        model = load_parallel(checkpoint, group)
        held = sum(parameter.numel() for parameter in model.parameters())
        logits = model(**chat(checkpoint, [PROMPTS[0]])).logits
        return {
            "answers": all_answers(model, checkpoint),
            "weights": held,
            "logits": logits.clone(),
            "calls": group.stats()["calls"],
        }


def generate_small(kind: str, sequence_parallel: bool, cache: str | None) -> list[list[int]]:
    with ParallelGroup(timeout=30) as group:
        model = small(kind, torch.float32).eval()
        if group.size > 1:
            parallelize(model, group, sequence_parallel=sequence_parallel)
        return generate(model, cache)


def generate(model: PreTrainedModel, cache: str | None) -> list[list[int]]:
    inputs = {name: batch()[name] for name in ("input_ids", "attention_mask")}
    return model.generate(
        **inputs, max_new_tokens=12, do_sample=False, cache_implementation=cache
    ).tolist()


def save_and_load(directory: Path, tied: bool) -> dict[str, Any]:
    """Save from all ranks, read slices back on all ranks; bits must survive both ways."""
    with ParallelGroup(timeout=30) as group:
        stock = small("qwen3", torch.float32, tied=tied)
        model = parallelize(small("qwen3", torch.float32, tied=tied), group)
        model.save_pretrained(directory)
        again = load_parallel(directory, group)
        same = all(
            torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
        )
        stored = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return {
            "slices": same,
            "stock": all(
                torch.equal(value, stored.state_dict()[name])
                for name, value in stock.state_dict().items()
            ),
            "tied": again.lm_head.weight is again.model.embed_tokens.weight,
            "class": type(stored).__name__,
        }


def refused(kind: str, options: dict[str, Any], parallel: dict[str, Any]) -> str:
    """The error that `parallelize` raises; the model must be untouched afterwards."""
    with ParallelGroup(timeout=30) as group:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))
        before = {name: id(module) for name, module in model.named_modules()}
        try:
            parallelize(model, group, **parallel)
        except Exception as error:
            assert before == {name: id(module) for name, module in model.named_modules()}
            return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def write_shards(directory: Path, tied: bool) -> None:
    """A divided model in training, saved by all ranks; and its stock weights given to a divided one."""
    with ParallelGroup(timeout=30) as group:
        model = parallelize(small("qwen3", torch.float32, tied=tied), group, sequence_parallel=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        stock = small("qwen3", torch.float32, tied=tied)
        load_full_state_dict(model, stock.state_dict())
        same = model.full_state_dict()
        assert list(same) == list(stock.state_dict())
        assert all(torch.equal(value, same[name]) for name, value in stock.state_dict().items())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        model(**batch(), use_cache=False).loss.backward()
        finalize_gradients(model)
        optimizer.step()
        save_sharded(directory, model, optimizer)


def read_shards(directory: Path, tied: bool) -> dict[str, Tensor]:
    """The unsplit weights and momenta that any number of ranks reads."""
    with ParallelGroup(timeout=30) as group:
        model = parallelize(small("qwen3", torch.float32, tied=tied), group)
        optimizer = torch.optim.SGD(model.parameters(), lr=9.0, momentum=0.5)
        load_sharded(directory, model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        momenta = {
            f"momentum {name}": place.gather(optimizer.state[parameter]["momentum_buffer"])
            for name, parameter, place in placements(model)
        }
        return model.full_state_dict() | momenta
