"""Entry of the cross-entropy of logits whose columns are divided over ranks; see table.py.

Shapes are (rows, vocabulary). Some columns are padding, on the last ranks; they are NaN, as is what lies
between rows. Loss and gradient are compared with float64, see tests/kernels/cross_entropy_body.py.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.gpu.entry import Answer, Kernel, Operands
from tests.kernels.cross_entropy_body import IGNORED, float64
from tests.kernels.elementwise_body import allowance
from tp_kernels import split_sizes
from tp_kernels.kernels import (
    CrossEntropyOptions,
    Workspace,
    vocab_parallel_cross_entropy,
    vocab_parallel_cross_entropy_backward,
)

# Fewer columns than ranks on some; more rows than two channels have in a round; many columns.
SHAPES = ((21, 37), (130, 1000), (5000, 41), (67, 5003))
PADDING = 5
# With exp of a GPU: 2^-22 instead of 2 * 2^-24, and two roundings more of its argument.
APPROXIMATE = 2.5


def logits(world: int, shape: Any, dtype: torch.dtype, seed: int) -> list[Operands]:
    rows, vocab = shape
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(rows, vocab, generator=generator) * 3).to(dtype)
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    d_loss = torch.randn(rows, generator=generator)
    widths = split_sizes(vocab + PADDING, world)
    starts = [sum(widths[:rank]) for rank in range(world)]
    edges = sorted({start - 1 for start in starts[1:]} | set(starts) | {vocab - 1})
    edges = [label for label in edges if label < vocab][:rows]
    labels[: len(edges)] = torch.tensor(edges)
    labels[len(edges) : len(edges) + 3] = IGNORED
    operands = []
    for start, width in zip(starts, widths, strict=True):
        x = drawn.new_full((rows, width + 3), math.nan)[:, :width]
        mine = drawn[:, start : start + width]
        x[:, : mine.shape[1]] = mine
        options = CrossEntropyOptions(
            vocab, start, IGNORED, label_smoothing=0.1 * (seed % 2), z_loss=1e-3 * (seed % 3)
        )
        operands.append({"x": x, "labels": labels, "d_loss": d_loss, "options": options})
    return operands


def loss_and_gradient(workspace: Workspace, o: SimpleNamespace) -> tuple[Tensor, ...]:
    loss, saved = vocab_parallel_cross_entropy(o.x, o.labels, workspace, o.options)
    taken = o.x.clone()  # the gradient takes its place
    vocab_parallel_cross_entropy_backward(o.d_loss, taken, o.labels, saved, o.options)
    return loss, taken


def exact(operands: list[Operands]) -> list[tuple[Answer, ...]]:
    options, first = [one["options"] for one in operands], operands[0]
    widths = [its.width(one["x"].shape[1]) for its, one in zip(options, operands, strict=True)]
    whole = torch.cat([one["x"][:, :n] for one, n in zip(operands, widths, strict=True)], 1)
    smoothing, z_loss = options[0].label_smoothing, options[0].z_loss
    value, error, slope, slope_error = float64(
        whole, first["labels"], first["d_loss"], smoothing, z_loss
    )
    loss = Answer(value, allowance(torch.float32, value, APPROXIMATE * error))
    ignored = (first["labels"] == IGNORED)[:, None]
    answers = []
    for its, one, width in zip(options, operands, widths, strict=True):
        here = slice(its.start, its.start + width)
        gradient = torch.zeros(one["x"].shape, dtype=torch.float64)
        allowed = torch.zeros_like(gradient)
        gradient[:, :width] = slope[:, here]
        near = allowance(whole.dtype, slope[:, here], APPROXIMATE * slope_error[:, here])
        allowed[:, :width] = near * ~ignored
        answers.append((loss, Answer(gradient, allowed)))
    return answers


KERNELS = {
    "cross_entropy": Kernel(logits, loss_and_gradient, exact, SHAPES, SHAPES[:2], alike=1),
}
