"""all_gather_linear between real processes, interpreted: bounds, bits, chunks in any order, late ranks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.kernels import gather_body as body
from tests.kernels import gemm_body
from tests.kernels.body import REAL
from tests.oracle import Case
from tp_kernels.kernels import _copies, _signals

OPERATION = "all_gather_linear"
# Rows of one (which may be several), inner: less rows than ranks, tiles of two and of three ranks, several
# rounds of a channel.
SHAPES = [(1, 3), (5, 19), (41, 5), (20, 40)]


@pytest.mark.parametrize("size", [2, 3])
def test_against_float64(interpreted, size):
    cases = gemm_body.cases(OPERATION, size, 3)
    cases += [
        Case(OPERATION, (37,), 21, (17, 1, 9), (True,) * 3, dtype=torch.bfloat16, frozen="xwb")
    ]
    interpreted(size).run(body.against_float64, REAL, cases)


@pytest.mark.parametrize(("size", "widths"), [(2, (20, 3)), (3, (7,)), (3, (1, 3, 15))])
def test_bits(interpreted, size, widths):
    interpreted(size).run(body.exact, REAL, OPERATION, SHAPES, widths)


def test_nothing_to_multiply(interpreted):
    """Without rows, inner size or weights of this rank the others still get their rows."""
    interpreted(2).run(body.exact, REAL, OPERATION, [(0, 3), (3, 0), (5, 4)], (0,))


def test_activations(interpreted):
    interpreted(2).run(body.activations, REAL)


@pytest.mark.parametrize("unit", [1, 3])
def test_chunks_in_any_order(interpreted, unit):
    interpreted(3).run(body.chunks_in_any_order, REAL, OPERATION, (41 // unit, 7), unit)


@pytest.mark.parametrize("size", [2, 3])
def test_by_copies(interpreted, size):
    interpreted(size).run(body.by_copies, REAL, SHAPES)


@pytest.mark.parametrize("capturing", [False, True])
def test_flags_of_copies_on_a_gpu(capturing):
    """What torch takes: flat, contiguous, uint32 (its CUDASymmetricMemoryOps.cu)."""
    memory = torch.zeros(1024, dtype=torch.uint8)
    local, writes = mock.Mock(is_cpu=False, view=memory.view), []

    def write(tensor: torch.Tensor, offset: int, val: int, count: int = 1) -> None:
        assert tensor.dtype == torch.uint32 and tensor.dim() == 1 and tensor.is_contiguous()
        writes.append((4 * offset, val, count))

    torch_memory = mock.Mock(**{"memset32" if capturing else "stream_write_value32": write})
    with (
        mock.patch.object(torch._C._distributed_c10d, "_SymmetricMemory", torch_memory),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=capturing),
    ):
        _copies._raise_flag(local, 3)
    assert writes == [(_signals.DONE.value, 3, 1)]


def test_barrier(interpreted):
    """Nobody leaves before the last one comes."""
    ranks = interpreted(3).run(body.meet_and_count, REAL, 1)
    for turn in range(0, 6, 2):
        assert max(times[turn] for times in ranks) < min(times[turn + 1] for times in ranks)


def test_own_rows_first(interpreted):
    interpreted(3).run(body.own_rows_first, REAL)


@pytest.mark.parametrize(("size", "late"), [(2, 1), (3, 2)])
def test_back_to_back(interpreted, size, late):
    interpreted(size).run(body.back_to_back, REAL, OPERATION, late)


@pytest.mark.parametrize("epoch", [2**31 - 3, -3])
def test_epochs_wrap(interpreted, epoch):
    interpreted(2).run(body.back_to_back, REAL, OPERATION, 0, epoch=epoch)


@pytest.mark.parametrize("slow", [0, 1])
def test_slow_rank(interpreted, slow):
    interpreted(2).run(body.slow_rank, REAL, OPERATION, slow)


def test_slow_rank_with_one_buffer(interpreted):
    interpreted(2).run(body.slow_rank, REAL, OPERATION, 1, depth=1)


@pytest.mark.parametrize("size", [2, 3])
def test_among_other_operations(interpreted, size):
    interpreted(size).run(body.mixed)


def test_absent_rank(interpreted):
    records = interpreted(3).run(body.absent_rank, REAL, OPERATION, 1)
    assert records.pop(1) is None
    for rank, record in zip((0, 2), records, strict=True):
        assert (record["rank"], record["peer"], record["channel"]) == (rank, 1, 0)
        assert record["expected"] == record["seen"] + 1 == 2


def test_few_programs(interpreted):
    interpreted(2).run(body.few_programs, REAL, OPERATION)


def test_refused(interpreted):
    interpreted(2).run(body.refused)
