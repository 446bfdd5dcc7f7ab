"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864): its angles, and their scaling to long texts.

Tables are fp32 whatever the dtype of the model and are made anew on every call: a buffer of frequencies
would be rounded by `model.to(bfloat16)` and left empty by construction on the meta device.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tp_kernels.comm.errors import ShapeError, UnsupportedError


@dataclass(frozen=True)
class _Scaling:
    """Of every kind: all numbers are positive."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not isinstance(value, bool) and not 0 < value < math.inf:
                raise UnsupportedError(
                    f"{type(self).__name__}: {field.name}={value} must be positive"
                )


@dataclass(frozen=True)
class LinearScaling(_Scaling):
    """Positions divided by `factor` (Chen et al., 2023, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling(_Scaling):
    """A base that grows with the text beyond `trained_length` ("dynamic NTK"): with L its length,

    theta' = theta * (factor * L / trained_length - (factor - 1)) ^ (R / (R - 2)).
    L is the largest position + 1 of the call (of the packed sequence), as in transformers. Keys in a cache
    keep the angles that they were given.
    """

    factor: float
    trained_length: int


@dataclass(frozen=True)
class YarnScaling(_Scaling):
    """YaRN (Peng et al., 2023, arXiv:2309.00071): slow pairs interpolated, cos and sin scaled.

    Attributes:
        factor, trained_length: the text may be `factor` times as long as in training.
        beta_fast, beta_slow: turns within the trained length above which a pair is kept, below which it is
            interpolated; linear between.
        attention_factor: of cos and sin; None: 0.1 ln(factor) + 1, or with `mscale` and `mscale_all_dim` the
            ratio of 0.1 m ln(factor) + 1 of the two (DeepSeek-V2's configuration).
        truncate: bounds of the ramp rounded outwards to whole pairs (gpt-oss does not).
    """

    factor: float
    trained_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class Llama3Scaling(_Scaling):
    """Llama 3.1's: pairs with wavelengths above trained_length / low_freq_factor are interpolated, below

    trained_length / high_freq_factor kept, and between them mixed (config.json of the published models).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    trained_length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high_freq_factor <= self.low_freq_factor:
            raise UnsupportedError(
                f"Llama3Scaling: high_freq_factor={self.high_freq_factor} must be more than "
                f"low_freq_factor={self.low_freq_factor}"
            )


Scaling: TypeAlias = "LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling"
_KINDS: dict[str, type[Any]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "yarn": YarnScaling,
    "llama3": Llama3Scaling,
}


@dataclass(frozen=True)
class RotaryOptions:
    """What turns queries and keys.

    Attributes:
        theta: base of the frequencies theta^(-2i/R).
        interleaved: turn the pairs (2i, 2i + 1), as GPT-J, GLM and the paper, instead of (i, i + R/2), as
            Llama and GPT-NeoX. Weights made for one give wrong numbers with the other.
        dim: R, the leading features of a head that are turned; None for all of them.
        scaling: LinearScaling, DynamicScaling, YarnScaling or Llama3Scaling; None for none.
    """

    theta: float = 10000.0
    interleaved: bool = False
    dim: int | None = None
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        if not 0 < self.theta < math.inf:
            raise UnsupportedError(f"RotaryOptions: theta={self.theta} must be positive and finite")

    @classmethod
    def from_config(
        cls,
        rope_parameters: dict[str, Any],
        head_dim: int,
        max_position_embeddings: int | None = None,
        *,
        interleaved: bool = False,
    ) -> RotaryOptions:
        """From `rope_parameters` (or `rope_scaling` with rope_theta) of a Hugging Face config."""
        given = dict(rope_parameters)
        kind = given.pop("rope_type", given.pop("type", "default"))
        theta = given.pop("rope_theta", 10000.0)
        dim = int(head_dim * given.pop("partial_rotary_factor", 1.0))
        trained = given.pop("original_max_position_embeddings", max_position_embeddings)
        if kind == "dynamic":  # the published formula knows the configured maximum only
            trained = max_position_embeddings or trained
        scaling: Scaling | None = None
        if kind != "default":
            if kind not in _KINDS:
                raise UnsupportedError(
                    f"rope_type={kind!r}; known are default, {', '.join(_KINDS)}; pass tables of your own "
                    "with forward(rotary=)"
                )
            wanted = {field.name for field in fields(_KINDS[kind])}
            known = {name: given.pop(name) for name in wanted & set(given)}
            if "trained_length" in wanted:
                known["trained_length"] = trained
            if kind == "yarn" and known.get("factor") is None and max_position_embeddings:
                known["factor"] = max_position_embeddings / trained
            known = {name: value for name, value in known.items() if value is not None}
            missing = [
                f.name for f in fields(_KINDS[kind]) if f.default is MISSING and f.name not in known
            ]
            if missing:
                raise UnsupportedError(f"rope_type={kind!r} without {', '.join(missing)}")
            scaling = _KINDS[kind](**known)
        if given:
            raise UnsupportedError(f"rope_type={kind!r} with unknown {sorted(given)}")
        return cls(theta, interleaved, None if dim == head_dim else dim, scaling)


class RotaryEmbedding:
    """Tables of angles for heads of `head_dim` features.

    Calling it with position_ids [s] or [b, s] returns cos and sin, fp32 [1 or b, s, R/2]. `lengths`, which
    broadcasts to position_ids, is the length of each token's text where one call holds several; only
    DynamicScaling reads it.
    """

    def __init__(self, head_dim: int, options: RotaryOptions = RotaryOptions()) -> None:
        dim = head_dim if options.dim is None else options.dim
        if dim % 2 or not 0 < dim <= head_dim:
            raise ShapeError(
                f"rotary embedding turns an even number of features, at most head_dim={head_dim}, not {dim}"
            )
        if isinstance(options.scaling, DynamicScaling) and dim < 4:
            raise ShapeError(f"DynamicScaling needs at least 4 turned features, not {dim}")
        self.options, self.dim = options, dim

    def __call__(
        self, position_ids: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if position_ids.dim() == 1:
            position_ids = position_ids.unsqueeze(0)
        frequency, amplitude = self.frequencies(position_ids, lengths)
        angle = position_ids.to(torch.float32).unsqueeze(-1) * frequency
        return angle.cos() * amplitude, angle.sin() * amplitude

    def frequencies(
        self, position_ids: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, float]:
        """Angle per position of each pair, fp32 [R/2] (or [..., R/2] by length); factor of cos, sin."""
        theta, scaling = self.options.theta, self.options.scaling
        exponent = (
            torch.arange(0, self.dim, 2, device=position_ids.device, dtype=torch.float32) / self.dim
        )
        if isinstance(scaling, DynamicScaling):
            if lengths is None:  # not as a number, which would wait for the device
                lengths = (
                    position_ids.max() + 1 if position_ids.numel() else position_ids.new_ones(())
                )
            trained = scaling.trained_length
            stretch = scaling.factor * lengths.clamp(min=trained) / trained - (scaling.factor - 1)
            base = theta * stretch.to(torch.float32) ** (self.dim / (self.dim - 2))
            return 1.0 / base.unsqueeze(-1) ** exponent, 1.0
        frequency = 1.0 / theta**exponent
        if isinstance(scaling, LinearScaling):
            return frequency / scaling.factor, 1.0
        if isinstance(scaling, Llama3Scaling):
            return _llama3(frequency, scaling), 1.0
        if isinstance(scaling, YarnScaling):
            return _yarn(frequency, theta, scaling), _yarn_amplitude(scaling)
        return frequency, 1.0


def _llama3(frequency: Tensor, scaling: Llama3Scaling) -> Tensor:
    # turns within the trained length, as a place between the two factors
    turns = scaling.trained_length * frequency / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * frequency / scaling.factor + keep * frequency


def _yarn(frequency: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Section 3.2 of the paper; the ramp runs over pairs, linear in their index."""
    dim = 2 * frequency.shape[0]

    def pair_with(turns: float) -> float:
        """Index of the pair that makes this many turns within the trained length."""
        return (
            dim * math.log(scaling.trained_length / (turns * 2 * math.pi)) / (2 * math.log(theta))
        )

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    index = torch.arange(dim // 2, device=frequency.device, dtype=torch.float32)
    interpolate = ((index - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return interpolate * frequency / scaling.factor + (1 - interpolate) * frequency


def _yarn_amplitude(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def amplitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return amplitude(scaling.mscale) / amplitude(scaling.mscale_all_dim)
    return amplitude(1.0)
