"""Forwards of Llama-shaped blocks over this rank's part, mixed into the stock classes.

Masks, rotary embedding, caches and attention back ends remain those of transformers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tp_kernels.comm.group import ParallelGroup
from tp_kernels.layers.linear import column_parallel
from tp_kernels.ops import gather_rows, scatter_rows
from tp_kernels.ops.elementwise import rms_norm, rotary, swiglu

SILU = (nn.SiLU, type(ACT2FN["silu"]))


class SequenceLayout:
    """Rows of batch x sequence, divided over ranks between the first layer and the last norm."""

    def __init__(self, group: ParallelGroup) -> None:
        self.group = group
        self.batch = self.length = 0

    @property
    def rows(self) -> int:
        return self.batch * self.length

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """[b, s, H] -> [1, this rank's rows of b * s, H], before the first layer."""
        if args:
            hidden, *rest = args
        else:
            hidden, rest = kwargs.pop("hidden_states"), []
        self.batch, self.length = hidden.shape[:2]
        mine = scatter_rows(hidden.flatten(0, 1), group=self.group)
        return (mine.unsqueeze(0), *rest), kwargs

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """[1, this rank's rows, H] -> [b, s, H], after the last norm."""
        whole = gather_rows(output.squeeze(0), group=self.group, rows=self.rows)
        return whole.unflatten(0, (self.batch, self.length))


class ParallelLlamaAttention:
    """Forward of a Llama-shaped attention over this rank's heads."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cache = kwargs.pop("past_key_values", cache)  # its name in earlier transformers 5 releases
        layout: SequenceLayout | None = self.sequence_layout
        columns = [self.q_proj, self.k_proj, self.v_proj]
        if layout is None:
            q, k, v = column_parallel(hidden_states, columns)
        else:
            q, k, v = column_parallel(hidden_states.squeeze(0), columns, layout.rows)
            q, k, v = (y.unflatten(0, (layout.batch, layout.length)) for y in (q, k, v))
        batch, length = q.shape[:2]
        q = q.view(batch, length, -1, self.head_dim)
        k = k.view(batch, length, -1, self.head_dim)
        v = v.view(batch, length, -1, self.head_dim).transpose(1, 2)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        if position_embeddings is None:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        else:
            q, k = rotary(q, *position_embeddings), rotary(k, *position_embeddings)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        if self.places is not None:
            q = q.index_select(1, self.places)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, self.eager_attention
        )
        y, weights = attend(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.attention_window,
            **kwargs,
        )
        if self.places is not None:
            y = y.index_select(2, self.place_of_query)
            weights = None if weights is None else weights.index_select(1, self.place_of_query)
        y = y.reshape(batch, length, -1)
        if layout is None:
            return self.o_proj(y), weights
        return self.o_proj(y.flatten(0, 1)).unsqueeze(0), weights


class FusedLlamaNorm:
    """RMS norm of the stock module's weight and epsilon as one operation."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def activate_gated(activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    """activation(gate) * up."""
    return swiglu(gate, up) if isinstance(activation, SILU) else activation(gate) * up


class ParallelLlamaMLP:
    """Forward of a gated MLP over this rank's intermediate features."""

    def forward(self: Any, x: Tensor) -> Tensor:
        layout: SequenceLayout | None = self.sequence_layout
        columns = [self.gate_proj, self.up_proj]
        if layout is None:
            gate, up = column_parallel(x, columns)
            return self.down_proj(activate_gated(self.act_fn, gate, up))
        gate, up = column_parallel(x.squeeze(0), columns, layout.rows)
        return self.down_proj(activate_gated(self.act_fn, gate, up)).unsqueeze(0)
