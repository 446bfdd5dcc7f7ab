"""ParallelAttention: attention divided by heads, with what published models do to it.

Multi-head, grouped-query and multi-query; self- and cross-attention; training, generation and packed texts.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.group import GroupLike, as_group
from tp_kernels.ops.regions import copy_to_ranks
from tp_kernels.ops.rotary import apply_rotary

from ._attend import CHUNK, AttentionOptions, attend, local_mask, needs_scores
from .heads import partition_heads
from .kv_cache import KVCache
from .linear import RowParallelLinear
from .norm import RMSNorm
from .placement import ParamPlacement, place
from .qkv import QKVParallelLinear, feature_ranges
from .random import RandomStreams, draw_key
from .rotary import RotaryEmbedding, RotaryOptions


class ParallelAttention(QKVParallelLinear):
    """Attention with this rank's heads; the output projection completes the sum over ranks.

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim: of the unsplit layer. Any number of query heads on
            any number of ranks up to it; KV heads fewer than ranks are held by several.
        qkv_bias, output_bias: biases of the projections.
        fused, layout: one parameter `qkv_proj` in the layout "blocks" or "groups"; see QKVParallelLinear.
        causal: each token sees itself and those before it.
        sliding_window: with causal, each token sees this many tokens, itself included; without, those at
            most so far away on both sides (transformers' bounds). None for all.
        rotary: RotaryOptions; None for none.
        qk_norm: "rms" for an RMSNorm of each head of queries and keys, before they are turned (Qwen3):
            parameters `q_norm.weight`, `k_norm.weight` [D]. "rms_zero_centered" scales by 1 + weight
            (Gemma 3). None for none.
        qk_norm_epsilon: theirs; None: RMSNorm's default.
        alibi: -slope * distance added to the scores (Press et al., 2022), slopes of the unsplit heads.
        softcap: scores become softcap * tanh(scores / softcap), before masks (Gemma 2).
        sinks: a learned logit per head that takes its share of the softmax (gpt-oss): `sinks` [heads].
        scale: of the scores; None: 1 / sqrt(D).
        dropout: of the softmax, in training; the mask does not depend on the world size.
        streams: RandomStreams that dropout draws from; see ParallelDropout.
        context_size: keys and values are made from `context` with so many features: cross-attention, with
            causal=False and rotary=None.
        sequence_parallel: x, the context and the result are this rank's part of the sequence.
        batch_first: x, context and result are [b, s, H], or [s, b, H]; None: [b, s, H] without, [s, b, H]
            with sequence parallelism.
        delay_wgrad: backward leaves the gradients of weights to `backward_dw()`.

    forward(x, *, rows, position_ids, attention_mask, cache, context, context_rows, cu_seqlens, rotary):
        rows, context_rows: unsplit lengths under sequence parallelism; default s_r * W.
        position_ids: int [s] or [b, s], of rotary only; default: counted from the cache's length, or from
            the start of each packed text. Masks, windows and ALiBi go by the place in the sequence.
        attention_mask: bool (True: may see) or numbers to add, broadcastable to [b, heads, s, t], with t all
            tokens so far; its head dimension has 1, this rank's or all heads. The gradient of one with 1
            or all heads is that of the unsplit layer, on every rank. Combined with causal and
            sliding_window. A query that sees nothing gives zeros.
        cache: a KVCache or StaticKVCache, without gradients and not under sequence parallelism. With
            context_size it keeps keys and values of the context, which later calls leave out.
        context: [b, t, C] (or [t, b, C]).
        cu_seqlens: int32 [n + 1], 0 first and s last: texts packed into one sequence (b = 1) that do not see
            each other and whose positions start at 0. Read on the host.
        rotary: (cos, sin) of `self.rotary(position_ids)`, made once for several layers.
    """

    sinks: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        fused: bool = False,
        layout: str = "blocks",
        causal: bool = True,
        sliding_window: int | None = None,
        rotary: RotaryOptions | None = RotaryOptions(),  # noqa: B008  # frozen
        qk_norm: str | None = None,
        qk_norm_epsilon: float | None = None,
        alibi: bool = False,
        softcap: float | None = None,
        sinks: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        streams: RandomStreams | None = None,
        context_size: int | None = None,
        group: GroupLike = None,
        sequence_parallel: bool = False,
        batch_first: bool | None = None,
        delay_wgrad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        group = as_group(group)
        memory: dict[str, Any] = {"device": device, "dtype": dtype}
        linear = {
            **memory,
            "sequence_parallel": sequence_parallel,
            "batch_first": batch_first,
            "delay_wgrad": delay_wgrad,
        }
        super().__init__(
            hidden_size,
            num_heads,
            num_kv_heads,
            head_dim,
            qkv_bias,
            fused=fused,
            layout=layout,
            context_size=context_size,
            group=group,
            **linear,
        )
        self.options = AttentionOptions(causal, sliding_window, alibi, softcap, scale, dropout)
        if rotary is not None and (alibi or context_size is not None):
            other = "alibi=True" if alibi else "context_size"
            raise UnsupportedError(f"{other} with rotary embedding; pass rotary=None")
        if context_size is not None and (causal or sliding_window is not None or alibi):
            raise UnsupportedError(
                "context_size with causal, sliding_window or alibi: tokens of the context have no place "
                "relative to those of x; pass causal=False and an attention_mask"
            )
        if qk_norm not in (None, "rms", "rms_zero_centered"):
            raise UnsupportedError(
                f"qk_norm={qk_norm!r}; 'rms' or 'rms_zero_centered' over each head, or None"
            )
        if qk_norm is None and qk_norm_epsilon is not None:
            raise UnsupportedError(f"qk_norm_epsilon={qk_norm_epsilon} without qk_norm")
        self.streams = streams
        self.rotary = None if rotary is None else RotaryEmbedding(self.head_dim, rotary)
        self.q_norm = self.k_norm = None
        if qk_norm is not None:
            # their gradients are parts, as under sequence parallelism: here each rank has its own heads
            norm: dict[str, Any] = {"group": group, "sequence_parallel": True, **memory}
            norm["zero_centered"] = qk_norm == "rms_zero_centered"
            if qk_norm_epsilon is not None:
                norm["epsilon"] = qk_norm_epsilon
            self.q_norm = RMSNorm(self.head_dim, **norm)
            self.k_norm = RMSNorm(self.head_dim, **norm)
        shards = partition_heads(num_heads, num_kv_heads or num_heads, group.size)
        if sinks:
            by_head = ParamPlacement(group, (num_heads,), 0, tuple(shard.q for shard in shards))
            place(self, "sinks", by_head)
            self.sinks = nn.Parameter(torch.empty(by_head.local_shape(), **memory))
        else:
            self.register_parameter("sinks", None)
        self.o_proj = RowParallelLinear(
            num_heads * self.head_dim,
            hidden_size,
            output_bias,
            group=group,
            ranges=feature_ranges(shards, self.head_dim)[0],
            **linear,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sinks start as a logit of zero; the projections and norms have initialised themselves."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(  # type: ignore[override]  # a block, no longer only its three projections
        self,
        x: Tensor,
        *,
        rows: int | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        context: Tensor | None = None,
        context_rows: int | None = None,
        cu_seqlens: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        self._check(x, position_ids, cache, context, context_rows, cu_seqlens, rotary)
        batch, length = self._sizes(x, rows)
        past = 0 if cache is None else cache.length
        ready = self.context_size is not None and past > 0  # keys and values of the context
        mask = bounds = None
        if attention_mask is not None:
            if cu_seqlens is not None:
                raise UnsupportedError("ParallelAttention: cu_seqlens with an attention_mask")
            total = past if ready else past + length
            total = total if context is None else self._sizes(context, context_rows)[1]
            shared = attention_mask.dim() < 3 or attention_mask.shape[-3] in (1, self.shard.heads)
            if attention_mask.requires_grad and shared:  # by ranks that use it for different heads
                attention_mask = copy_to_ranks(attention_mask, group=self.o_proj.group)
            mask = local_mask(attention_mask, self.shard, batch, length, total)
        if cu_seqlens is not None:
            bounds = _bounds(cu_seqlens, length)
        if self.rotary is not None and rotary is None:
            if position_ids is None:
                rotary = self.rotary(*_positions(past, length, bounds, x.device))
            elif position_ids.shape in ((length,), (1, length), (batch, length)):
                rotary = self.rotary(position_ids)
            else:
                raise ShapeError(
                    f"position_ids are {tuple(position_ids.shape)} for {batch} sequences of {length} "
                    "tokens; expected [s] or [b, s]"
                )
        if cache is not None and ready:
            q = self._heads(self.queries(x, rows)[0], self.q_norm)
            k, v = cache.view()
        else:
            q, k, v = self._project(x, rows, context, context_rows)
            if self.rotary is not None and rotary is not None:
                pairs = self.rotary.options.interleaved
                q, k = (apply_rotary(y, *rotary, interleaved=pairs) for y in (q, k))
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            if cache is not None:
                k, v = cache.append(k, v)
        q = q.transpose(1, 2)
        if k.shape[0] != batch:
            raise ShapeError(
                f"ParallelAttention: {batch} sequences of x and {k.shape[0]} of the context"
            )
        y = self._attend(q, k, v, mask) if bounds is None else self._packed(bounds, q, k, v)
        return self._output(y)

    def explain(self) -> str:
        """Which way attention goes, and why."""
        reasons = needs_scores(self.options, self.sinks is not None, self.training)
        if reasons:
            return f"scores in memory, {CHUNK} queries at a time: {', '.join(reasons)}"
        return "torch scaled_dot_product_attention: nothing needs the scores"

    def extra_repr(self) -> str:
        return f"{self.shard}, {self.options}, {self.explain()}"

    def _sizes(self, x: Tensor, rows: int | None) -> tuple[int, int]:
        """Sequences and unsplit length of x."""
        batch, length = x.shape[:2] if self.batch_first else (x.shape[1], x.shape[0])
        if self.sequence_parallel:
            length = length * self.o_proj.group.size if rows is None else rows
        return batch, length

    def _project(
        self, x: Tensor, rows: int | None, context: Tensor | None, context_rows: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [b, s, n, D], normed."""
        q, k, v = super().forward(x, rows, context, context_rows)
        return self._heads(q, self.q_norm), self._heads(k, self.k_norm), self._heads(v, None)

    def _heads(self, y: Tensor, norm: nn.Module | None) -> Tensor:
        """[b, s, n * D] (or [s, b, n * D]) -> [b, s, n, D]."""
        y = y.unflatten(-1, (-1, self.head_dim))
        y = y if self.batch_first else y.transpose(0, 1)
        return y if norm is None else norm(y)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        draw = self._draw_key if self.training else None
        return attend(q, k, v, self.options, self.shard, mask=mask, sinks=self.sinks, draw_key=draw)

    def _draw_key(self) -> Tensor:
        device = self.o_proj.weight.device
        if self.streams is None:
            return draw_key(device, self.o_proj.group)
        with self.streams.fork("same"):
            return draw_key(device)

    def _packed(self, bounds: list[int], *qkv: Tensor) -> Tensor:
        """Each text alone: the work is the sum of their squares, not the square of their sum."""
        sizes = [stop - start for start, stop in pairwise(bounds)]
        parts = zip(*(t.split(sizes, dim=2) for t in qkv), strict=True)
        return torch.cat([self._attend(*part) for part in parts], dim=2)

    def _output(self, y: Tensor) -> Tensor:
        """[b, n, s, D] -> projected, in the layout of x."""
        y = y.transpose(1, 2) if self.batch_first else y.permute(2, 0, 1, 3)
        output: Tensor = self.o_proj(y.flatten(2))
        return output

    def _check(
        self,
        x: Tensor,
        position_ids: Tensor | None,
        cache: KVCache | None,
        context: Tensor | None,
        context_rows: int | None,
        cu_seqlens: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Refuse what cannot work together, before anything is sent."""

        def refuse(what: str) -> None:
            raise UnsupportedError(f"ParallelAttention: {what}")

        for name, given in (("x", x), ("context", context)):
            if given is not None and given.dim() != 3:
                raise ShapeError(
                    f"ParallelAttention: {name} is {tuple(given.shape)}, expected three dimensions"
                )
        if cache is not None and self.sequence_parallel:
            refuse(
                "a KV cache under sequence_parallel=True; generate with a module built with "
                "sequence_parallel=False"
            )
        if cu_seqlens is not None:
            if cache is not None or self.context_size is not None:
                refuse("cu_seqlens with a cache or context_size")
            if x.shape[0 if self.batch_first else 1] != 1:
                raise ShapeError(
                    f"ParallelAttention: cu_seqlens with x {tuple(x.shape)}: texts are packed into one "
                    "sequence"
                )
        if self.rotary is None and (position_ids is not None or rotary is not None):
            refuse("position_ids or rotary= without rotary embedding would have no effect")
        if rotary is not None and self.rotary is not None:
            for table in rotary:
                if table.shape[-1] != self.rotary.dim // 2:
                    raise ShapeError(
                        f"ParallelAttention: a table of rotary= is {tuple(table.shape)}; expected "
                        f"[1 or b, s, {self.rotary.dim // 2}], a column for each pair (transformers' tables "
                        "have every column twice: pass table[..., :R // 2])"
                    )
        if position_ids is not None and rotary is not None:
            refuse("position_ids with rotary=: the tables have been made from positions")
        if (
            self.context_size is not None
            and cache is not None
            and cache.length
            and context is not None
        ):
            refuse("context with a cache that holds it already; leave it out, or reset() the cache")
        if context_rows is not None and context is None:
            refuse("context_rows= without a context")
        window = cache.window if cache is not None else None
        mine = self.options.sliding_window if self.options.causal else None
        if window is not None and (mine is None or mine > window):
            refuse(f"a cache of window={window} for sliding_window={mine} forgets too early")


def _positions(
    past: int, length: int, bounds: list[int] | None, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Default positions [s], and of packed texts the length of each token's."""
    if bounds is None:
        return torch.arange(past, past + length, device=device), None
    starts, sizes = torch.tensor(bounds[:-1]), torch.tensor(bounds).diff()
    positions = torch.arange(length) - starts.repeat_interleave(sizes)
    return positions.to(device), sizes.repeat_interleave(sizes).to(device)


def _bounds(cu_seqlens: Tensor, total: int) -> list[int]:
    bounds: list[int] = cu_seqlens.tolist()
    if (
        cu_seqlens.dim() != 1
        or len(bounds) < 2
        or bounds[0] != 0
        or bounds[-1] != total
        or any(b < a for a, b in pairwise(bounds))
    ):
        raise ShapeError(
            f"cu_seqlens {bounds} for {total} tokens; expected 0, ascending ends, {total}"
        )
    return bounds
