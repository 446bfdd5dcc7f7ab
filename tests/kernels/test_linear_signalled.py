"""Products that signal by groups of rows, waits for a group, and sums of parts, interpreted."""

from __future__ import annotations

import pytest

from tests.kernels import signalled_body as body
from tests.kernels.body import REAL


@pytest.mark.parametrize("seed", range(6))
def test_bits_and_counters(interpreted, seed):
    interpreted(1).run(body.exact, REAL, seed, programs=(1, 3, 65535)[seed % 3])


def test_tiles_of_other_sizes(interpreted):
    interpreted(1).run(body.exact, REAL, 7, block_m=32, block_k=32, group=1, programs=4)
    interpreted(1).run(body.exact, REAL, 8, block_n=64, group=8)


def test_group_after_group(interpreted):
    interpreted(1).run(body.by_groups, REAL)


def test_several_pairs(interpreted):
    interpreted(1).run(body.several_pairs, REAL)


def test_against_float64(interpreted):
    interpreted(1).run(body.against_float64, REAL)


def test_by_tma(interpreted):
    interpreted(1).run(body.by_tma, REAL)


def test_programs(interpreted):
    interpreted(1).run(body.programs, REAL)


def test_waits(interpreted):
    interpreted(1).run(body.waits, REAL)


def test_sums(interpreted):
    interpreted(1).run(body.sums, REAL)


def test_refusals(interpreted):
    interpreted(1).run(body.refused, REAL)


def test_compiled_kernels_refuse_host_memory(world):
    with pytest.raises(Exception, match="CPU tensors need the Triton interpreter"):
        world(1).run(body.exact, REAL, 0)
