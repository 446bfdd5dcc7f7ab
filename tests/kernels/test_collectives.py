"""Kernels between real processes, interpreted: bits, calls in a row, late and absent ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.kernels import body
from tests.kernels.body import OPERATIONS, REAL

# Fewer rows than ranks, rows that do not divide, several rounds of a channel, full chunks.
SHAPES = [(1, 3), (7, 5), (5, 64)]
ONE_ROUND = ["all_reduce_1", "reduce_scatter", "all_gather", "rms_norm_1"]  # for depth 1 too


def alike(by_rank: list[list[str]]) -> None:
    assert all(digests == by_rank[0] for digests in by_rank), "ranks have different bits"


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("size", [2, 3])
def test_bits(interpreted, size, operation):
    alike(interpreted(size).run(body.bits, REAL, operation, SHAPES))


def test_lengths(interpreted):
    interpreted(1).run(body.lengths)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_bits_of_four_ranks(interpreted, operation):
    alike(interpreted(4).run(body.bits, REAL, operation, [(3, 5)], body.DTYPES[1:2]))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("size", "late"), [(2, 1), (3, 2)])
def test_back_to_back(interpreted, size, late, operation):
    alike(interpreted(size).run(body.back_to_back, REAL, operation, late))


@pytest.mark.parametrize("epoch", [2**31 - 3, -3])
@pytest.mark.parametrize("operation", ["all_reduce_2", "all_gather"])
def test_epochs_wrap(interpreted, operation, epoch):
    alike(interpreted(2).run(body.back_to_back, REAL, operation, 0, epoch=epoch))


@pytest.mark.parametrize("operation", ONE_ROUND)
def test_slow_rank_with_one_buffer(interpreted, operation):
    alike(interpreted(2).run(body.slow_rank, REAL, operation, 1, depth=1, channels=1))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_slow_rank(interpreted, operation):
    alike(interpreted(2).run(body.slow_rank, REAL, operation, 1, channels=1))


@pytest.mark.parametrize("size", [2, 3])
def test_operations_in_turn_and_on_two_workspaces(interpreted, size):
    alike(interpreted(size).run(body.mixed))


def test_bits_of_the_host_engine(interpreted):
    interpreted(3).run(body.host_bits)


def test_layouts_and_nothing(interpreted):
    interpreted(2).run(body.layouts)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_absent_rank(interpreted, operation):
    records = interpreted(3).run(body.absent_rank, REAL, operation, 1)
    assert records.pop(1) is None
    for rank, record in zip((0, 2), records, strict=True):
        assert record["state"] == 2 and record["rank"] == rank and record["peer"] == 1
        assert (record["channel"], record["signal"]) == (0, 0)
        assert record["expected"] == record["seen"] + 1 > 1


@pytest.mark.parametrize("operation", ["all_reduce_1", "reduce_scatter", "all_gather"])
def test_no_credit(interpreted, operation):
    record, _ = interpreted(2).run(body.no_credit, REAL, operation)
    assert (record["peer"], record["expected"], record["seen"]) == (1, 1, 0)


def test_late_for_one(interpreted):
    interpreted(3).run(body.late_for_one, REAL, "all_reduce_2")


def test_one_rank():
    """Without a peer the interpreter need not run."""
    from tp_kernels.kernels.all_gather import all_gather
    from tp_kernels.kernels.all_reduce import all_reduce
    from tp_kernels.kernels.reduce_scatter import reduce_scatter
    from tp_kernels.kernels.workspace import Workspace, WorkspaceShape

    shape = WorkspaceShape(1, channels=1, chunk=64)
    local = torch.zeros(shape.nbytes, dtype=torch.uint8)
    workspace = Workspace(shape, 0, local, [local.data_ptr()])
    x = torch.randn(5, 3)
    for function in (all_reduce, reduce_scatter, all_gather):
        out = function(x, workspace)
        assert torch.equal(out, x) and out is not x


def test_triton_is_optional():
    code = "import sys, tp_kernels; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
