"""linear_cross_entropy: output head and loss in one, without the logits ever being in memory.

    vocab_parallel_cross_entropy(hidden W^T + b, labels),   W divided by words over the ranks

The logits [R, V_r] are made in tiles of `chunk_rows` rows and as many words as keep a tile within
`TILE_BYTES`, measured, and forgotten; merged measures of all tiles of all ranks give the loss with one
exchange of 16 bytes a row. The backward makes every tile again and turns it into its gradient:

    dW[words] = sum over rows of d_tile^T hidden,   d_hidden = sum over words and ranks of d_tile W[words]

Four products where the materialised loss has three. Gradients made in the forward (as Liger does) save the
fourth, but accumulate dW over chunks of rows: in 16 bits that rounds as often as there are chunks, in fp32
it takes twice the memory of W. Here products of tiles are summed in fp32 (float64), dW of a tile of words
at a time, any upstream gradient of single rows is served alike, and nothing waits in memory
between forward and backward but (M, S) of every row. d_hidden, of R x H elements beside products of
R x V_r x H, is reduced when all tiles are done: hiding that would gain nothing.

Logits, and their gradients in the products, are rounded to the dtype of `hidden`, as if materialised.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tp_kernels.comm import collectives
from tp_kernels.comm.errors import ShapeError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.layout import split_sizes

from ._gemm import add_weight_gradient
from ._op import check_call, diverted, needed, prepare, register, rows_of
from ._weight_gradient import Diverted, elsewhere, uncompiled
from .cross_entropy import (
    SCHEMA,
    LossOptions,
    check_options,
    check_rows,
    check_words,
    first_word,
    gradient_,
    losses,
    measure_,
    merge,
    reduced,
    where,
    wide,
)

# Of a tile of logits in float32 (twice that in float64). Products of tiles twice as large are hardly faster.
TILE_BYTES = 16 << 20
CHUNK_ROWS = 2048


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    group: ParallelGroup,
    vocab_size: int,
    start: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    soft_cap: float | None = None,
    reduction: str = "mean",
    chunk_rows: int | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """Cross entropy of the output head whose words are divided over the ranks.

    Args:
        hidden: [..., H], equal on all ranks; or, with sequence_parallel=True, this rank's rows
            [split_sizes(R, W)[rank], ..., H] of [R, ..., H].
        weight: [V_r, H], this rank's rows of the table [V, H]; also none.
        labels: [...] int64 of all rows, equal on all ranks.
        bias: [V_r].
        chunk_rows: rows of a tile of logits; default 2048 or all. A tile has as many words as fit
            TILE_BYTES (16 MiB of fp32), whatever V.
        vocab_size, start, label_smoothing, z_loss, ignore_index, soft_cap, reduction: as of
            `vocab_parallel_cross_entropy`. Rows of `weight` beyond the vocabulary are padding.

    A weight with a `main_grad` gets its gradient added there, without a rounding to 16 bits, and none from
    autograd.

    Returns:
        float32 (float64 of float64), the same bits on all ranks. The gradient of `hidden` is summed over
        the ranks, like that of `copy_linear` or, of rows, `all_gather_linear`.
    """
    operation = "linear_cross_entropy"
    group = check_call(operation, group, "auto")
    own = None
    if elsewhere(weight, None):
        if is_compiling():
            arguments: dict[str, Any] = {
                "group": group,
                "vocab_size": vocab_size,
                "start": start,
                "label_smoothing": label_smoothing,
                "z_loss": z_loss,
                "ignore_index": ignore_index,
                "soft_cap": soft_cap,
                "reduction": reduction,
                "chunk_rows": chunk_rows,
                "sequence_parallel": sequence_parallel,
            }
            return uncompiled(linear_cross_entropy, hidden, weight, labels, bias, **arguments)
        own = Diverted(operation, weight, bias, None)
        (weight,) = own.operands
    hidden, (weight,), biases = prepare(operation, group, hidden, weight, bias, None)
    if start is None:
        start = first_word(operation, group, weight.shape[0], vocab_size)
    options = LossOptions(vocab_size, start, ignore_index, label_smoothing, z_loss, soft_cap)
    check_options(operation, options, reduction)
    if chunk_rows is not None and chunk_rows < 1:
        raise ShapeError(
            f"{where(operation, group)}: chunk_rows={chunk_rows}; use a positive number or None"
        )
    rows: tuple[int, ...] = hidden.shape[:-1]
    inner = 0
    if sequence_parallel:
        if labels.dim() == 0 or hidden.dim() < 2:
            raise ShapeError(
                f"{where(operation, group)}: hidden {tuple(hidden.shape)} has no rows to divide"
            )
        collectives.row_counts(operation, hidden, group, labels.shape[0])
        rows, inner = (labels.shape[0], *rows[1:]), max(1, hidden.shape[1:-1].numel())
    check_rows(operation, group, hidden, labels, rows)
    loss, _ = _op(
        rows_of(hidden),
        weight,
        labels.reshape(-1),
        biases[0] if biases else None,
        inner,
        chunk_rows or CHUNK_ROWS,
        *options,
        group.name,
        diverted=own,
    )
    return reduced(loss.view(labels.shape), labels, ignore_index, reduction)


def _forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    inner: int,
    chunk_rows: int,
    vocab: int,
    start: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float | None,
    group_name: str,
) -> list[Tensor]:
    """The loss [R] and (M, S) [2, R].

    inner: hidden is this rank's part of R = labels.numel() rows, divided in pieces of `inner`; 0: it is all.
    """
    group = ParallelGroup.by_name(group_name)
    options = LossOptions(vocab, start, ignore_index, label_smoothing, z_loss, soft_cap)
    check_words("linear_cross_entropy", group, labels, options)
    host = _host(hidden, group)

    def run() -> list[Tensor]:
        tiles = _Tiles(_gathered(hidden, labels, inner, group), weight, bias, chunk_rows, options)
        measures = hidden.new_empty(4, labels.numel(), dtype=wide(hidden.dtype))
        for rows in tiles.rows():
            parts = (
                measure_(tiles.logits(rows, words), labels[rows], start + words.start, options)
                for words in tiles.words()
            )
            measures[:, rows] = reduce(merge, parts)
        return losses(measures, labels, options, group, host)

    return group.run("linear_cross_entropy", "host" if host else "reference", run)


def _host(x: Tensor, group: ParallelGroup) -> bool:
    return group.memory is not None and x.is_cpu


def _gathered(hidden: Tensor, labels: Tensor, inner: int, group: ParallelGroup) -> Tensor:
    """hidden of all rows; see `_forward`."""
    if inner == 0 or group.size == 1:
        return hidden
    counts = [size * inner for size in split_sizes(labels.numel() // inner, group.size)]
    return collectives.all_gather(hidden, group, counts=counts)


class _Tiles:
    """The logits [R, V_r], one tile at a time in the same memory."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunk_rows: int,
        options: LossOptions,
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.width = options.width(weight.shape[0])
        self.chunk_rows = max(1, min(chunk_rows, hidden.shape[0]))
        self.chunk_words = max(1, min(self.width, TILE_BYTES // 4 // self.chunk_rows))
        size = self.chunk_rows * self.chunk_words
        self._wide = hidden.new_empty(size, dtype=wide(hidden.dtype))
        same = self._wide.dtype == hidden.dtype
        self._memory = self._wide if same else hidden.new_empty(size)

    def rows(self) -> Iterator[slice]:
        return _slices(self.hidden.shape[0], self.chunk_rows)

    def words(self) -> Iterator[slice]:
        """At least one, which may be empty."""
        return _slices(self.width, self.chunk_words)

    def logits(self, rows: slice, words: slice) -> Tensor:
        """[rows, words], wide; valid until the next call of a method that returns a tile."""
        x, w = self.hidden[rows], self.weight[words]
        out = _view(self._memory, x.shape[0], w.shape[0])
        if self.bias is None:
            torch.mm(x, w.t(), out=out)
        else:
            torch.addmm(self.bias[words], x, w.t(), out=out)
        return out if self._memory is self._wide else _view(self._wide, *out.shape).copy_(out)

    def narrow(self, tile: Tensor) -> Tensor:
        """A wide tile in the dtype of the products."""
        if self._memory is self._wide:
            return tile
        return _view(self._memory, *tile.shape).copy_(tile)


def _view(memory: Tensor, rows: int, columns: int) -> Tensor:
    return memory[: rows * columns].view(rows, columns)


def _slices(total: int, size: int) -> Iterator[slice]:
    for first in range(0, max(total, 1), size):
        yield slice(first, min(first + size, total))


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out [M, N] += a [M, K] @ b [K, N]; out may be wider than the product."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    else:
        out.add_(a @ b)


def _fake(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, *_: Any
) -> list[Tensor]:
    loss = labels.new_empty(labels.shape, dtype=wide(hidden.dtype))
    return [loss, loss.new_empty(2, labels.shape[0])]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    hidden, weight, labels, bias, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(hidden, weight, labels, bias, output[1])


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    nothing = [None] * len(ctx.rest)
    if gradients[0] is None:
        return (None, None, None, None, *nothing)
    hidden, weight, labels, bias, saved = ctx.saved_tensors
    need = needed(ctx)
    need_hidden, need_weight, need_bias = need[0], need[1], need[3]
    call = (gradients[0].resolve_neg(), hidden, weight, labels, bias, saved, need_hidden)
    own = diverted(ctx)
    if own:
        (now,), (main,) = own.now([need_weight]), own.main_grads()
        dh, dw, db = _backward_kernel(*call, now, need_bias, *ctx.rest, main_grad=main)
        (answer,) = own.answers([dw], [need_weight])
    else:
        dh, dw, db = _backward_op(*call, need_weight, need_bias, *ctx.rest)
        answer = dw if need_weight else None
    return (
        dh if need_hidden else None,
        answer,
        None,
        db if need_bias else None,
        *nothing,
    )


def _backward_kernel(
    d_loss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    saved: Tensor,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    inner: int,
    chunk_rows: int,
    vocab: int,
    start: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float | None,
    group_name: str,
    *,
    main_grad: Tensor | None = None,
) -> list[Tensor]:
    """[d_hidden, dW, db]; what is not needed, or added to main_grad, is an empty tensor."""
    group = ParallelGroup.by_name(group_name)
    options = LossOptions(vocab, start, ignore_index, label_smoothing, z_loss, soft_cap)

    def run() -> list[Tensor]:
        x, dtype = _gathered(hidden, labels, inner, group), wide(hidden.dtype)
        tiles = _Tiles(x, weight, bias, chunk_rows, options)
        dh = x.new_zeros(x.shape if need_hidden else (0,), dtype=dtype)
        separate = need_weight and main_grad is None
        dw = weight.new_zeros(weight.shape if separate else (0,))
        sums = dw if main_grad is None else main_grad
        db = weight.new_zeros(weight.shape[0] if need_bias else 0)
        for words in tiles.words():
            dw_tile = sums[words].to(dtype)  # itself where it is wide
            db_tile = db[words].to(dtype)
            for rows in tiles.rows():
                d = gradient_(
                    tiles.logits(rows, words),
                    labels[rows],
                    start + words.start,
                    saved[:, rows],
                    d_loss[rows],
                    options,
                )
                if need_bias:
                    db_tile += d.sum(0)
                d = tiles.narrow(d)
                if need_hidden:
                    _add_product(dh[rows], d, weight[words])
                if separate:
                    _add_product(dw_tile, d.t(), x[rows])
                elif need_weight:
                    add_weight_gradient(dw_tile, d, x[rows])
            if dtype != sums.dtype:
                sums[words] = dw_tile
            if dtype != db.dtype:
                db[words] = db_tile
        return [_reduced(dh.to(hidden.dtype), hidden, inner, group), dw, db]

    name = "host" if _host(hidden, group) else "reference"
    return group.run("linear_cross_entropy.backward", name, run)


def _reduced(dh: Tensor, hidden: Tensor, inner: int, group: ParallelGroup) -> Tensor:
    """Partial gradients [R, H] summed over the ranks, of the rows that `hidden` has; [0] stays."""
    if group.size == 1 or dh.dim() == 1:
        return dh
    if inner == 0:
        return collectives.all_reduce(dh, group, out=dh)
    return collectives.reduce_scatter(dh.view(-1, inner * dh.shape[1]), group).view(hidden.shape)


def _backward_fake(
    d_loss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    saved: Tensor,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    *_: Any,
) -> list[Tensor]:
    return [
        hidden.new_empty(hidden.shape if need_hidden else (0,)),
        weight.new_empty(weight.shape if need_weight else (0,)),
        weight.new_empty(weight.shape[0] if need_bias else 0),
    ]


_backward_op = register(
    "linear_cross_entropy_backward",
    "(Tensor d_loss, Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, Tensor saved, "
    "bool need_hidden, bool need_weight, bool need_bias, SymInt inner, int chunk_rows, "
    f"{SCHEMA}, str group) -> Tensor[]",
    _backward_kernel,
    _backward_fake,
)
_op = register(
    "linear_cross_entropy",
    "(Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, SymInt inner, int chunk_rows, "
    f"{SCHEMA}, str group) -> Tensor[]",
    _forward,
    _fake,
    _setup,
    _backward,
)
