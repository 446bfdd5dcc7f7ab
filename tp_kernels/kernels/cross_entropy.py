"""vocab_parallel_cross_entropy: the loss of logits whose columns are divided over ranks.

    loss = log(S) + (1 - e) (M - t) + e (M - Z / V) + z (M + log(S))^2        0 where the label is ignored

M is the largest logit of a row over the whole vocabulary, S the sum of exp(logit - M), t the logit of the
label, Z the sum of logits, V the size of the vocabulary, e the label smoothing (Szegedy et al., 2016) and z
the weight of the z-loss (Chowdhery et al., 2022). In float32, in three launches of which the second
communicates:

    measure    every rank, in one pass over its columns: maximum, sum of exponentials (online, as Milakov and
               Gimelshein, 2018), logit of the label, sum of logits
    combine    these four of all ranks, in one exchange of 16 bytes a row and peer, combined in rank order:
               loss, M and S have the same bits on all ranks
    gradient   d_logits = d_loss (p (1 + 2 z (M + log(S))) - e / V - (1 - e) [column is the label]) with
               p = exp(logit - M) / S, written over the logits; nothing is communicated

(Shoeybi et al., 2019, with three all-reduces.) Columns beyond the vocabulary, which pad a shard, take no
part and get the gradient 0. A label that is neither in the vocabulary nor ignored makes loss and gradient
of its row NaN, and so does a row of nothing but -inf.

Limits: labels are int64, and nobody checks that the ranks have every column of the vocabulary once. Graphs:
see _signals.py and _launch.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_kernels.comm.errors import ShapeError, UnsupportedError

from ._device import narrow, widen
from ._launch import launch, rows_of, tile_at, tiles, tiling
from ._rounds import receive, send
from ._signals import CREDIT, READY, enter, leave, observe, publish
from .workspace import WARPS, Workspace, check_operand, tile


@dataclass(frozen=True)
class CrossEntropyOptions:
    """What loss and gradient agree about; equal on all ranks but for `start`.

    Args:
        vocab: size of the whole vocabulary, without padding.
        start: label of the first column of this rank.
        ignore_index: label of rows that do not count.
        label_smoothing: 0 to 1.
        z_loss: weight of the squared log of the normaliser.
    """

    vocab: int
    start: int = 0
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if self.vocab < 1 or self.start < 0 or not 0 <= self.label_smoothing <= 1:
            raise ShapeError(f"{self}: expected vocab >= 1, start >= 0, label_smoothing 0 to 1")

    def width(self, columns: int) -> int:
        """How many of the columns of this rank are not padding."""
        return max(0, min(columns, self.vocab - self.start))


def reference(logits: Tensor, labels: Tensor, options: CrossEntropyOptions) -> Tensor:
    """The loss [R] for the logits [R, vocab] of all ranks together, differentiable."""
    wide = logits.float()
    ignored, smoothing = options.ignore_index, options.label_smoothing
    loss = torch.nn.functional.cross_entropy(
        wide, labels, ignore_index=ignored, reduction="none", label_smoothing=smoothing
    )
    return loss + torch.where(labels == ignored, 0.0, options.z_loss * wide.logsumexp(-1) ** 2)


@triton.jit
def measure(
    logits, labels, measures, rows, width, start, ignore_index, logits_row,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes one row of logits [rows, width]; labels [rows]; measures [4, rows]."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    logits += row * logits_row
    largest = tl.full([], float("-inf"), tl.float32)
    sums = tl.full([BLOCK], 0.0, tl.float32)
    totals = tl.full([BLOCK], 0.0, tl.float32)
    for first in range(0, tl.where(label == ignore_index, 0, width), BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = column < width
        value = widen(tl.load(logits + column, mask=mask, other=0.0))
        totals += value
        value = tl.where(mask, value, float("-inf"))
        larger = tl.maximum(largest, tl.max(value, axis=0))
        base = tl.where(larger == float("-inf"), 0.0, larger)  # or -inf - -inf
        sums = sums * tl.exp(largest - base) + tl.exp(value - base)
        largest = larger
    place = label - start
    here = (place >= 0) & (place < width)
    tl.store(measures + row, largest)
    measures += rows
    tl.store(measures + row, tl.sum(sums, axis=0))
    measures += rows
    tl.store(measures + row, widen(tl.load(logits + place, mask=here, other=0.0)))
    measures += rows
    tl.store(measures + row, tl.sum(totals, axis=0))


@triton.jit(do_not_specialize=["rank", "timeout"])
def combine(
    measures, labels, loss, saved, count, vocab, ignore_index, smoothing, z_loss, part,
    table, record, rank, timeout,
    OPERATION: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, SMOOTHED: tl.constexpr,
):  # fmt: skip
    """measures [4, count]; labels, loss [count]; saved [2, count]; a round takes `part` rows."""
    channel = tl.program_id(0).to(tl.int64)
    epoch, alive = enter(table, record, rank, channel, STRIDE, LANES)
    first = channel * part
    while (first < count) & alive:
        length = tl.minimum(count - first, part).to(tl.int32)
        epoch += 1
        alive = observe(
            table, record, rank, channel, CREDIT, epoch - DEPTH, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        for start in range(0, part, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = (offsets < length) & alive
            for kind in tl.static_range(4):
                own = measures + kind * count + first + offsets
                value = tl.load(own, mask=mask, other=0.0)
                for step in range(0, WORLD):  # also to itself, so that all are read alike
                    send(
                        value, table, (rank + step) % WORLD, rank, channel, epoch,
                        kind * part + offsets, mask, WORLD, STRIDE, DEPTH, CHUNK,
                    )  # fmt: skip
        publish(table, rank, channel, READY, epoch, alive, WORLD, STRIDE, LANES)
        alive = observe(
            table, record, rank, channel, READY, epoch, alive, timeout,
            OPERATION, WORLD, STRIDE, LANES,
        )  # fmt: skip
        for start in range(0, part, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = (offsets < length) & alive
            largest = tl.full([BLOCK], float("-inf"), tl.float32)
            for source in range(0, WORLD):
                theirs = receive(
                    tl.float32, table, source, rank, channel, epoch, offsets, mask,
                    WORLD, STRIDE, DEPTH, CHUNK,
                )  # fmt: skip
                largest = tl.maximum(largest, theirs)
            base = tl.where(largest == float("-inf"), 0.0, largest)
            sums = tl.full([BLOCK], 0.0, tl.float32)
            target = tl.full([BLOCK], 0.0, tl.float32)
            total = tl.full([BLOCK], 0.0, tl.float32)
            for source in range(0, WORLD):
                maximum = receive(
                    tl.float32, table, source, rank, channel, epoch, offsets, mask,
                    WORLD, STRIDE, DEPTH, CHUNK,
                )  # fmt: skip
                partial = receive(
                    tl.float32, table, source, rank, channel, epoch, part + offsets, mask,
                    WORLD, STRIDE, DEPTH, CHUNK,
                )  # fmt: skip
                sums += partial * tl.exp(maximum - base)
                target += receive(
                    tl.float32, table, source, rank, channel, epoch, 2 * part + offsets, mask,
                    WORLD, STRIDE, DEPTH, CHUNK,
                )  # fmt: skip
                total += receive(
                    tl.float32, table, source, rank, channel, epoch, 3 * part + offsets, mask,
                    WORLD, STRIDE, DEPTH, CHUNK,
                )  # fmt: skip
            label = tl.load(labels + first + offsets, mask=mask, other=ignore_index)
            ignored = label == ignore_index
            known = ignored | ((label >= 0) & (label < vocab))
            sums = tl.where(known, tl.where(ignored, 1.0, sums), float("nan"))
            logarithm = tl.log(sums)
            value = base - target
            if SMOOTHED:  # not times 0, as the sum may be infinite
                value = (1.0 - smoothing) * value + smoothing * (base - total / vocab)
            normaliser = base + logarithm
            value += logarithm + z_loss * normaliser * normaliser
            tl.store(loss + first + offsets, tl.where(ignored, 0.0, value), mask=mask)
            tl.store(saved + first + offsets, base, mask=mask)
            tl.store(saved + count + first + offsets, sums, mask=mask)
        publish(table, rank, channel, CREDIT, epoch, alive, WORLD, STRIDE, LANES)
        first += tl.num_programs(0) * part
    leave(table, rank, channel, epoch, alive, STRIDE)


@triton.jit
def gradient(
    logits, labels, saved, d_loss, rows, columns, width, start, vocab, ignore_index,
    smoothing, z_loss, logits_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """logits [rows, columns], of which `width` are no padding, become their gradient; d_loss [rows]."""
    row, column, mask = tile_at(rows, columns, ROWS, COLUMNS)
    label = tl.load(labels + row, mask=row < rows, other=ignore_index)
    base = tl.load(saved + row, mask=row < rows, other=0.0)
    sums = tl.load(saved + rows + row, mask=row < rows, other=1.0)
    scale = tl.load(d_loss + row, mask=row < rows, other=0.0)
    place = logits + row * logits_row + column
    p = tl.exp(widen(tl.load(place, mask=mask, other=0.0)) - base) / sums
    value = p * (1.0 + 2.0 * z_loss * (base + tl.log(sums))) - smoothing / vocab
    value -= tl.where(column == label - start, 1.0 - smoothing, 0.0)
    value = tl.where((label != ignore_index) & (column < width), value * scale, 0.0)
    tl.store(place, narrow(value, logits.dtype.element_ty), mask=mask)


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, workspace: Workspace, options: CrossEntropyOptions
) -> tuple[Tensor, Tensor]:
    """Loss of every row, the same bits on all ranks. Collective.

    Args:
        logits: [..., V_r], the columns of this rank, any number of them; float32, bfloat16 or float16.
        labels: [...] int64, of the whole vocabulary; equal on all ranks.

    Returns:
        loss: [...] float32; the mean over rows that count is the caller's.
        saved: [2, R] float32 for the backward: M and S of every row.

    Raises:
        ShapeError, UnsupportedError: before anything is sent.
        CollectiveTimeoutError: interpreted, as `Workspace.launch`.
    """
    operation = "cross_entropy"
    check_operand(operation, workspace, logits)
    _check_labels(logits, labels)
    xs, flat = rows_of(logits), labels.contiguous()
    rows, width = len(xs), options.width(xs.shape[1])
    loss = logits.new_empty(labels.shape, dtype=torch.float32)
    saved = logits.new_empty((2, rows), dtype=torch.float32)
    if rows == 0:
        return loss, saved
    measures = logits.new_empty((4, rows), dtype=torch.float32)
    launch(
        measure, operation, rows,
        xs, flat, measures, rows, width, options.start, options.ignore_index, xs.stride(0),
        BLOCK=tiling(width)["COLUMNS"],
    )  # fmt: skip
    block = tile(measures.dtype)
    part, programs = workspace.divide(rows, 16, block)
    workspace.launch(
        combine, operation, programs,
        measures, flat, loss, saved, rows, options.vocab, options.ignore_index,
        options.label_smoothing, options.z_loss, part,
        warps=WARPS, BLOCK=block, SMOOTHED=options.label_smoothing > 0,
    )  # fmt: skip
    return loss, saved


def vocab_parallel_cross_entropy_backward(
    d_loss: Tensor, logits: Tensor, labels: Tensor, saved: Tensor, options: CrossEntropyOptions
) -> Tensor:
    """The gradient of the logits, in their memory, for d_loss [...] float32; returns `logits`.

    Other arguments as the forward had and returned them; logits need rows of one distance.
    """
    operation = "cross_entropy_backward"
    _check_labels(logits, labels)
    xs = rows_of(logits)
    rows, columns = xs.shape
    if xs.data_ptr() != logits.data_ptr() or (rows > 1 and xs.stride(0) < columns):
        raise ShapeError(
            f"{operation}: logits have strides {logits.stride()}; the gradient takes their place, "
            "which needs adjacent elements in rows of one distance"
        )
    if d_loss.shape != labels.shape or d_loss.dtype != torch.float32:
        raise ShapeError(
            f"{operation}: d_loss is {tuple(d_loss.shape)} {d_loss.dtype}, expected "
            f"{tuple(labels.shape)} float32"
        )
    sizes = tiling(columns)
    launch(
        gradient, operation, tiles(rows, columns, **sizes),
        xs, labels.contiguous(), saved, d_loss.contiguous(), rows, columns, options.width(columns),
        options.start, options.vocab, options.ignore_index, options.label_smoothing,
        options.z_loss, xs.stride(0), **sizes,
    )  # fmt: skip
    return logits


def _check_labels(logits: Tensor, labels: Tensor) -> None:
    if logits.dim() == 0 or labels.shape != logits.shape[:-1] or labels.dtype != torch.int64:
        raise ShapeError(
            f"cross_entropy: logits are {tuple(logits.shape)}, labels {tuple(labels.shape)} "
            f"{labels.dtype}; expected [..., V] and [...] int64"
        )
    if labels.device != logits.device:
        raise UnsupportedError(
            f"cross_entropy: labels are on {labels.device}, logits on {logits.device}"
        )
