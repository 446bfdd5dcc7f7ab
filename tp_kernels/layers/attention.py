"""ParallelAttention: multi-head, grouped-query and multi-query attention divided by heads.

Limits: torch SDPA does the attention itself; rotary embedding is the half-split kind without scaling;
no attention dropout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.group import GroupLike, as_group

from .heads import partition_heads
from .linear import QKVParallelLinear, RowParallelLinear, feature_ranges


class KVCache:
    """Keys and values of one layer's local heads, [b, n_kv, s, D]; grows by doubling.

    Not differentiable: made for generation.
    """

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.length = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add [b, n_kv, s, D] at the end; returns all keys and values so far."""
        batch, heads, added, width = keys.shape
        total = self.length + added
        if self._keys is None or self._values is None or self._keys.shape[2] < total:
            room = max(total, 2 * self.length, 64)
            grown_keys = keys.new_empty(batch, heads, room, width)
            grown_values = values.new_empty(batch, heads, room, width)
            if self._keys is not None and self._values is not None:
                grown_keys[:, :, : self.length] = self._keys[:, :, : self.length]
                grown_values[:, :, : self.length] = self._values[:, :, : self.length]
            self._keys, self._values = grown_keys, grown_values
        self._keys[:, :, self.length : total] = keys
        self._values[:, :, self.length : total] = values
        self.length = total
        return self._keys[:, :, :total], self._values[:, :, :total]


class ParallelAttention(QKVParallelLinear):
    """Self-attention with this rank's heads; the output projection completes the sum over ranks.

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim: of the unsplit layer. Any number of query heads on
            any number of ranks up to it; KV heads fewer than ranks are held by several.
        qkv_bias, output_bias: biases of the projections.
        causal: each token sees itself and those before it.
        sliding_window: each token sees this many tokens, itself included; None for all.
        rope_theta: base of the rotary embedding (Su et al., 2021, in the half-split form); None for none.
        sequence_parallel: x and the result are this rank's rows [s_r, b, H] of [s, b, H], instead of
            [b, s, H] whole.

    forward(x, *, rows=None, position_ids=None, attention_mask=None, cache=None):
        rows: s under sequence parallelism; default s_r * W.
        position_ids: [b, s] or [s]; default: counted from the cache's length.
        attention_mask: bool (True: may see) or additive, broadcastable to [b, n_q, s, s_kv]; combined with
            causal and sliding_window. A mask with a head dimension must hold this rank's heads.
        cache: a KVCache, not under sequence parallelism.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        causal: bool = True,
        sliding_window: int | None = None,
        rope_theta: float | None = 10000.0,
        group: GroupLike = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        group = as_group(group)
        options: dict[str, Any] = {
            "sequence_parallel": sequence_parallel,
            "device": device,
            "dtype": dtype,
        }
        super().__init__(
            hidden_size, num_heads, num_kv_heads, head_dim, qkv_bias, group=group, **options
        )
        if sliding_window is not None and (sliding_window < 1 or not causal):
            raise UnsupportedError(
                f"sliding_window={sliding_window} needs a positive size and causal=True"
            )
        if rope_theta is not None and self.head_dim % 2:
            raise ShapeError(f"rotary embedding needs an even head_dim, not {self.head_dim}")
        shards = partition_heads(num_heads, num_kv_heads or num_heads, group.size)
        self.causal, self.sliding_window, self.rope_theta = causal, sliding_window, rope_theta
        self.sequence_parallel = sequence_parallel
        self._places = self.shard.padded_queries()
        self.o_proj = RowParallelLinear(
            num_heads * self.head_dim,
            hidden_size,
            output_bias,
            group=group,
            ranges=feature_ranges(shards, self.head_dim)[0],
            **options,
        )

    def forward(  # type: ignore[override]  # a block, no longer only its three projections
        self,
        x: Tensor,
        *,
        rows: int | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        if x.dim() != 3:
            raise ShapeError(f"ParallelAttention: x is {tuple(x.shape)}, expected three dimensions")
        if cache is not None and self.sequence_parallel:
            raise UnsupportedError(
                "ParallelAttention: a KV cache under sequence_parallel=True; generate with a module "
                "built with sequence_parallel=False"
            )
        q, k, v = (self._heads(y) for y in super().forward(x, rows))
        past = cache.length if cache is not None else 0
        length = q.shape[2]
        if self.rope_theta is not None:
            if position_ids is None:
                position_ids = torch.arange(past, past + length, device=x.device)
            cos, sin = rotary_table(position_ids, self.head_dim, self.rope_theta)
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        if cache is not None:
            k, v = cache.append(k, v)
        mask = self._mask(length, k.shape[2], x.device, attention_mask, q.dtype)
        is_causal = self.causal and mask is None and length > 1
        places, place_of_query = self._places
        even = len(places) == q.shape[1]
        if not even:
            q = q[:, places]
            if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
                mask = mask[:, places]
        y = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=k.shape[1] != q.shape[1]
        )
        y = y if even else y[:, place_of_query]
        order = (2, 0, 1, 3) if self.sequence_parallel else (0, 2, 1, 3)
        return self.o_proj(y.permute(order).flatten(2))

    def _heads(self, y: Tensor) -> Tensor:
        """[b, s, n * D] (or [s, b, n * D]) -> [b, n, s, D]."""
        y = y.unflatten(-1, (-1, self.head_dim))
        return y.permute(1, 2, 0, 3) if self.sequence_parallel else y.transpose(1, 2)

    def _mask(
        self,
        length: int,
        total: int,
        device: torch.device,
        given: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor | None:
        """The mask SDPA needs, or None where `is_causal` or nothing says it all."""
        seen = None
        window = self.sliding_window is not None and total > self.sliding_window
        if self.causal and (window or (length > 1 and (given is not None or total != length))):
            query = torch.arange(total - length, total, device=device).unsqueeze(1)
            key = torch.arange(total, device=device)
            seen = key <= query
            if window:
                seen = seen & (key > query - (self.sliding_window or 0))
        if given is None or seen is None:
            return seen if given is None else given
        if given.dtype == torch.bool:
            return given & seen
        return given.masked_fill(~seen, torch.finfo(dtype).min)


def rotary_table(position_ids: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [1 or b, 1, s, D], in fp32, of the angles position * theta^(-2i/D)."""
    half = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32)
    angle = position_ids.to(torch.float32).unsqueeze(-1) * theta ** (-half / head_dim)
    angle = torch.cat((angle, angle), dim=-1).unsqueeze(-3)
    if angle.dim() == 3:
        angle = angle.unsqueeze(0)
    return angle.cos(), angle.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of x [b, n, s, D]."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)
