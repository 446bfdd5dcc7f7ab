"""The arithmetic of attention on this rank's heads: masks, biases, and the two ways to the result.

torch's scaled_dot_product_attention never holds the scores and goes first. What it cannot do needs the
scores in memory; they are made for `CHUNK` queries at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.ops.dropout import dropout

from .heads import HeadShard

# Queries; whatever the number of local heads, so that random numbers do not depend on the world size.
CHUNK = 512


@dataclass(frozen=True)
class AttentionOptions:
    """What happens to the scores of the unsplit layer; see ParallelAttention."""

    causal: bool = True
    sliding_window: int | None = None
    alibi: bool = False
    softcap: float | None = None
    scale: float | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise UnsupportedError(f"sliding_window={self.sliding_window} must be positive")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise UnsupportedError(f"softcap={self.softcap} must be positive and finite, or None")
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise UnsupportedError(f"scale={self.scale} must be positive and finite")
        if not 0 <= self.dropout <= 1:
            raise UnsupportedError(f"dropout={self.dropout} is no probability, 0 to 1")

    def window(self, total: int) -> int | None:
        """The sliding window, or None where it hides none of `total` tokens."""
        window = self.sliding_window
        return window if window is not None and total > window + (not self.causal) else None


def needs_scores(options: AttentionOptions, sinks: bool, training: bool) -> list[str]:
    """Reasons why scores have to be in memory; none: torch's kernel does it."""
    asked = {
        "softcap": options.softcap is not None,
        "sinks": sinks,
        "dropout": training and options.dropout > 0,
    }
    return [name for name, wanted in asked.items() if wanted]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    shard: HeadShard,
    *,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    draw_key: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Attention of this rank's heads.

    Args:
        q: [b, n, s, D], the last s of the t tokens (of another text, where nothing depends on positions).
        k, v: [b, n_kv, t, D].
        mask: [1 or b, 1 or n, 1 or s, 1 or at least t, of which the last count], bool (True: may be seen)
            or added to the scores.
        sinks: [n], a logit of each head that takes part in the softmax and has no value (gpt-oss).
        draw_key: in training, makes the keys of dropout, equal on all ranks.

    Returns:
        [b, n, s, D]; zeros for a query that sees nothing.
    """
    if mask is not None and mask.shape[3] > k.shape[2]:
        mask = mask[..., mask.shape[3] - k.shape[2] :]
    if not needs_scores(options, sinks is not None, draw_key is not None):
        return _by_kernel(q, k, v, options, shard, mask)
    heads = shard.kv_of_query()
    if heads != list(range(k.shape[1])):
        k, v = k[:, heads], v[:, heads]
    outputs = []
    for start in range(0, max(q.shape[2], 1), CHUNK):  # once also for no tokens
        rows = range(start, min(start + CHUNK, q.shape[2]))
        seen = mask if mask is None or mask.shape[2] == 1 else mask[:, :, start : rows.stop]
        wide = torch.promote_types(q.dtype, torch.float32)
        bias = total_mask(options, shard, rows, q.shape[2], k.shape[2], q.device, seen, wide)
        scores = _scores(q[:, :, start : rows.stop].to(wide), k.to(wide), options)
        probabilities = _softmax(scores, bias, sinks)
        if options.dropout > 0 and draw_key is not None:
            probabilities = dropout(
                probabilities,
                options.dropout,
                key=draw_key(),
                dim=1,
                start=shard.q[0],
                size=shard.heads,
            )
        outputs.append(probabilities.to(v.dtype) @ v)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _by_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    shard: HeadShard,
    mask: Tensor | None,
) -> Tensor:
    length, total = q.shape[2], k.shape[2]
    plain = options.window(total) is None and not options.alibi and mask is None
    is_causal = options.causal and plain and length == total > 1
    if not is_causal:
        rows = range(length)
        mask = total_mask(options, shard, rows, length, total, q.device, mask, q.dtype)
    places, place_of_query = shard.padded_queries()
    even = len(places) == q.shape[1]
    if not even:
        q = q[:, places]
        if mask is not None and mask.shape[1] > 1:
            mask = mask[:, places]
    y = nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal,
        scale=options.scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )
    return y if even else y[:, place_of_query]


def total_mask(
    options: AttentionOptions,
    shard: HeadShard,
    rows: range,
    length: int,
    total: int,
    device: torch.device,
    given: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """What options and the caller's mask say together: bool, or additive in `dtype`, 4-D; None: nothing.

    rows: the queries concerned, of the last `length` of `total` tokens.
    """
    window, causal = options.window(total), options.causal
    distance = None
    seen = None
    if (causal and length > 1) or window is not None or options.alibi:
        query = torch.arange(rows.start, rows.stop, device=device) + (total - length)
        distance = query.unsqueeze(1) - torch.arange(total, device=device)
        if causal and length > 1:
            seen = distance >= 0
        if window is not None:
            # transformers' bounds: itself among the window if causal, so many on both sides if not
            near = distance < window if causal else distance.abs() <= window
            seen = near if seen is None else seen & near
        if seen is not None:
            seen = seen[None, None]
    if given is not None and given.dtype == torch.bool:
        seen = given if seen is None else given & seen
        given = None
    added = None if given is None else given.to(dtype)  # a kernel may misread another dtype
    if options.alibi and distance is not None:
        slopes = alibi_slopes(shard.heads)[shard.q[0] : shard.q[1]].to(device)
        bias = (-slopes[:, None, None] * distance.abs()).to(dtype).unsqueeze(0)
        added = bias if added is None else added + bias
    if added is None or seen is None:
        return seen if added is None else added
    return added.masked_fill(~seen, -math.inf)


def _scores(q: Tensor, k: Tensor, options: AttentionOptions) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):  # in fp32 as in torch's kernel
        scores = q @ k.mT
    scores = scores * (q.shape[-1] ** -0.5 if options.scale is None else options.scale)
    return (
        scores
        if options.softcap is None
        else options.softcap * torch.tanh(scores / options.softcap)
    )


def _softmax(scores: Tensor, bias: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Over the last dimension, the sink of each head included; zeros where nothing is seen."""
    hidden = None
    if bias is not None:
        if bias.dtype != torch.bool:
            scores = scores + bias
        hidden = ~bias if bias.dtype == torch.bool else bias == -math.inf
        # the least number instead of -inf: a row without anything seen has a softmax, and gradients
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    probabilities = scores.softmax(-1)
    if sinks is not None:
        probabilities = probabilities[..., :-1]
    return probabilities if hidden is None else probabilities.masked_fill(hidden, 0)


def alibi_slopes(heads: int) -> Tensor:
    """Slope of each head of the unsplit layer, fp32 [heads] (Press et al., 2022, arXiv:2108.12409).

    2^(-8 i / n), i = 1..n, for n heads, a power of two. Other numbers take those of the power of two below,
    then every second one of the power above, as the authors' code.
    """
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / below) for i in range(1, below + 1)]
    slopes += [2.0 ** (-4 * i / below) for i in range(1, 2 * (heads - below), 2)]
    return torch.tensor(slopes, dtype=torch.float32)


def local_mask(mask: Tensor, shard: HeadShard, batch: int, length: int, total: int) -> Tensor:
    """A caller's mask for this rank's heads: [1 or batch, 1 or n, 1 or length, 1 or total]."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise UnsupportedError(
            f"attention_mask has dtype {mask.dtype}; pass bool (True: may be seen) or numbers to add, for a "
            "tokenizer's [b, t] of ones and zeros: mask[:, None, None].bool()"
        )
    full = mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask
    if full.shape[1:2] == (shard.heads,):
        full = full[:, shard.q[0] : shard.q[1]]
    allowed = ((1, batch), (1, shard.num_heads), (1, length), (1, total))
    if full.dim() != 4 or any(n not in some for n, some in zip(full.shape, allowed, strict=True)):
        raise ShapeError(
            f"attention_mask is {tuple(mask.shape)}; it must broadcast to [{batch}, {shard.heads} heads, or "
            f"this rank's {shard.num_heads}, {length} queries, {total} tokens so far]"
        )
    return full
