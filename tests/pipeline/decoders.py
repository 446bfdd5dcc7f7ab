"""What ranks do in the tests of pipelined decoding."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tp_kernels.comm import ParallelGroup
from tp_kernels.pipeline import PipelineCommunicator
from tp_kernels.pipeline.causal_lm import split_layers
from tp_kernels.pipeline.decode import PipelinedDecoder

SIZES = {
    "llama": {"num_key_value_heads": 2, "head_dim": 8},
    "gpt2": {},
}


def tiny(kind: str, layers: int = 4, **changes: Any) -> PreTrainedModel:
    """A random model whose tokens depend on everything before them; the same in every process."""
    sizes = {
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 70,
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind == "gpt2":
        sizes["n_inner"] = sizes.pop("intermediate_size")
    config = AutoConfig.for_model(kind, **(sizes | SIZES.get(kind, {}) | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=draw) * 0.2
            parameter.copy_(values + (parameter.dim() == 1))
    return model.eval()


def prompts(count: int) -> list[list[int]]:
    """Of 1 to 9 tokens."""
    draw = torch.Generator().manual_seed(5)
    lengths = [1 + (3 * number) % 9 for number in range(count)]
    return [torch.randint(3, 101, (n,), generator=draw).tolist() for n in lengths]


def stock(model: PreTrainedModel, prompt: list[int], new: int, eos: int | None) -> list[int]:
    """Greedy tokens of one process."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=eos,
        )
    return out[0, len(prompt) :].tolist()


def answers(cases: list[dict[str, Any]]) -> list[Any]:
    """The tokens of every case, on this rank."""
    results = []
    with ParallelGroup(timeout=30) as group, PipelineCommunicator(group, ring=True) as channel:
        for case in cases:
            model = tiny(case["kind"], **case.get("changes", {}))
            cut = case.get("cut", group.size)
            stage = split_layers(model, cut)[group.rank]
            decoder = PipelinedDecoder(stage, channel, **case.get("decoder", {}))
            first = group.rank == 0
            results.append(
                decoder.generate(
                    iter(prompts(case["prompts"])) if first else (),
                    case["new"] if first else 1,
                    **(case.get("options", {}) if first else {}),
                )
            )
    return results
