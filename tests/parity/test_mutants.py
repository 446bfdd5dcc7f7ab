"""The parity suite bites: what goes wrong in layers of this kind, put into ours on purpose, does not pass.

Every mutant is a defect from the field (a reduction that is missing, a bias that every rank adds, a smoothing
over the shard), patched into the package in the ranks. The case passes without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.parity.case import Case, Held, check, compute, reference
from tests.parity.entries import ENTRIES
from tp_kernels.comm.layout import split_range
from tp_kernels.layers import (
    ParallelDropout,
    ParallelMLP,
    ParamPlacement,
    VocabParallelEmbedding,
    _attend,
    heads,
    linear,
    qkv,
)
from tp_kernels.layers.rotary import RotaryEmbedding
from tp_kernels.ops import cross_entropy

Mutant = Callable[[], AbstractContextManager[Any]]


def only_overlaps() -> Any:
    """Partial gradients of whole parameters stay partial."""
    wanted = property(lambda self: self.group.size > 1 and self.overlapping)
    return mock.patch.object(ParamPlacement, "needs_reduction", wanted)


def only_partial() -> Any:
    """Ranks that hold the same part of a parameter keep a gradient each."""
    wanted = property(lambda self: self.group.size > 1 and self.partial_gradient)
    return mock.patch.object(ParamPlacement, "needs_reduction", wanted)


def bias_on_every_rank() -> Any:
    right = linear.linear_all_reduce

    def wrong(x: Tensor, w: Tensor, bias: Tensor, *, group: Any, **rest: Any) -> Tensor:
        return right(x, w, None, group=group, **rest) + group.size * bias

    return mock.patch.object(linear, "linear_all_reduce", wrong)


def bias_on_every_rank_of_rows() -> Any:
    right = linear.linear_reduce_scatter

    def wrong(x: Tensor, w: Tensor, bias: Tensor, *, group: Any, **rest: Any) -> Tensor:
        return right(x, w, None, group=group, **rest) + group.size * bias

    return mock.patch.object(linear, "linear_reduce_scatter", wrong)


def input_gradient_of_one_rank() -> Any:
    """The gradient of a whole input is not summed over the ranks that used it."""

    def wrong(x: Tensor, ws: list[Tensor], bs: Any, **_: Any) -> list[Tensor]:
        bs = bs or [None] * len(ws)
        return [torch.nn.functional.linear(x, w, b) for w, b in zip(ws, bs, strict=True)]

    return mock.patch.object(linear, "copy_linear", wrong)


def smoothing_over_the_shard() -> Any:
    return _loss_with(lambda options, group: options._replace(vocab=_words(options, group)))


def _words(options: Any, group: Any) -> int:
    start, stop = split_range(options.vocab, group.size, group.rank)
    return stop - start


def _loss_with(change: Callable[[Any, Any], Any]) -> Any:
    """Smoothing is over other words than the whole vocabulary."""
    losses, gradient = cross_entropy.losses, cross_entropy.gradient_

    @contextmanager
    def patched() -> Iterator[None]:
        seen: list[Any] = []

        def wrong(measures: Tensor, labels: Tensor, options: Any, group: Any, host: bool) -> Any:
            seen.append(group)
            # labels of other ranks' words must not count as unknown
            other = change(options, group)
            known = labels.clamp(max=other.vocab - 1)
            return losses(measures, known, other, group, host)

        def wrong_gradient(*args: Any) -> Tensor:
            *rest, options = args
            return gradient(*rest, change(options, seen[-1]))

        with (
            mock.patch.object(cross_entropy, "losses", wrong),
            mock.patch.object(cross_entropy, "gradient_", wrong_gradient),
        ):
            yield

    return patched()


def z_loss_over_the_shard() -> Any:
    right = cross_entropy.losses

    def wrong(measures: Tensor, labels: Tensor, options: Any, group: Any, host: bool) -> Any:
        loss, saved = right(measures, labels, options._replace(z_loss=0.0), group, host)
        mine = measures[0] + measures[1].log()
        counted = labels != options.ignore_index
        return [loss + options.z_loss * mine.square() * counted, saved]

    return mock.patch.object(cross_entropy, "losses", wrong)


def positions_of_the_rank() -> Any:
    """Rotary positions are counted from the first token of each rank instead of the sequence."""
    right = RotaryEmbedding.__call__

    def wrong(self: Any, position_ids: Tensor, lengths: Tensor | None = None) -> Any:
        mine = -(-position_ids.shape[-1] // torch.distributed.get_world_size())
        return right(self, position_ids % mine, lengths)

    return mock.patch.object(RotaryEmbedding, "__call__", wrong)


def slopes_of_the_rank() -> Any:
    """Every rank takes the slopes of the first heads."""
    right = _attend.alibi_slopes

    def wrong(heads: int) -> Tensor:
        first = right(heads)[: -(-heads // 2)]
        return torch.cat((first, first))

    return mock.patch.object(_attend, "alibi_slopes", wrong)


@contextmanager
def next_kv_head() -> Iterator[None]:
    """Groups of query heads begin too early where they are uneven."""

    def wrong(query: int, heads: int, kv_heads: int) -> int:
        return min(-(-query * kv_heads // heads), kv_heads - 1)

    heads.partition_heads.cache_clear()
    try:
        with mock.patch.object(heads, "kv_head", wrong):
            yield
    finally:
        heads.partition_heads.cache_clear()


def dropout_by_local_index() -> Any:
    return mock.patch.object(ParallelDropout, "_place", return_value=(0, None))


def packed_as_interleaved() -> Any:
    right = ParallelMLP.__init__

    def wrong(self: Any, *args: Any, **options: Any) -> None:
        right(self, *args, **options)
        self.packed = {"blocks": "interleaved", "interleaved": "blocks"}[self.packed]

    return mock.patch.object(ParallelMLP, "__init__", wrong)


def qkv_in_the_other_layout() -> Any:
    right = qkv.packed_pieces

    def wrong(shard: Any, head_dim: int, layout: str) -> Any:
        return right(shard, head_dim, {"blocks": "groups", "groups": "blocks"}[layout])

    return mock.patch.object(qkv, "packed_pieces", wrong)


def attention_dropout_by_local_index() -> Any:
    right = _attend.dropout

    def wrong(x: Tensor, p: float, *, key: Tensor, **_: Any) -> Tensor:
        return right(x, p, key=key)

    return mock.patch.object(_attend, "dropout", wrong)


def padding_takes_gradient() -> Any:
    right = VocabParallelEmbedding._lookup

    def wrong(self: Any, ids: Tensor) -> Tensor:
        with mock.patch.object(self, "padding_idx", None):
            return right(self, ids)

    return mock.patch.object(VocabParallelEmbedding, "_lookup", wrong)


def features_gathered_twice_as_steep() -> Any:
    """The gradient of gathered features is summed over ranks that all hold the same."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor, size: int) -> Tensor:
            ctx.size = size
            return y.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            return dy * ctx.size, None

    right = linear.gather_features

    def wrong(x: Tensor, sizes: Any, *, group: Any) -> Tensor:
        return Doubled.apply(right(x, sizes, group=group), group.size)

    return mock.patch.object(linear, "gather_features", wrong)


FP64 = torch.float64
# name: (mutant, layer, world, sequence parallel, options that differ from the first of every axis)
MUTANTS: dict[str, tuple[Mutant, str, int, bool, dict[str, Any]]] = {
    "norm not reduced": (only_overlaps, "norm", 2, True, {"kind": "layer"}),
    "norm of a block not reduced": (only_overlaps, "block", 2, True, {}),
    "row bias not reduced": (
        only_overlaps,
        "row",
        3,
        True,
        {"bias": True, "skip_bias_add": True},
    ),
    "KV heads not reduced": (only_partial, "qkv", 4, False, {"heads": (4, 1)}),
    "KV heads of attention not reduced": (only_partial, "attention", 3, True, {"heads": (4, 1)}),
    "bias on every rank": (bias_on_every_rank, "row", 2, False, {"bias": True}),
    "bias on every rank, rows": (bias_on_every_rank_of_rows, "row", 2, True, {"bias": True}),
    "input gradient of one rank": (input_gradient_of_one_rank, "column", 2, False, {}),
    "smoothing over the shard": (smoothing_over_the_shard, "loss", 2, False, {"smoothing": 0.2}),
    "z-loss over the shard": (z_loss_over_the_shard, "loss", 2, False, {"z_loss": 0.1}),
    "positions of the rank": (positions_of_the_rank, "attention", 2, True, {}),
    "slopes of the rank": (slopes_of_the_rank, "scores", 2, False, {"alibi": True}),
    "q and k norms not reduced": (only_overlaps, "scores", 2, False, {"qk_norm": "rms"}),
    "packed KV heads not reduced": (
        only_partial,
        "attention",
        2,
        False,
        {"form": "blocks", "heads": (4, 1)},
    ),
    "grouped KV heads not reduced": (
        only_partial,
        "qkv",
        3,
        True,
        {"form": "groups", "heads": (4, 1)},
    ),
    "qkv in the other layout": (
        qkv_in_the_other_layout,
        "attention",
        2,
        False,
        {"form": "groups", "heads": (5, 2)},
    ),
    "attention dropout by local index": (
        attention_dropout_by_local_index,
        "scores",
        2,
        True,
        {"dropout": 0.3},
    ),
    "next KV head": (next_kv_head, "attention", 2, False, {"heads": (5, 2)}),
    "dropout by local index": (dropout_by_local_index, "dropout", 2, True, {}),
    "packed as interleaved": (
        packed_as_interleaved,
        "mlp",
        2,
        False,
        {"packed": "blocks", "gated": True},
    ),
    "padding takes gradient": (padding_takes_gradient, "embedding", 2, False, {"padding": 0}),
    "gathered features": (
        features_gathered_twice_as_steep,
        "column",
        2,
        False,
        {"gather_output": True},
    ),
}


def mutated(name: str, case: Case, shapes: dict[str, tuple[int, ...]]) -> dict[str, Held]:
    """Body of a rank, with the mutant if it has a name."""
    if not name:
        return compute(case, shapes)
    with MUTANTS[name][0]():
        return compute(case, shapes)


def case_of(name: str, dtype: torch.dtype) -> Case:
    _, layer, size, sp, given = MUTANTS[name]
    axes = ENTRIES[layer].options
    assert all(value in axes[axis] for axis, value in given.items()), given
    options = tuple((axis, given.get(axis, values[0])) for axis, values in axes.items())
    return Case(layer, size, sp, dtype, options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(MUTANTS))
def test_mutant_is_caught(world, name: str, dtype: torch.dtype):
    case = case_of(name, dtype)
    shapes = shapes_of(case)
    ranks = world(case.world)
    check(case, ranks.run(mutated, "", case, shapes))
    with pytest.raises(AssertionError, match=r"times the bound|other bits"):
        check(case, ranks.run(mutated, name, case, shapes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", ["mlp", "scores", "loss", "norm", "block"])
def test_bound_is_near(world, layer: str, dtype: torch.dtype):
    """What is allowed is at most 100 times what is lost."""
    options = tuple((axis, values[-1]) for axis, values in ENTRIES[layer].options.items())
    case = Case(layer, 2, False, dtype, options)
    assert 0.01 < check(case, world(2).run(compute, case, shapes_of(case))) < 1


def shapes_of(case: Case) -> dict[str, tuple[int, ...]]:
    values = reference(case.layer, case.options)
    return {name: tuple(value.shape) for name, (value, _) in values.items()}
