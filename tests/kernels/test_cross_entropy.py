"""vocab_parallel_cross_entropy between processes, interpreted: float64, gradients, bits alike, late ranks."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import cross_entropy_body as body
from tests.kernels.body import DTYPES, REAL
from tests.kernels.test_collectives import alike
from tp_kernels import ShapeError, UnsupportedError
from tp_kernels.kernels import (
    CrossEntropyOptions,
    Workspace,
    WorkspaceShape,
    vocab_parallel_cross_entropy,
    vocab_parallel_cross_entropy_backward,
)

EXTREME = {"scale": 1e4}
CASES = [
    (2, {}),
    (3, {"smoothing": 0.1}),
    (3, {"z_loss": 1e-3, "smoothing": 0.3, "padded": True}),
    (2, {"padded": True, "masked": True}),
    (3, {"masked": True, "z_loss": 1e-3}),
    (2, EXTREME | {"smoothing": 0.1}),
    (3, EXTREME | {"masked": True}),
    (1, EXTREME | {"smoothing": 0.1, "z_loss": 1e-3}),
    (1, {"padded": True}),
]


@pytest.mark.parametrize(("case", "dtype"), list(zip(CASES, DTYPES * 3, strict=True)), ids=str)
def test_against_float64(interpreted, case, dtype):
    size, options = case
    alike(interpreted(size).run(body.loss, REAL, dtype, **options))


def test_same_bits_in_every_run(interpreted):
    first, second = (
        interpreted(2).run(body.loss, REAL, torch.float32, again=True, channels=channels)
        for channels in (1, 3)
    )
    assert first == second


@pytest.mark.parametrize("size", [1, 2])
def test_strange_rows(interpreted, size):
    interpreted(size).run(body.strange, REAL)


def test_slow_rank(interpreted):
    alike(interpreted(2).run(body.slow_rank, REAL, 1))


def test_absent_rank(interpreted):
    interpreted(2).run(body.absent_rank, REAL, 1)


def test_refused():
    shape = WorkspaceShape(2, channels=1, chunk=64)
    local = torch.zeros(shape.nbytes, dtype=torch.uint8)
    workspace = Workspace(shape, 0, local, [local.data_ptr()] * 2)
    logits, labels, options = (
        torch.ones(4, 5),
        torch.zeros(4, dtype=torch.int64),
        CrossEntropyOptions(9),
    )

    def forward(logits=logits, labels=labels):
        return vocab_parallel_cross_entropy(logits, labels, workspace, options)

    saved, ones = torch.ones(2, 4), torch.ones(4)

    def backward(d_loss=ones, logits=logits):
        return vocab_parallel_cross_entropy_backward(d_loss, logits, labels, saved, options)

    for function in (forward, backward):
        with pytest.raises(UnsupportedError, match="TRITON_INTERPRET=1"):  # not in this process
            function()
        with pytest.raises(ShapeError, match="logits are"):
            function(logits=logits[:3])
    with pytest.raises(ShapeError, match="int32"):
        forward(labels=labels.int())
    with pytest.raises(UnsupportedError, match="labels are on meta"):
        forward(labels=labels.to("meta"))
    with pytest.raises(UnsupportedError, match="float64"):
        forward(logits.double())
    with pytest.raises(ShapeError, match="takes their place"):
        backward(logits=torch.ones(5, 4).t())
    with pytest.raises(ShapeError, match="takes their place"):
        backward(logits=logits[:1].expand(4, 5))
    with pytest.raises(ShapeError, match="d_loss is"):
        backward(d_loss=labels)
    for wrong in ({"vocab": 0}, {"start": -1}, {"label_smoothing": 1.5}):
        with pytest.raises(ShapeError, match=next(iter(wrong))):
            CrossEntropyOptions(**{"vocab": 9} | wrong)
