"""linear_all_reduce between real processes, interpreted: bounds, bits alike on all ranks, late ranks."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import gemm_body as body
from tests.kernels.body import REAL
from tests.kernels.test_collectives import alike
from tp_kernels import UnsupportedError
from tp_kernels.kernels.linear_all_reduce import linear_all_reduce
from tp_kernels.kernels.workspace import Workspace, WorkspaceShape

OPERATION, TWO_SHOTS = "linear_all_reduce", "linear_all_reduce_2"
# Rows, width, inner: one row, a ragged tile, several for each program.
SHAPES = [(1, 3, 2), (19, 21, 19), (50, 33, 5)]


@pytest.mark.parametrize("size", [2, 3])
def test_against_float64(interpreted, size):
    alike(interpreted(size).run(body.against_float64, REAL, OPERATION, body.cases(OPERATION, 0, 3)))


def test_same_bits_in_every_run(interpreted):
    cases = body.cases(OPERATION, 4, 1)
    first, *others = (
        interpreted(2).run(
            body.against_float64, REAL, OPERATION, cases, again=True, channels=channels
        )
        for channels in (1, 5)
    )
    assert all(other == first for other in others)


@pytest.mark.parametrize("size", [2, 3])
def test_bits(interpreted, size):
    alike(interpreted(size).run(body.exact, REAL, OPERATION, SHAPES))


@pytest.mark.parametrize("size", [2, 3])
def test_bits_in_two_shots(interpreted, size):
    alike(interpreted(size).run(body.exact, REAL, TWO_SHOTS, SHAPES, depth=4))


def test_two_shots_against_float64(interpreted):
    cases = body.cases(TWO_SHOTS, 3, 1)
    two = interpreted(3).run(body.against_float64, REAL, TWO_SHOTS, cases, depth=8)
    assert two == interpreted(3).run(body.against_float64, REAL, OPERATION, cases)


@pytest.mark.parametrize("operation", [OPERATION, TWO_SHOTS])
def test_several_pairs(interpreted, operation):
    alike(interpreted(2).run(body.several_pairs, REAL, operation, depth=4))


@pytest.mark.parametrize("operation", [OPERATION, TWO_SHOTS])
@pytest.mark.parametrize(("size", "late"), [(2, 1), (3, 2)])
def test_back_to_back(interpreted, operation, size, late):
    alike(interpreted(size).run(body.back_to_back, REAL, operation, late, depth=4))


@pytest.mark.parametrize("operation", [OPERATION, TWO_SHOTS])
def test_epochs_wrap(interpreted, operation):
    alike(interpreted(2).run(body.back_to_back, REAL, operation, 0, epoch=2**31 - 3, depth=4))


@pytest.mark.parametrize(("operation", "depth"), [(OPERATION, 2), (TWO_SHOTS, 4)])
@pytest.mark.parametrize("slow", [0, 1])
def test_slow_rank(interpreted, operation, depth, slow):
    alike(interpreted(2).run(body.slow_rank, REAL, operation, slow, depth=depth))


def test_among_other_operations(interpreted):
    alike(interpreted(3).run(body.interleaved, OPERATION))


def test_absent_rank(interpreted):
    records = interpreted(3).run(body.absent_rank, OPERATION, 1)
    assert records.pop(1) is None
    for rank, record in zip((0, 2), records, strict=True):
        assert (record["rank"], record["peer"], record["channel"]) == (rank, 1, 0)
        assert record["expected"] == record["seen"] + 1 == 2


def test_refused(interpreted):
    interpreted(2).run(body.refused, OPERATION)


def test_shots_refused():
    x, workspace = torch.ones(2, 3), one_rank()
    with pytest.raises(UnsupportedError, match="shots=3"):
        linear_all_reduce(x, x, workspace, shots=3)
    with pytest.raises(UnsupportedError, match="depth 4"):
        linear_all_reduce(x, x, workspace, shots=2)


def one_rank() -> Workspace:
    shape = WorkspaceShape(1, channels=1, chunk=64)
    local = torch.zeros(shape.nbytes, dtype=torch.uint8)
    return Workspace(shape, 0, local, [local.data_ptr()])


def test_one_rank():
    """The bits of the dense layer; without a peer the interpreter need not run."""
    x, w, bias = torch.randn(5, 3), torch.randn(4, 3), torch.randn(4)
    y = linear_all_reduce(x, w, one_rank(), bias=bias)
    assert torch.equal(y, torch.nn.functional.linear(x, w, bias))
