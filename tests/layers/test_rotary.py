"""Angles against the functions of transformers, which models in use were trained with."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tp_kernels.comm import ShapeError, UnsupportedError
from tp_kernels.layers import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RotaryEmbedding,
    RotaryOptions,
    YarnScaling,
)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": YARN,
    "yarn_not_truncated": YARN | {"truncate": False},
    "yarn_betas": YARN | {"beta_fast": 16, "beta_slow": 2},
    "yarn_attention_factor": YARN | {"attention_factor": 1.25},
    "yarn_mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn_one_mscale": YARN | {"mscale": 0.7},
    "yarn_shrinks": YARN | {"factor": 0.5},
}


def theirs(parameters: dict[str, Any], head_dim: int, seq_len: int | None) -> tuple[Any, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=100,
        rope_parameters=dict(parameters),
    )
    if parameters["rope_type"] == "default":
        module = LlamaRotaryEmbedding(config)
        return module.inv_freq, module.attention_scaling
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, None, seq_len=seq_len)


@pytest.mark.parametrize("head_dim", [32, 6])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", PARAMETERS)
def test_frequencies_are_those_of_transformers(name, theta, head_dim):
    parameters = PARAMETERS[name] | {"rope_theta": theta}
    ours = RotaryEmbedding(head_dim, RotaryOptions.from_config(parameters, head_dim, 100))
    for length in (7, 100, 101, 257):
        frequency, amplitude = ours.frequencies(torch.arange(length))
        wanted, factor = theirs(parameters, head_dim, length)
        torch.testing.assert_close(frequency, wanted, rtol=3e-6, atol=0)
        assert amplitude == pytest.approx(factor, rel=1e-12)
        cos, sin = ours(torch.arange(length))
        angle = torch.arange(length)[:, None].float() * frequency
        assert cos.dtype == sin.dtype == torch.float32
        torch.testing.assert_close(cos, (angle.cos() * factor)[None])
        torch.testing.assert_close(sin, (angle.sin() * factor)[None])


def test_options_of_a_config():
    def read(**parameters: Any) -> RotaryOptions:
        return RotaryOptions.from_config(parameters, 10, 100)

    assert read(rope_theta=3.0) == RotaryOptions(3.0)
    assert read(rope_theta=3.0, partial_rotary_factor=0.5) == RotaryOptions(3.0, dim=5)
    assert read(rope_theta=3.0, partial_rotary_factor=1.0) == RotaryOptions(3.0)
    assert read(type="linear", factor=2.0).scaling == LinearScaling(2.0)
    assert read(type="dynamic", factor=2.0).scaling == DynamicScaling(2.0, 100)
    assert read(**YARN).scaling == YarnScaling(4.0, 64)
    assert read(**YARN | {"factor": None}).scaling == YarnScaling(100 / 64, 64)
    assert read(**PARAMETERS["llama3"]).scaling == Llama3Scaling(8.0, 1.0, 4.0, 64)
    with pytest.raises(UnsupportedError, match="longrope"):
        read(rope_type="longrope", factor=2.0)
    with pytest.raises(UnsupportedError, match="surprise"):
        read(rope_type="linear", factor=2.0, surprise=1)
    with pytest.raises(UnsupportedError, match="factor"):
        read(rope_type="linear")
    with pytest.raises(UnsupportedError, match="trained_length"):
        RotaryOptions.from_config({"rope_type": "dynamic", "factor": 2.0}, 10)


def test_lengths_of_packed_texts():
    """Each text's base grows with its own length, as if it were alone."""
    rotary = RotaryEmbedding(8, RotaryOptions(scaling=DynamicScaling(2.0, 4)))
    positions = torch.cat((torch.arange(9), torch.arange(3), torch.arange(6)))
    lengths = torch.tensor([9] * 9 + [3] * 3 + [6] * 6)
    packed = torch.stack(rotary(positions, lengths))
    alone = torch.cat([torch.stack(rotary(torch.arange(n))) for n in (9, 3, 6)], dim=2)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-7)
    assert (packed - torch.stack(rotary(positions))).abs().max() > 1e-2


def test_far_positions_and_batches():
    """Tables of any position ids; a fp32 angle has an error of the position times 6e-8."""
    ids = torch.tensor([[0, 5, 70000], [3, 2, 1]])
    cos, sin = RotaryEmbedding(4, RotaryOptions(100.0))(ids)
    assert cos.shape == sin.shape == (2, 3, 2)
    exact = ids[..., None].double() * torch.tensor([1.0, 0.1], dtype=torch.float64)
    bound = 1.2e-7 + exact * 1.2e-7
    assert ((cos - exact.cos()).abs() <= bound).all()
    assert ((sin - exact.sin()).abs() <= bound).all()
    assert math.isclose(float(sin[1, 0, 0]), math.sin(3), rel_tol=1e-6)


@pytest.mark.parametrize("dim", [0, 3, 8, -2])
def test_refused_widths(dim):
    with pytest.raises(ShapeError, match="even number of features"):
        RotaryEmbedding(6, RotaryOptions(dim=dim))


def test_refused_scaling():
    with pytest.raises(ShapeError, match="at least 4"):
        RotaryEmbedding(6, RotaryOptions(dim=2, scaling=DynamicScaling(2.0, 8)))
    for theta in (0.0, -1.0, math.inf):
        with pytest.raises(UnsupportedError, match="theta"):
            RotaryOptions(theta)
    for factor in (0.0, -1.0):
        for make in (LinearScaling, lambda f: DynamicScaling(f, 9), lambda f: YarnScaling(f, 9)):
            with pytest.raises(UnsupportedError, match="factor"):
                make(factor)
    with pytest.raises(UnsupportedError, match="trained_length"):
        DynamicScaling(2.0, 0)
    with pytest.raises(UnsupportedError, match="high_freq_factor"):
        Llama3Scaling(8.0, 4.0, 4.0, 9)
