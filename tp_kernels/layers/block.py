"""ParallelTransformerBlock: attention, feed-forward, their norms, residuals and dropout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tp_kernels.comm.errors import UnsupportedError
from tp_kernels.comm.group import GroupLike, as_group

from .attention import ParallelAttention
from .dropout import ParallelDropout
from .gradients import backward_dw
from .mlp import NORMS, ParallelMLP, make_norm
from .random import RandomStreams

# A sublayer, more arguments for it, and the norms in front of it and behind it.
Step = tuple[nn.Module, Mapping[str, Any], Any, Any]
POSITIONS = ("pre", "post", "sandwich")
# What is not said twice: the block passes these on to attention and MLP.
SHARED = ("group", "sequence_parallel", "batch_first", "delay_wgrad", "streams", "device", "dtype")


class ParallelTransformerBlock(nn.Module):
    """One layer of a decoder or encoder. With d = dropout, A = attention, M = MLP, N = norms:

        pre        x + d(A(N x)), then x + d(M(N x))                 GPT-2, Llama (Xiong et al., 2020)
        post       N(x + d(A x)), then N(x + d(M x))                 Transformer (Vaswani et al., 2017)
        sandwich   x + d(N A(N x)), then x + d(N M(N x))             Gemma 2
        parallel   x + d(A(n) + M(n)), n = N x                       GPT-J, PaLM; norm_position "pre" only

    and with cross-attention C to a context, x + d(C(N x)) (or as the position says) in between.

    Args:
        hidden_size, num_heads, intermediate_size, num_kv_heads, head_dim: of the unsplit block; any sizes.
        norm: "rms" or "layer": RMSNorm or LayerNorm, with its `epsilon` (None: the default) and
            `zero_centered`.
        norm_position: "pre", "post" or "sandwich".
        parallel: attention and MLP work side by side on one norm.
        dropout: of what is added to the residual. That of attention weights is an option of `attention`.
        attention, mlp: more options of ParallelAttention and ParallelMLP, by name.
        cross_attention: options of a second ParallelAttention, whose keys and values come from `context`
            ({} for none); None: no cross-attention.
        streams: RandomStreams that dropout draws from.
        group, sequence_parallel, batch_first, delay_wgrad, device, dtype: as in ParallelMLP.

    Modules have the names of stock checkpoints: `input_layernorm`, `self_attn`, `post_attention_layernorm`,
    `mlp` (Llama), with `pre_feedforward_layernorm` and `post_feedforward_layernorm` (Gemma 2), and
    `pre_cross_attn_layernorm`, `cross_attn`, `post_cross_attn_layernorm`.

    forward(x, *, rows=None, context=None, cross_attention=None, **attention) -> like x. `rows` is s under
    sequence parallelism; `cross_attention` has more arguments of the cross-attention (attention_mask,
    cache, ...) by name, and the rest goes to self-attention (position_ids, attention_mask, cache, ...).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        intermediate_size: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        norm: str = "rms",
        norm_position: str = "pre",
        epsilon: float | None = None,
        zero_centered: bool = False,
        parallel: bool = False,
        dropout: float = 0.0,
        attention: Mapping[str, Any] | None = None,
        mlp: Mapping[str, Any] | None = None,
        cross_attention: Mapping[str, Any] | None = None,
        streams: RandomStreams | None = None,
        group: GroupLike = None,
        sequence_parallel: bool = False,
        batch_first: bool | None = None,
        delay_wgrad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check(norm, norm_position, parallel, cross_attention, (attention, mlp, cross_attention))
        group = as_group(group)
        layout: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel}
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        options = {
            **layout,
            **placed,
            "batch_first": batch_first,
            "delay_wgrad": delay_wgrad,
            "streams": streams,
        }
        heads = (hidden_size, num_heads, num_kv_heads, head_dim)
        before, after = norm_position != "post", norm_position != "pre"
        self.norm_position, self.parallel = norm_position, parallel

        def make(wanted: bool) -> Any:  # a norm, or None
            if not wanted:
                return None
            return make_norm(norm, hidden_size, epsilon, zero_centered, **layout, **placed)

        self.input_layernorm = make(before)
        self.self_attn = ParallelAttention(*heads, **{**options, **(attention or {})})
        # Llama's name for the norm in front of the MLP is Gemma's for the one behind attention.
        self.post_attention_layernorm = make(not parallel)
        self.pre_cross_attn_layernorm = self.post_cross_attn_layernorm = None
        self.cross_attn: ParallelAttention | None = None
        if cross_attention is not None:
            whole = {"context_size": hidden_size, "causal": False, "rotary": None}
            self.pre_cross_attn_layernorm = make(before)
            self.cross_attn = ParallelAttention(*heads, **{**options, **whole, **cross_attention})
            self.post_cross_attn_layernorm = make(after)
        self.pre_feedforward_layernorm = make(norm_position == "sandwich")
        self.mlp = ParallelMLP(hidden_size, intermediate_size, **{**options, **(mlp or {})})
        self.post_feedforward_layernorm = make(after)
        self.dropout = ParallelDropout(dropout, batch_first=batch_first, streams=streams, **layout)

    def forward(
        self,
        x: Tensor,
        *,
        rows: int | None = None,
        context: Tensor | None = None,
        cross_attention: Mapping[str, Any] | None = None,
        **attention: Any,
    ) -> Tensor:
        cross = {"context": context, **(cross_attention or {})}
        if self.cross_attn is None and (context is not None or cross_attention is not None):
            raise UnsupportedError(
                "ParallelTransformerBlock: a context, but no cross-attention; build the block with "
                "cross_attention={}"
            )
        if self.cross_attn is not None and context is None and cross.get("cache") is None:
            raise UnsupportedError(
                "ParallelTransformerBlock: cross-attention needs context=, or the cache that holds it: "
                'cross_attention={"cache": ...}'
            )
        if self.parallel:
            y = self.input_layernorm(x)
            y = self.self_attn(y, rows=rows, **attention) + self.mlp(y, rows=rows)
            return self.dropout(y, residual=x, rows=rows)
        steps: list[Step] = [(self.self_attn, attention, *self._norms("attention"))]
        if self.cross_attn is not None:
            steps.append((self.cross_attn, cross, *self._norms("cross_attn")))
        steps.append((self.mlp, {}, *self._norms("feedforward")))
        return self._run(x, steps, rows)

    def _norms(self, sublayer: str) -> tuple[Any, Any]:
        """The norms in front of and behind a sublayer."""
        if sublayer == "cross_attn":
            return self.pre_cross_attn_layernorm, self.post_cross_attn_layernorm
        pre = self.norm_position == "pre"
        if sublayer == "attention":
            return self.input_layernorm, None if pre else self.post_attention_layernorm
        before = self.post_attention_layernorm if pre else self.pre_feedforward_layernorm
        return before, self.post_feedforward_layernorm

    def _run(self, x: Tensor, steps: Sequence[Step], rows: int | None) -> Tensor:
        """The sublayers in turn; what one adds waits for the norm that the addition can be fused with."""
        y: Tensor | None = None
        for sublayer, given, before, after in steps:
            if before is None:
                x, _ = self._add_norm(sublayer(x, rows=rows, **given), x, after, rows)
                continue
            if y is None:
                y = before(x)
            else:
                y, x = self._add_norm(y, x, before, rows)
            y = sublayer(y, rows=rows, **given)
            y = y if after is None else after(y)
        return x if y is None else self.dropout(y, residual=x, rows=rows)

    def _add_norm(
        self, y: Tensor, x: Tensor, norm: nn.Module, rows: int | None
    ) -> tuple[Tensor, Tensor]:
        """(norm(s), s) of s = x + dropout(y); one step where nothing is dropped."""
        if self.training and self.dropout.p > 0:
            total = self.dropout(y, residual=x, rows=rows)
            return norm(total), total
        return norm(y, residual=x)

    def backward_dw(self) -> None:
        """Compute what `delay_wgrad=True` has left of the oldest backward pass; see gradients.backward_dw."""
        backward_dw(self)

    def extra_repr(self) -> str:
        return "parallel" if self.parallel else f"norm_position={self.norm_position}"


def _check(
    norm: str,
    norm_position: str,
    parallel: bool,
    cross_attention: Mapping[str, Any] | None,
    options: Sequence[Mapping[str, Any] | None],
) -> None:
    """Refuse what has no meaning, before anything is built."""
    if norm not in NORMS:
        raise UnsupportedError(
            f"ParallelTransformerBlock: norm={norm!r}; known are {', '.join(NORMS)}"
        )
    if norm_position not in POSITIONS:
        raise UnsupportedError(
            f"ParallelTransformerBlock: norm_position={norm_position!r}; known are {', '.join(POSITIONS)}"
        )
    if parallel and (norm_position != "pre" or cross_attention is not None):
        raise UnsupportedError(
            "ParallelTransformerBlock: parallel=True has one norm in front of attention and MLP: "
            "norm_position='pre' and no cross-attention"
        )
    for given in options:
        twice = [name for name in SHARED if name in (given or {})]
        if twice:
            raise UnsupportedError(
                f"ParallelTransformerBlock: {', '.join(twice)} for a part of the block; pass it to the block"
            )
