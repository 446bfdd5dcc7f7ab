"""QKVParallelLinear: query, key and value projections divided by heads, as three parameters or packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.group import GroupLike, as_group

from .gradients import backward_dw
from .heads import HeadShard, kv_head, partition_heads
from .linear import ColumnParallelLinear, column_parallel
from .placement import Piece, Ranges

LAYOUTS = ("blocks", "groups")


class QKVParallelLinear(nn.Module):
    """Query, key and value projections divided by heads, in one op with one collective.

    Any number of query heads on any number of ranks up to it; KV heads that serve query heads of several
    ranks are held by each of them.

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim: of the unsplit layer.
        bias: of all three projections.
        fused: False: parameters `q_proj`, `k_proj`, `v_proj` (Llama, Qwen). True: `qkv_proj`, one product.
        layout: of the rows (and the bias) of the unsplit fused parameter. "blocks": all queries, all keys,
            all values (Phi-3, GPT-2). "groups": for each KV head its queries, its key, its value (Megatron,
            GPT-NeoX, InternLM2). Weights in one layout run and are wrong in the other.
        context_size: features of what keys and values are made from, where it is not x: cross-attention.
        sequence_parallel: x (and the context) is this rank's part of the sequence.
        batch_first: of a 3-D x: [b, s, H] or [s, b, H]; None: [s, b, H] under sequence parallelism. Without
            it the layer takes x [..., H] of any shape and batch_first has no say.
        delay_wgrad: backward leaves the gradients of weights to `backward_dw()`.

    forward(x [..., H], rows=None) -> q [..., n_q * D], k [..., n_kv * D], v [..., n_kv * D] of local heads,
        all of the sequence, which has `rows` tokens (under sequence parallelism; default s_r * W).
    forward(x, rows, context, context_rows) with context_size.

    Raises:
        ShapeError, UnsupportedError: sizes and options that do not go together, before anything is sent.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        *,
        fused: bool = False,
        layout: str = "blocks",
        context_size: int | None = None,
        group: GroupLike = None,
        sequence_parallel: bool = False,
        batch_first: bool | None = None,
        delay_wgrad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if layout not in LAYOUTS or (layout != "blocks" and not fused):
            raise UnsupportedError(
                f"layout={layout!r} with fused={fused}: a fused projection is laid out in 'blocks' or "
                "'groups'; separate ones have no layout"
            )
        if fused and context_size is not None:
            raise UnsupportedError(
                "fused=True with context_size: queries and keys are made from different inputs; use "
                "fused=False"
            )
        group = as_group(group)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        shards = partition_heads(num_heads, num_kv_heads, group.size)
        self.shard: HeadShard = shards[group.rank]
        self.head_dim = head_dim = _head_dim(hidden_size, num_heads, head_dim)
        self.fused, self.layout, self.context_size = fused, layout, context_size
        self.sequence_parallel = sequence_parallel
        self.batch_first = not sequence_parallel if batch_first is None else batch_first

        options: dict[str, Any] = {
            "group": group,
            "sequence_parallel": sequence_parallel,
            "batch_first": batch_first,
            "delay_wgrad": delay_wgrad,
            "device": device,
            "dtype": dtype,
        }

        def column(features: int, heads: int, ranges: Ranges) -> ColumnParallelLinear:
            return ColumnParallelLinear(features, heads * head_dim, bias, ranges=ranges, **options)

        if fused:
            pieces = [packed_pieces(shard, head_dim, layout) for shard in shards]
            self.qkv_proj = column(hidden_size, num_heads + 2 * num_kv_heads, pieces)
        else:
            q_ranges, kv_ranges = feature_ranges(shards, head_dim)
            self.q_proj = column(hidden_size, num_heads, q_ranges)
            self.k_proj = column(context_size or hidden_size, num_kv_heads, kv_ranges)
            self.v_proj = column(context_size or hidden_size, num_kv_heads, kv_ranges)

    def forward(
        self,
        x: Tensor,
        rows: int | None = None,
        context: Tensor | None = None,
        context_rows: int | None = None,
    ) -> tuple[Tensor, ...]:
        if (context is None) != (self.context_size is None):
            raise UnsupportedError(
                f"{type(self).__name__}: context is {'missing' if context is None else 'given'}, but the "
                f"layer was built with context_size={self.context_size}"
            )
        if context is not None:
            return (*self.queries(x, rows), *self.keys_and_values(context, context_rows))
        if context_rows is not None:
            raise UnsupportedError("context_rows= without a context")
        if not self.fused:
            return column_parallel(x, [self.q_proj, self.k_proj, self.v_proj], rows)
        (y,) = column_parallel(x, [self.qkv_proj], rows)
        return self._unpack(y)

    def queries(self, x: Tensor, rows: int | None = None) -> tuple[Any, ...]:
        return column_parallel(x, [self.q_proj], rows)

    def keys_and_values(self, context: Tensor, rows: int | None = None) -> tuple[Any, ...]:
        return column_parallel(context, [self.k_proj, self.v_proj], rows)

    def backward_dw(self) -> None:
        """Gradients of the weights that backward left out under delay_wgrad=True, of one backward."""
        backward_dw(self)

    def _unpack(self, y: Tensor) -> tuple[Tensor, ...]:
        """Local features of the fused projection -> those of queries, keys, values."""
        shard, width = self.shard, self.head_dim
        n_q, n_kv = shard.num_heads, shard.num_kv_heads
        if self.layout == "blocks":
            return y.split([n_q * width, n_kv * width, n_kv * width], dim=-1)
        if shard.uniform:
            per_kv = n_q // n_kv
            parts = y.unflatten(-1, (n_kv, per_kv + 2, width)).split([per_kv, 1, 1], dim=-2)
            return tuple(part.flatten(-3) for part in parts)
        at: list[list[int]] = [[], [], []]
        for index, (kind, _) in enumerate(_grouped(shard)):
            at[kind].append(index)
        heads = y.unflatten(-1, (-1, width))
        return tuple(heads[..., index, :].flatten(-2) for index in at)


def feature_ranges(
    shards: Sequence[HeadShard], head_dim: int
) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """Feature ranges of the query (and output) and of the KV projections of every rank."""
    q = tuple((shard.q[0] * head_dim, shard.q[1] * head_dim) for shard in shards)
    kv = tuple((shard.kv[0] * head_dim, shard.kv[1] * head_dim) for shard in shards)
    return q, kv


def packed_pieces(shard: HeadShard, head_dim: int, layout: str) -> tuple[Piece, ...]:
    """What one rank holds of the rows of an unsplit fused parameter, in their order."""
    heads, kv_heads = shard.heads, shard.kv_heads
    if layout == "blocks":
        spans = [shard.q]
        spans += [(first + shard.kv[0], first + shard.kv[1]) for first in (heads, heads + kv_heads)]
    else:
        whole = HeadShard((0, heads), (0, kv_heads), heads, kv_heads)
        place = {head: index for index, head in enumerate(_grouped(whole))}
        spans = []
        for head in _grouped(shard):
            start = place[head]
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], start + 1)
            else:
                spans.append((start, start + 1))
    return tuple((start * head_dim, stop * head_dim) for start, stop in spans)


def _grouped(shard: HeadShard) -> list[tuple[int, int]]:
    """The heads of a rank in the layout "groups", as (0 query, 1 key, 2 value; unsplit index)."""
    order = []
    for kv in range(*shard.kv):
        queries = [q for q in range(*shard.q) if kv_head(q, shard.heads, shard.kv_heads) == kv]
        order += [(0, q) for q in queries] + [(1, kv), (2, kv)]
    return order


def _head_dim(hidden_size: int, num_heads: int, head_dim: int | None) -> int:
    if head_dim is not None:
        if head_dim < 1:
            raise ShapeError(f"head_dim={head_dim} must be positive")
        return head_dim
    if num_heads < 1 or hidden_size % num_heads:
        raise ShapeError(
            f"hidden size {hidden_size} is not a multiple of {num_heads} heads; pass head_dim="
        )
    return hidden_size // num_heads
