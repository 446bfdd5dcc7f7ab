"""vocab_parallel_cross_entropy: the loss of logits whose columns are divided over ranks.

    loss = log(S) + (1 - e) (M - t) + e (M - Z / V) + z (M + log(S))^2        0 where the label is ignored

M is the largest logit of a row over the whole vocabulary, S the sum of exp(logit - M), t the logit of the
label, Z the sum of logits, V the size of the vocabulary, e the label smoothing (Szegedy et al., 2016) and z
the weight of the z-loss (Chowdhery et al., 2022). Every rank measures (M, S, t, Z) of its columns; one
exchange of these 16 bytes a row brings them to all ranks, which merge them in rank order: the loss has the
same bits on all of them. The backward communicates nothing (Shoeybi et al., 2019):

    d_logits = d_loss (p (1 + 2 z (M + log(S))) - e / V - (1 - e) [column is the label])
    p = exp(logit - M) / S

In float32, of float64 logits in float64. kernels/cross_entropy.py does the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tp_kernels import dispatch
from tp_kernels.comm import collectives
from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.layout import split_range

from ._op import FLOATING, check_call, device_type, register, rows_of
from ._workspace import _kernels, agree, launch

REDUCTIONS = ("mean", "sum", "none")
IMPLEMENTATIONS = ("reference", "host", "triton")
# Of logits that are widened at a time: they stay in the cache from the first pass to the last.
BLOCK_BYTES = 1 << 20


class LossOptions(NamedTuple):
    """What forward and backward agree about, equal on all ranks but for `start`; see the public function."""

    vocab: int
    start: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    soft_cap: float | None

    def width(self, columns: int) -> int:
        """How many of the columns of this rank are not padding."""
        return max(0, min(columns, self.vocab - self.start))


# The fields above as the torch library takes them, and how many they are.
SCHEMA = (
    "int vocab, int start, int ignore_index, float label_smoothing, float z_loss, float? soft_cap"
)
FIELDS = len(LossOptions._fields)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    group: ParallelGroup,
    vocab_size: int,
    start: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    soft_cap: float | None = None,
    reduction: str = "mean",
    implementation: str = "auto",
) -> Tensor:
    """Cross entropy over the whole vocabulary, of which each rank has the logits of its words.

    Args:
        logits: [..., V_r], any width on any rank, also none; any floating dtype.
        labels: [...] int64 in the whole vocabulary, equal on all ranks.
        vocab_size: V. Columns beyond it pad a shard: they take no part and get the gradient 0.
        start: word of the first column of this rank; default: V divided by `split_range`, or in equal shards
            of ceil(V / W) words, the last ones padded.
        label_smoothing: 0 to 1, over all V words.
        z_loss: weight of the squared log of the normaliser.
        ignore_index: label of rows that do not count: loss and gradient are 0.
        soft_cap: logits become soft_cap * tanh(logits / soft_cap) (Gemma 2).
        reduction: "mean" over the rows that count, 0 if none does (torch: nan); "sum"; "none" for [...].
        implementation: "auto"; "reference" exchanges through the process group, "host" in shared memory;
            "triton" is kernels, which have no soft_cap. That of the group counts where it is one of these.

    Returns:
        float32 (float64 of float64 logits), the same bits on all ranks. The gradient of the logits is new
        memory: they stay as they are.

    Raises:
        ShapeError: shapes or options are wrong; on the CPU also labels outside the vocabulary. Elsewhere
            loss and gradient of such a row are NaN, since looking at labels would wait for the device.
    """
    operation = "vocab_parallel_cross_entropy"
    group = check_call(operation, group, implementation)
    if start is None:
        start = first_word(operation, group, logits.shape[-1] if logits.dim() else 0, vocab_size)
    options = LossOptions(vocab_size, start, ignore_index, label_smoothing, z_loss, soft_cap)
    check_options(operation, options, reduction)
    check_rows(operation, group, logits, labels, logits.shape[:-1])
    flat = rows_of(logits.resolve_neg())
    loss, _ = _op(flat, labels.reshape(-1), *options, group.name, implementation)
    return reduced(loss.view(labels.shape), labels, ignore_index, reduction)


def first_word(operation: str, group: ParallelGroup, width: int, vocab_size: int) -> int:
    """Of this rank, which has `width` words: divided by split_range, or in equal shards with padding.

    Where a rank cannot tell them apart they are the same, so ranks agree about what they take it for.
    """
    start, stop = split_range(vocab_size, group.size, group.rank)
    if width == stop - start:
        return start
    if width == -(-vocab_size // group.size):
        return width * group.rank
    raise ShapeError(
        f"{where(operation, group)}: {width} words, but this rank's are {stop - start} of {vocab_size}; pass "
        "start= for another division or for padded shards"
    )


def where(operation: str, group: ParallelGroup) -> str:
    """How messages begin; a function, as a compiler cannot format numbers that it keeps symbolic."""
    return f"{operation} on rank {group.rank} of {group.size}"


def check_options(operation: str, options: LossOptions, reduction: str) -> None:
    if options.vocab < 1 or options.start < 0 or not 0 <= options.label_smoothing <= 1:
        raise ShapeError(
            f"{operation}: {options}; expected vocab >= 1, start >= 0, label_smoothing 0 to 1"
        )
    if options.soft_cap is not None and not options.soft_cap > 0:
        raise ShapeError(f"{operation}: soft_cap={options.soft_cap}; use a positive number or None")
    if reduction not in REDUCTIONS:
        raise UnsupportedError(f"{operation}: reduction={reduction!r}; use 'mean', 'sum' or 'none'")


def check_rows(
    operation: str, group: ParallelGroup, x: Tensor, labels: Tensor, rows: Sequence[int]
) -> None:
    """Refuse labels that are not int64 [*rows], and x that is not floating on the same device."""
    if x.dim() == 0 or labels.shape != torch.Size(rows) or labels.dtype != torch.int64:
        raise ShapeError(
            f"{where(operation, group)}: labels are {tuple(labels.shape)} {labels.dtype} for "
            f"{tuple(x.shape)}; expected int64 {tuple(rows)}"
        )
    if x.dtype not in FLOATING or labels.device != x.device:
        raise UnsupportedError(
            f"{where(operation, group)}: {x.dtype} on {x.device}, labels on {labels.device}; expected "
            f"one device and a dtype of {FLOATING}"
        )


def check_words(operation: str, group: ParallelGroup, labels: Tensor, options: LossOptions) -> None:
    """Refuse labels outside the vocabulary that are not ignored, where looking at them is for free."""
    if not labels.is_cpu:
        return
    known = (labels == options.ignore_index) | ((labels >= 0) & (labels < options.vocab))
    if not known.all():
        raise ShapeError(
            f"{where(operation, group)}: labels {labels[~known][:5].tolist()} are "
            f"outside the vocabulary 0..{options.vocab - 1} and not ignore_index="
            f"{options.ignore_index}"
        )


def reduced(loss: Tensor, labels: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """`loss` [...] of every row -> as the public functions return it."""
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (labels != ignore_index).sum().clamp(min=1)


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which losses of logits of `dtype` are computed."""
    return torch.promote_types(dtype, torch.float32)


def measure_(x: Tensor, labels: Tensor, start: int, options: LossOptions) -> Tensor:
    """(M, S, t, Z) of some columns, [4, R]; x [R, C] wide logits of words start, ...; x is destroyed.

    Z is 0 where no smoothing needs it: it may be infinite.
    """
    measures = x.new_zeros(4, x.shape[0])
    if x.shape[1] == 0:
        measures[0] = -torch.inf
        return measures
    if options.soft_cap is not None:
        x.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
    place, here = places(labels, start, x.shape[1])
    torch.where(here, x.gather(1, place).squeeze(1), measures[2], out=measures[2])
    if options.label_smoothing:
        torch.sum(x, 1, out=measures[3])
    torch.amax(x, 1, out=measures[0])
    x.sub_(finite(measures[0])[:, None]).exp_()
    torch.sum(x, 1, out=measures[1])
    return measures


def places(labels: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    """Columns [R, 1] of the labels in words start, ..., and which rows [R] really have theirs there."""
    place = labels - start
    here = (place >= 0) & (place < columns)
    return place.clamp(0, columns - 1)[:, None], here


def finite(largest: Tensor) -> Tensor:
    """What to subtract from logits of which `largest` is the largest: not -inf, which would give NaN."""
    return torch.where(largest == -torch.inf, 0.0, largest)


def merge(one: Tensor, other: Tensor) -> Tensor:
    """Measures [4, R] of the columns of both (the sum of exponentials as Milakov and Gimelshein, 2018)."""
    result = one + other
    torch.maximum(one[0], other[0], out=result[0])
    base = finite(result[0])
    result[1] = one[1] * (one[0] - base).exp() + other[1] * (other[0] - base).exp()
    return result


def losses(
    measures: Tensor, labels: Tensor, options: LossOptions, group: ParallelGroup, host: bool
) -> list[Tensor]:
    """Measures [4, R] of this rank's columns -> the loss [R] and (M, S) [2, R]. Collective."""
    if group.size > 1 and labels.numel():
        gathered = _gather(measures.unsqueeze(0), group, host)
        measures = reduce(merge, gathered.unbind())
    ignored = labels == options.ignore_index
    known = ignored | ((labels >= 0) & (labels < options.vocab))
    base = finite(measures[0])
    sums = torch.where(known, measures[1], torch.nan)  # and with it all that follows
    logarithm = sums.log()
    loss = base - measures[2]
    if options.label_smoothing:
        mean = measures[3] / options.vocab
        loss = (1 - options.label_smoothing) * loss + options.label_smoothing * (base - mean)
    loss = loss + logarithm + options.z_loss * (base + logarithm).square()
    return [torch.where(ignored, 0.0, loss), torch.stack((base, sums))]


def _gather(x: Tensor, group: ParallelGroup, host: bool) -> Tensor:
    """[1, ...] of every rank -> [W, ...]."""
    ones = [1] * group.size
    if host:
        return collectives.all_gather(x, group, counts=ones)
    group.transport.agree("all_gather", x, *x.shape)
    return group.transport.all_gather(x.view(1, -1), ones).wait().view(group.size, *x.shape[1:])


def gradient_(
    x: Tensor, labels: Tensor, start: int, saved: Tensor, d_loss: Tensor, options: LossOptions
) -> Tensor:
    """The gradient of x [R, C], wide logits of words start, ..., in their memory.

    saved: (M, S) [2, R]; d_loss: [R], wide.
    """
    if x.shape[1] == 0:
        return x
    slope = None
    if options.soft_cap is not None:
        x.div_(options.soft_cap).tanh_()
        slope = x.square().neg_().add_(1)
        x.mul_(options.soft_cap)
    base, sums = saved
    factor = d_loss / sums
    if options.z_loss:
        factor = factor * (1 + 2 * options.z_loss * (base + sums.log()))
    x.sub_(base[:, None]).exp_().mul_(factor[:, None])
    if options.label_smoothing:
        x.sub_((d_loss * (options.label_smoothing / options.vocab))[:, None])
    place, here = places(labels, start, x.shape[1])
    picked = torch.where(here, d_loss * (options.label_smoothing - 1), 0.0)
    x.scatter_(1, place, x.gather(1, place) + picked[:, None])  # repeatable on a GPU, too
    if slope is not None:
        x.mul_(slope)
    return x.masked_fill_((labels == options.ignore_index)[:, None], 0.0)


def _row_blocks(x: Tensor) -> Iterator[slice]:
    size = max(1, BLOCK_BYTES // (max(1, x.shape[1]) * wide(x.dtype).itemsize))
    for first in range(0, x.shape[0], size):
        yield slice(first, first + size)


def _choose(group: ParallelGroup, implementation: str, like: Tensor, capped: bool) -> str:
    """One of IMPLEMENTATIONS, from what is equal on all ranks."""
    asked = group.implementation if implementation == "auto" else implementation
    if asked not in IMPLEMENTATIONS:
        if implementation != "auto":
            raise UnsupportedError(
                f"vocab_parallel_cross_entropy: implementation={asked!r}; the loss has "
                f"{', '.join(IMPLEMENTATIONS)}; use 'auto'"
            )
        asked = "auto"
    if group.size == 1:
        return "reference"
    device = device_type(like)
    shared = group.memory is not None and like.is_cpu
    obstacles = {
        "reference": None,
        "host": None if shared else f"{device} tensors, {group.provider_reason}",
        "triton": "its kernels have no soft_cap"
        if capped
        else dispatch.obstacle("triton", group, 4, like.dtype, device),
    }
    if asked == "auto":
        if dispatch.TRITON_PROVEN and device != "cpu" and obstacles["triton"] is None:
            return "triton"
        return "host" if shared else "reference"
    if obstacles[asked]:
        raise UnsupportedError(
            f"vocab_parallel_cross_entropy: implementation={asked!r} cannot run on rank "
            f"{group.rank}: {obstacles[asked]}; use implementation='reference'"
        )
    return asked


def _forward(
    logits: Tensor,
    labels: Tensor,
    vocab: int,
    start: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float | None,
    group_name: str,
    implementation: str,
) -> list[Tensor]:
    """The loss [R] and (M, S) [2, R]."""
    group = ParallelGroup.by_name(group_name)
    options = LossOptions(vocab, start, ignore_index, label_smoothing, z_loss, soft_cap)
    check_words("vocab_parallel_cross_entropy", group, labels, options)
    name = _choose(group, implementation, logits, soft_cap is not None)
    function = _by_kernels if name == "triton" else _by_torch
    return group.run(
        "vocab_parallel_cross_entropy",
        name,
        function,
        logits,
        labels,
        options,
        group,
        name == "host",
    )


def _by_torch(
    logits: Tensor, labels: Tensor, options: LossOptions, group: ParallelGroup, host: bool
) -> list[Tensor]:
    dtype, width = wide(logits.dtype), options.width(logits.shape[1])
    measures = logits.new_empty(4, logits.shape[0], dtype=dtype)
    for rows in _row_blocks(logits):
        block = logits[rows, :width].to(dtype, copy=True)
        measures[:, rows] = measure_(block, labels[rows], options.start, options)
    return losses(measures, labels, options, group, host)


def _by_kernels(
    logits: Tensor, labels: Tensor, options: LossOptions, group: ParallelGroup, host: bool
) -> list[Tensor]:
    agree(group, "vocab_parallel_cross_entropy", logits, 4, [labels.numel()])
    settings = _kernels().CrossEntropyOptions(*options[:-1])
    return list(
        launch(
            group, logits, "vocab_parallel_cross_entropy", logits.detach(), labels, options=settings
        )
    )


def _fake(logits: Tensor, labels: Tensor, *_: Any) -> list[Tensor]:
    loss = labels.new_empty(labels.shape, dtype=wide(logits.dtype))
    return [loss, loss.new_empty(2, labels.shape[0])]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    logits, labels, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, labels, output[1])


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    logits, labels, saved = ctx.saved_tensors
    d_logits = None
    if gradients[0] is not None:
        d_logits = _backward_op(gradients[0].resolve_neg(), logits, labels, saved, *ctx.rest)
    return (d_logits, *[None] * (1 + len(ctx.rest)))


def _backward_kernel(
    d_loss: Tensor,
    logits: Tensor,
    labels: Tensor,
    saved: Tensor,
    vocab: int,
    start: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float | None,
    group_name: str,
    implementation: str,
) -> Tensor:
    options = LossOptions(vocab, start, ignore_index, label_smoothing, z_loss, soft_cap)
    group = ParallelGroup.by_name(group_name)
    if _choose(group, implementation, logits, soft_cap is not None) == "triton":
        settings = _kernels().CrossEntropyOptions(*options[:-1])
        mine = logits.clone(memory_format=torch.contiguous_format)  # the kernel writes over them
        return _kernels().vocab_parallel_cross_entropy_backward(
            d_loss, mine, labels, saved, settings
        )
    dtype, width = wide(logits.dtype), options.width(logits.shape[1])
    out = logits.new_empty(logits.shape)
    out[:, width:] = 0
    for rows in _row_blocks(logits):
        place = out[rows, :width].copy_(logits[rows, :width])
        x = place.to(dtype)  # no copy of what is wide
        gradient_(x, labels[rows], start, saved[:, rows], d_loss[rows], options)
        if x is not place:
            place.copy_(x)
    return out


_backward_op = register(
    "vocab_parallel_cross_entropy_backward",
    f"(Tensor d_loss, Tensor logits, Tensor labels, Tensor saved, {SCHEMA}, str group, "
    "str implementation) -> Tensor",
    _backward_kernel,
    lambda d_loss, logits, *_: logits.new_empty(logits.shape),
)
_op = register(
    "vocab_parallel_cross_entropy",
    f"(Tensor logits, Tensor labels, {SCHEMA}, str group, str implementation) -> Tensor[]",
    _forward,
    _fake,
    _setup,
    _backward,
)
