"""ParallelAttention in place of the attention of published models, with their weights under their names.

What transformers computes is the reference: it fixes conventions that a formula leaves open (which pairs are
turned, which rows are packed where, what the cap and the sinks come before).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tp_kernels.comm import ParallelGroup
from tp_kernels.layers import ParallelAttention, RotaryOptions, YarnScaling, placements

HEADS, KV, WIDTH, HIDDEN, LENGTH = 4, 2, 6, 24, 9
NAMES = {"query_key_value": "qkv_proj", "dense": "o_proj"}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": "rms", "qk_norm_epsilon": 0.1, "rotary": RotaryOptions(1e6)},
    "gemma2": {"softcap": 3.0, "scale": 5**-0.5, "sliding_window": 4},
    "gemma3_text": {"qk_norm": "rms_zero_centered", "scale": 5**-0.5, "sliding_window": 4},
    "gpt_oss": {
        "sinks": True,
        "qkv_bias": True,
        "output_bias": True,
        "sliding_window": 4,
        "rotary": RotaryOptions(150000.0, scaling=YarnScaling(32.0, 4096, truncate=False)),
    },
    "phi3": {"fused": True, "layout": "blocks"},
    "gpt_neox": {
        "fused": True,
        "layout": "groups",
        "qkv_bias": True,
        "output_bias": True,
        "rotary": RotaryOptions(dim=2),
    },
    "glm": {"rotary": RotaryOptions(interleaved=True, dim=4)},
}


def reference(model: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """State of the attention, input and output of the stock module in float64 (some of it in fp32)."""
    import transformers

    config = transformers.AutoConfig.for_model(
        model,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        head_dim=WIDTH,
        num_hidden_layers=1,
        intermediate_size=8,
        vocab_size=16,
        max_position_embeddings=131072 if model == "gpt_oss" else 64,
        attn_implementation="eager",
        pad_token_id=0,
        **{
            "qwen3": {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "rms_norm_eps": 0.1,
            },
            "gemma2": {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 5},
            "gemma3_text": {"query_pre_attn_scalar": 5},
            "glm": {
                "attention_bias": False,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.7,
                },
            },
        }.get(model, {}),
    )
    if MODELS[model].get("sliding_window"):
        config.layer_types = ["sliding_attention"]
    torch.manual_seed(2)
    stock = transformers.AutoModel.from_config(config).double()
    layer = stock.layers[0]
    attention = layer.attention if model == "gpt_neox" else layer.self_attn
    for parameter in attention.parameters():
        parameter.data.normal_().div_(3)
    x = torch.randn(2, LENGTH, HIDDEN, dtype=torch.float64)
    kind = {"layer_type": "sliding_attention"} if model == "gemma3_text" else {}
    tables = stock.rotary_emb(x, torch.arange(LENGTH)[None], **kind)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    hidden = (distance < 0) | (distance >= MODELS[model].get("sliding_window", LENGTH))
    mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.float64).masked_fill(hidden, -1e300)
    with torch.no_grad():
        y = attention(x, position_embeddings=tables, attention_mask=mask)[0]
    state = {
        ".".join(NAMES.get(part, part) for part in name.split(".")): tensor
        for name, tensor in attention.state_dict().items()
    }
    return state, x, y


def place_of(model: str, state: dict[str, Tensor], x: Tensor) -> Tensor:
    kv = None if model == "gpt_neox" else KV
    with ParallelGroup(provider="none", timeout=60) as group, torch.no_grad():
        layer = ParallelAttention(
            HIDDEN, HEADS, kv, WIDTH, group=group, dtype=torch.float64, **MODELS[model]
        )
        assert state.keys() == layer.state_dict().keys()
        for name, parameter, placement in placements(layer):
            parameter.copy_(placement.slice(state[name]))
        return layer(x)


@pytest.mark.parametrize("model", MODELS)
def test_attention_of(world, model):
    """fp32 tables (and in some models an fp32 softmax) leave errors of 1e-7 times a few."""
    state, x, y = reference(model)
    for size in (1, 3):
        for ours in world(size).run(place_of, model, state, x):
            torch.testing.assert_close(ours, y, rtol=0, atol=2e-6 * float(y.abs().max()))
