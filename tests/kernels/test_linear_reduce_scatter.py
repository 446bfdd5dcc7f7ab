"""linear_reduce_scatter between real processes, interpreted: bounds, bits, calls in a row, late ranks."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import gemm_body as body
from tests.kernels.body import REAL
from tests.oracle import Case

OPERATION = "linear_reduce_scatter"
# Rows, width, inner: less rows than ranks, one tile, a ragged one, several for each program.
SHAPES = [(1, 3, 2), (37, 21, 19), (82, 33, 5)]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("size", [2, 3])
def test_against_float64(interpreted, size, seed):
    interpreted(size).run(body.against_float64, REAL, OPERATION, body.cases(OPERATION, 6 * seed, 2))


def test_same_bits_in_every_run(interpreted):
    cases = body.cases(OPERATION, 4, 1)
    first, *others = (
        interpreted(2).run(
            body.against_float64, REAL, OPERATION, cases, again=True, channels=channels
        )
        for channels in (1, 2, 5)
    )
    assert all(other == first for other in others)


@pytest.mark.parametrize("size", [2, 3])
def test_bits(interpreted, size):
    interpreted(size).run(body.exact, REAL, OPERATION, SHAPES)


@pytest.mark.parametrize("size", [2, 3])
def test_several_pairs(interpreted, size):
    """And parts of several rows, as of inputs of more than two dimensions."""
    interpreted(size).run(body.several_pairs, REAL, OPERATION, unit=7, transposed=size == 3)


@pytest.mark.parametrize("depth", [4, 8])
def test_more_buffers(interpreted, depth):
    interpreted(2).run(body.exact, REAL, OPERATION, SHAPES[-1:], depth=depth, channels=1)


def test_tiles_of_other_sizes(interpreted):
    from tp_kernels.kernels._gemm import Tiling

    for tiling in (Tiling(32, 16, 64, 2, 1, 3, 1), Tiling(16, 64, 32, 1, 1, 1, 8)):
        cases = [Case(OPERATION, (50,), 70, (67,), dtype=torch.bfloat16, frozen="xwb")]
        interpreted(2).run(
            body.against_float64, REAL, OPERATION, cases, tiling=tiling, chunk=4096, channels=9
        )


@pytest.mark.parametrize(("size", "late"), [(2, 1), (3, 2)])
def test_back_to_back(interpreted, size, late):
    interpreted(size).run(body.back_to_back, REAL, OPERATION, late)


@pytest.mark.parametrize("epoch", [2**31 - 3, -3])
def test_epochs_wrap(interpreted, epoch):
    interpreted(2).run(body.back_to_back, REAL, OPERATION, 0, epoch=epoch)


@pytest.mark.parametrize("slow", [0, 1])
def test_slow_rank(interpreted, slow):
    interpreted(2).run(body.slow_rank, REAL, OPERATION, slow)


@pytest.mark.parametrize("size", [2, 3])
def test_among_other_operations(interpreted, size):
    interpreted(size).run(body.interleaved, OPERATION)


def test_absent_rank(interpreted):
    records = interpreted(3).run(body.absent_rank, OPERATION, 1)
    assert records.pop(1) is None
    for rank, record in zip((0, 2), records, strict=True):
        assert (record["rank"], record["peer"], record["channel"]) == (rank, 1, 0)
        assert record["expected"] == record["seen"] + 1 == 2


def test_refused(interpreted):
    interpreted(2).run(body.refused, OPERATION)


def test_one_rank():
    """The bits of the dense layer; without a peer the interpreter need not run."""
    from tp_kernels.kernels.linear_reduce_scatter import linear_reduce_scatter
    from tp_kernels.kernels.workspace import Workspace, WorkspaceShape

    shape = WorkspaceShape(1, channels=1, chunk=64)
    local = torch.zeros(shape.nbytes, dtype=torch.uint8)
    workspace = Workspace(shape, 0, local, [local.data_ptr()])
    x, w, bias = torch.randn(5, 3), torch.randn(4, 3), torch.randn(4)
    y = linear_reduce_scatter(x, w, workspace, bias=bias)
    assert torch.equal(y, torch.nn.functional.linear(x, w, bias))
