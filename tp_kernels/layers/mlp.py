"""ParallelMLP: the feed-forward block, widened by column and narrowed by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tp_kernels.comm.errors import UnsupportedError
from tp_kernels.comm.group import GroupLike, as_group
from tp_kernels.ops import gated as gated_product
from tp_kernels.ops._op import ACTIVATIONS, activate

from .dropout import ParallelDropout
from .gradients import backward_dw
from .linear import ColumnParallelLinear, RowParallelLinear, column_parallel, even_ranges
from .norm import LayerNorm, RMSNorm
from .placement import Ranges
from .random import RandomStreams

# Names of gated activations and the function of the gate (Shazeer, 2020).
GATED = {"swiglu": "silu", "geglu": "gelu"}
NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}


class ParallelMLP(nn.Module):
    """y = dropout((act(n W_gate^T) * (n W_up^T)) W_down^T), without a gate dropout(act(n W_up^T) W_down^T).

    n is x, or norm(x).

    Args:
        hidden_size, intermediate_size: of the unsplit block; any sizes on any number of ranks.
        activation: "gelu", "gelu_tanh", "silu", "relu" or "relu2"; "swiglu" is gated silu and "geglu" gated
            gelu (Shazeer, 2020).
        gated: with a gate projection. None: for "silu" (Llama), "swiglu", "geglu" and packed projections, not
            for the others (GPT-2).
        bias: on the gate and up projections.
        output_bias: on the down projection, added once; None: as bias.
        packed: gate and up in one parameter `gate_up_proj` [2 I, H]: "blocks", first all rows of the gate
            (Phi-3), or "interleaved", a row of the gate and one of up in turn (gpt-oss). None: `gate_proj`
            and `up_proj` (Llama), which share one gather and one reduction all the same.
        norm: "rms" or "layer" in front: RMSNorm or LayerNorm, with its `epsilon` (None: the default) and
            `zero_centered`.
        dropout: of the output, with masks that do not depend on the world size.
        streams: RandomStreams that dropout draws from.
        sequence_parallel: input and output are this rank's rows, in dimension 0, or 1 if batch_first.
        batch_first: x is [b, s, H] rather than [s, b, H]; None: not under sequence parallelism.
        delay_wgrad: backward leaves the gradients of weights to `backward_dw()`.

    forward(x [..., H], rows=None, residual=None) -> [..., H]; rows is s under sequence parallelism, default
    s_r * W. With a norm and a residual [..., H], (y, s): s = x + residual goes through the norm.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        gated: bool | None = None,
        bias: bool = False,
        output_bias: bool | None = None,
        packed: str | None = None,
        norm: str | None = None,
        epsilon: float | None = None,
        zero_centered: bool = False,
        dropout: float = 0.0,
        streams: RandomStreams | None = None,
        group: GroupLike = None,
        sequence_parallel: bool = False,
        batch_first: bool | None = None,
        delay_wgrad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        group = as_group(group)
        if gated is None:
            gated = packed is not None or activation in ("silu", *GATED)
        self.activation, self.packed = _checked(activation, gated, packed), packed
        layout: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel}
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        options = {**layout, **placed, "batch_first": batch_first, "delay_wgrad": delay_wgrad}
        self.norm = make_norm(norm, hidden_size, epsilon, zero_centered, **layout, **placed)
        self.gate_proj = self.up_proj = self.gate_up_proj = None
        if packed is not None:
            ranges = packed_ranges(even_ranges(intermediate_size, group.size), packed)
            self.gate_up_proj = ColumnParallelLinear(
                hidden_size, 2 * intermediate_size, bias, ranges=ranges, **options
            )
        else:
            if gated:
                self.gate_proj = ColumnParallelLinear(
                    hidden_size, intermediate_size, bias, **options
                )
            self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias, **options)
        output_bias = bias if output_bias is None else output_bias
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, output_bias, **options)
        self.dropout = ParallelDropout(dropout, batch_first=batch_first, streams=streams, **layout)

    def forward(
        self, x: Tensor, rows: int | None = None, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return self._output(x if self.norm is None else self.norm(x), rows)
        if self.norm is None:
            raise UnsupportedError(
                "ParallelMLP: residual= goes through the norm in front, and there is none; use norm=, "
                "or add it to the output"
            )
        x, total = self.norm(x, residual)
        return self._output(x, rows), total

    def backward_dw(self) -> None:
        """Compute what `delay_wgrad=True` has left of the oldest backward pass; see gradients.backward_dw."""
        backward_dw(self)

    def _opening(self) -> list[ColumnParallelLinear]:
        layers = (self.gate_up_proj, self.gate_proj, self.up_proj)
        return [layer for layer in layers if layer is not None]

    def _output(self, x: Tensor, rows: int | None) -> Tensor:
        opened: Sequence[Tensor] = column_parallel(x, self._opening(), rows)
        if self.packed == "blocks":
            opened = opened[0].chunk(2, dim=-1)
        elif self.packed == "interleaved":
            opened = opened[0].unflatten(-1, (-1, 2)).unbind(-1)
        if len(opened) == 1:
            inner = activate(opened[0], self.activation)
        else:
            gate, up = opened
            inner = gated_product(gate, up, self.activation)
        return self.dropout(self.down_proj(inner), rows=rows)

    def extra_repr(self) -> str:
        return f"activation={self.activation}" + (f", packed={self.packed}" if self.packed else "")


def packed_ranges(parts: Sequence[tuple[int, int]], packed: str) -> Ranges:
    """What each rank holds of a packed gate and up projection, of features [start, stop) of both."""
    if packed == "interleaved":
        return [(2 * start, 2 * stop) for start, stop in parts]
    total = parts[-1][1]
    return [((start, stop), (total + start, total + stop)) for start, stop in parts]


def make_norm(
    kind: str | None, hidden_size: int, epsilon: float | None, zero_centered: bool, **options: Any
) -> Any:
    """The norm of this name; None for None, which has no options."""
    if kind is None:
        for name, given in (("epsilon", epsilon is not None), ("zero_centered", zero_centered)):
            if given:
                raise UnsupportedError(f"{name}= without norm= would have no effect")
        return None
    if kind not in NORMS:
        raise UnsupportedError(f"norm={kind!r}; known are {', '.join(NORMS)}")
    if epsilon is not None:
        options["epsilon"] = epsilon
    return NORMS[kind](hidden_size, zero_centered=zero_centered, **options)


def _checked(activation: str, gated: bool, packed: str | None) -> str:
    """The function itself, after a look at options that have to agree."""
    known = [str(name) for name in (*ACTIVATIONS, *GATED) if name]
    if activation not in known:
        raise UnsupportedError(
            f"ParallelMLP: activation={activation!r}; known are {', '.join(known)}"
        )
    if activation in GATED and not gated:
        raise UnsupportedError(
            f"ParallelMLP: activation={activation!r} with gated=False; it is {GATED[activation]!r} "
            "with a gate"
        )
    if packed not in (None, "blocks", "interleaved"):
        raise UnsupportedError(f"ParallelMLP: packed={packed!r}; 'blocks', 'interleaved' or None")
    if packed is not None and not gated:
        raise UnsupportedError(f"ParallelMLP: packed={packed!r} with gated=False: nothing to pack")
    return GATED.get(activation, activation)
