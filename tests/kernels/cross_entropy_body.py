"""What ranks do in the tests of vocab_parallel_cross_entropy; see elementwise_body.py for bounds."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.kernels.body import Kernels, gives_up, kernels, stalled
from tests.kernels.elementwise_body import close, leaves, module, small, w
from tests.oracle import digest

VOCAB = 37
# Columns of each rank, by number of ranks: unequal; more than the vocabulary has, and none.
SHARDS = {1: (37,), 2: (30, 7), 3: (11, 20, 6)}
PADDED = {1: (40,), 2: (20, 20), 3: (30, 0, 10)}
ROWS = 21  # more than two channels of the chunk below have in a round
IGNORED = -100


def problem(
    size: int, widths: tuple[int, ...], dtype: torch.dtype, scale: float, seed: int, masked: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [ROWS, VOCAB] of all ranks, labels with every edge of a shard among them, d_loss."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(ROWS, VOCAB, generator=generator) * scale).to(dtype)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    edges = {0, VOCAB - 1}
    for start in torch.tensor(widths).cumsum(0).tolist():
        edges |= {start - 1, start} & set(range(VOCAB))
    labels[: len(edges)] = torch.tensor(sorted(edges))
    labels[len(edges) : len(edges) + 3] = IGNORED
    if masked:  # whole shards and single columns
        logits[::3, : widths[0]] = -math.inf
        logits[1::3, ::2] = -math.inf
        logits[:, VOCAB - 1] = 0
        at = torch.arange(ROWS), labels.clamp(min=0)
        logits[at] = logits[at].nan_to_num(neginf=0.5)
    return logits, labels, torch.randn(ROWS, generator=generator)


def loss(
    package: str,
    dtype: torch.dtype,
    padded: bool = False,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 3.0,
    masked: bool = False,
    again: bool = False,
    **options: Any,
) -> list[str]:
    """Loss and gradient of this rank's columns within bounds; digests of what all ranks must have alike."""
    with kernels(package, **{"chunk": 128} | options) as k, small(package, TILE=16):
        widths = (PADDED if padded else SHARDS)[k.group.size]
        digests = []
        for seed in (0, 0) if again else (0,):
            digests.append(
                compare(k, problem(k.group.size, widths, dtype, scale, seed, masked), widths,
                        smoothing, z_loss)
            )  # fmt: skip
        k.expect(len(set(digests)) == 1, "another run, other bits")
        return digests[:1]


def compare(
    k: Kernels,
    given: tuple[Tensor, Tensor, Tensor],
    widths: tuple[int, ...],
    smoothing: float,
    z_loss: float,
) -> str:
    logits, labels, d_loss = given
    kernel, rank = k.module("cross_entropy"), k.group.rank
    start = sum(widths[:rank])
    settings = kernel.CrossEntropyOptions(VOCAB, start, IGNORED, smoothing, z_loss)
    where = (logits.dtype, widths, smoothing, z_loss, rank)
    # Rows further apart than they are long, of NaN where nothing must be read.
    mine = logits.new_full((ROWS, widths[rank] + 3), math.nan)[:, : widths[rank]]
    true = logits[:, start : start + widths[rank]]
    mine[:, : true.shape[1]] = true
    result, saved = kernel.vocab_parallel_cross_entropy(mine, labels, k.workspace, settings)
    kept = result.clone()
    out = kernel.vocab_parallel_cross_entropy_backward(d_loss, mine, labels, saved, settings)
    expected = kernel.reference(logits, labels, settings)
    k.expect(torch.allclose(expected, result, rtol=1e-5, atol=1e-5), *where, "reference")
    k.expect(out is mine and digest(result) == digest(kept), *where, "not in place")

    exact, allowed, d_exact, inner = float64(logits, labels, d_loss, smoothing, z_loss)
    try:
        close(result, exact, allowed, *where, "loss")
        part = slice(start, start + true.shape[1])
        close(mine[:, : true.shape[1]], d_exact[:, part], inner[:, part], *where, "gradient")
    except AssertionError as error:  # at the end, or the other ranks would wait
        k.expect(False, *where, str(error))
    k.expect(bool((mine[:, true.shape[1] :] == 0).all()), *where, "gradient of padding")
    counts = labels != IGNORED
    k.expect(not result[~counts].any() and not mine[~counts].any(), *where, "ignored")
    return digest(result, saved)


def float64(
    logits: Tensor, labels: Tensor, d_loss: Tensor, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss and gradient by torch, each with its error in float32; of the logits of all ranks."""
    (wide,) = leaves(logits)
    loss = cross_entropy(
        wide, labels, reduction="none", ignore_index=IGNORED, label_smoothing=smoothing
    )
    counts = labels != IGNORED
    loss = loss + torch.where(counts, z_loss * wide.logsumexp(-1).square(), 0.0)
    loss.backward(d_loss.double())
    formula, allowed, inner = errors(wide.detach(), labels, smoothing, z_loss)
    torch.testing.assert_close(loss.detach(), formula * counts)
    return loss.detach(), allowed * counts, wide.grad, inner * (counts * d_loss.abs())[:, None]


def errors(
    z: Tensor, labels: Tensor, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss by the formula of the kernel, its error in float32, and that of the gradient.

    exp(z - M) is multiplied up from exp(z - m) exp(m - m') ... with m growing to M: the errors of the
    differences add up to w |z - M|, and each factor has 3 w; they are fewer than columns and ranks.
    S: (V + 3 (V + 3)) w relatively for sum and factors, w sum(p |z - M|) for the differences (`relative`).
    log(S) has the relative error of S absolutely, and 2 w |log S| of its own.
    """
    vocab = z.shape[-1]
    largest = z.max(-1, keepdim=True).values
    distance = (largest - z).nan_to_num(posinf=0)
    p = (z - largest).exp()
    total = p.sum(-1, keepdim=True)
    p = p / total
    relative = (4 * vocab + 9) * w + w * (p * distance).sum(-1, keepdim=True)
    logarithm = total.log()
    rest = relative + 2 * w * logarithm.abs()
    target = z.gather(1, labels.clamp(min=0)[:, None])
    miss = largest - target
    mean = z.sum(-1, keepdim=True) / vocab if smoothing else torch.zeros_like(largest)
    size = z.abs().sum(-1, keepdim=True) / vocab if smoothing else torch.zeros_like(largest)
    normaliser = largest + logarithm
    square = z_loss * normaliser.square()
    picked = (1 - smoothing) * miss, smoothing * (largest - mean)
    value = logarithm + sum(picked) + square
    off = rest + w * normaliser.abs()  # of the normaliser
    error = rest + 4 * w * picked[0].abs()
    error = error + smoothing * ((vocab + 5) * w * size + 4 * w * largest.abs())
    error = error + 2 * z_loss * normaliser.abs() * off + 3 * w * square
    error = error + 3 * w * (logarithm.abs() + picked[0].abs() + picked[1].abs() + square)
    factor = 1 + 2 * z_loss * normaliser.abs()
    inner = p * (factor * (relative + w * distance + 10 * w) + 2 * z_loss * off)
    inner = inner + 5 * w * (smoothing / vocab + p * factor)
    inner.scatter_add_(1, labels.clamp(min=0)[:, None], torch.full_like(miss, 5 * w))
    return value.squeeze(-1), error.squeeze(-1), inner


def strange(package: str) -> None:
    """Labels outside the vocabulary and rows of -inf are NaN, not plausible; no rows are no launch."""
    with kernels(package) as k:
        kernel, size, rank = k.module("cross_entropy"), k.group.size, k.group.rank
        settings = kernel.CrossEntropyOptions(3 * size, 3 * rank)
        logits, labels = torch.ones(5, 3), torch.tensor([0, -1, 3 * size, 1, 2])
        logits[3] = -math.inf
        result, saved = kernel.vocab_parallel_cross_entropy(logits, labels, k.workspace, settings)
        bad = torch.tensor([False, True, True, True, False])
        k.expect(torch.equal(result.isnan(), bad), result)
        kernel.vocab_parallel_cross_entropy_backward(torch.ones(5), logits, labels, saved, settings)
        k.expect(torch.equal(logits.isnan(), bad[:, None].expand(5, 3)), logits)
        none = torch.empty(0, 3)
        result, saved = kernel.vocab_parallel_cross_entropy(none, labels[:0], k.workspace, settings)
        k.expect(result.shape == (0,) and saved.shape == (2, 0))
        kernel.vocab_parallel_cross_entropy_backward(result, none, labels[:0], saved, settings)


def slow_rank(package: str, slow: int) -> list[str]:
    """Several calls in a row, rank `slow` resting after each signal; one buffer."""
    digests = []
    with kernels(package, depth=1, channels=1) as k:
        resting = stalled(k, 0.05) if k.group.rank == slow else nullcontext()
        widths = SHARDS[k.group.size]
        for seed in range(2):
            given = problem(k.group.size, widths, torch.float32, 3.0, seed, False)
            with resting if seed == 0 else nullcontext():
                digests.append(compare(k, given, widths, 0.1, 1e-3))
            time.sleep(0.02 * (k.group.rank == slow))
    return digests


def absent_rank(package: str, absent: int) -> str:
    """The others raise, naming the operation and the rank."""
    with kernels(package, timeout=0.3) as k:
        kernel = k.module("cross_entropy")
        if k.group.rank != absent:
            options = kernel.CrossEntropyOptions(9)
            with gives_up(f"waited for data of rank {absent} "):
                labels = torch.zeros(2, dtype=torch.int64)
                kernel.vocab_parallel_cross_entropy(torch.ones(2, 3), labels, k.workspace, options)
    return module(package, "workspace").__name__
