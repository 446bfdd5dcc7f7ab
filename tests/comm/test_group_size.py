"""The model that chooses how many rows travel at a time."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tp_kernels import split_sizes
from tp_kernels.comm import group_size as model
from tp_kernels.comm.devices import DeviceIdentity
from tp_kernels.comm.group_size import (
    LATENCY,
    MOST_GROUPS,
    NETWORK,
    NVLINK,
    TILE,
    Rates,
    candidates,
    group_size,
    measured_key,
    rates_of,
    rows_of_group,
    seconds,
)
from tp_kernels.comm.row_groups import RowGroups
from tp_kernels.comm.topology import HostIdentity
from tp_kernels.comm.triton_support import TritonSupport

RATES = Rates(flops=800e12, multiprocessors=132, link=50e9, latency=40e-6)
COUNTS = st.builds(split_sizes, st.integers(1, 70000), st.integers(1, 8))
SIZES = st.sampled_from([64, 1000, 8192])


def one_by_one(counts: list[int], size: int, n: int, k: int, rates: Rates) -> float:
    """`seconds` by its definition: a group is there after the waves that its last tile needs."""
    wave = 2 * TILE * TILE * k / (rates.flops / rates.multiprocessors)
    rows, clock, tiles = list(counts), 0.0, 0
    while any(rows):
        taken = [min(size, left) for left in rows]
        rows = [left - some for left, some in zip(rows, taken, strict=True)]
        tiles += sum(-(-some // TILE) for some in taken) * -(-n // TILE)
        clock = max(clock, -(-tiles // rates.multiprocessors) * wave)
        clock += rates.latency + sum(taken) * n * 2 / rates.link
    return clock


@given(COUNTS, SIZES, SIZES)
def test_the_best_of_all_candidates(counts, n, k):
    size = group_size(counts, n, k, 2, 1.0, RATES)
    assert size % TILE == 0
    times = {s: one_by_one(counts, s, n, k, RATES) for s in candidates(max(counts))}
    assert seconds(RowGroups(counts, size), n, k, 2, 1.0, RATES) == pytest.approx(times[size])
    assert times[size] == pytest.approx(min(times.values()))


@given(st.integers(0, 10**6))
def test_candidates_are_whole_tiles_from_one_group_on(most):
    sizes = candidates(most)
    assert sizes == sorted(sizes, reverse=True) and all(size % TILE == 0 for size in sizes)
    assert sizes[0] >= max(most, 1) > sizes[0] - TILE
    assert all(-(-most // size) <= MOST_GROUPS for size in sizes)


def test_what_costs_nothing_is_cut_finely_and_what_costs_much_is_not():
    counts, sizes = [4096] * 8, []
    for latency in (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1.0):
        sizes.append(group_size(counts, 8192, 8192, 2, 1.0, replace(RATES, latency=latency)))
    assert sizes == sorted(sizes)
    assert sizes[0] == 4096 // MOST_GROUPS and sizes[-1] == 4096


def test_near_the_formula():
    """Where tiles are small beside the groups, T of the chosen size is close to the continuous optimum."""
    rows, n, k = 1 << 16, 8192, 8192
    product, link = 2 * rows * n * k / RATES.flops, rows * n * 2 / RATES.link
    best = sqrt(min(product, link) / RATES.latency)
    expected = max(
        product + link / best + RATES.latency, product / best + link + best * RATES.latency
    )
    size = group_size([rows], n, k, 2, 1.0, RATES)
    assert seconds(RowGroups([rows], size), n, k, 2, 1.0, RATES) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("counts", [[8192], [65536], [1024] * 8])
@pytest.mark.parametrize(("n", "k"), [(8192, 3584), (8192, 1024), (12288, 6144)])
@pytest.mark.parametrize("link", [NETWORK, NVLINK])
def test_the_guessed_inner_size_costs_little(counts, n, k, link):
    """By the model, of layers of 8 ranks: after an attention and in an MLP."""
    rates = replace(RATES, link=link)

    def taken(size: int) -> float:
        return seconds(RowGroups(counts, size), n, k, 2, 1.0, rates)

    guessed = group_size(counts, n, model.INNER * n // 8, 2, 1.0, rates)
    assert taken(guessed) <= 1.1 * taken(group_size(counts, n, k, 2, 1.0, rates))


def test_what_is_measured_for_one_op_is_not_for_another():
    given = ([20, 20], 64, torch.bfloat16, "cuda")
    keys = [measured_key(op, *given) for op in ("linear_reduce_scatter", "all_gather_linear")]
    assert keys[0] != keys[1] == measured_key("linear_reduce_scatter.backward", *given)
    assert keys[0] == measured_key("all_gather_linear.backward", *given)


def group_of(capabilities: list[int], reachable: bool) -> SimpleNamespace:
    ids = "ab" if reachable else ""
    return SimpleNamespace(
        size=2,
        identities=[HostIdentity.current()] * 2,
        devices=[DeviceIdentity(i, uuid, tuple(ids)) for i, uuid in enumerate("ab")],
        triton_support=[TritonSupport(None, False, one) for one in capabilities],
        decisions={},
        group_sizes={},
    )


def test_rates_are_of_the_slowest_rank():
    half, single, processors = model.COMPUTE[80]
    assert rates_of(group_of([90, 80], True), torch.bfloat16) == Rates(
        half, processors, NVLINK, LATENCY
    )
    assert rates_of(group_of([89, 90], False), torch.float32) == Rates(
        single, processors, NETWORK, LATENCY
    )
    assert rates_of(group_of([90, 103], True), torch.float16).multiprocessors == 132


def test_rows_of_a_group():
    group = group_of([90, 90], False)
    given = ([65536], 8192, torch.bfloat16)
    assert rows_of_group(group, "linear_all_reduce", *given, "cpu") == model.INTERPRETED_ROWS
    size = rows_of_group(group, "linear_all_reduce", *given, "cuda")
    rates = rates_of(group, torch.bfloat16)
    inner = 3 * 8192 // 2
    assert size == group_size([65536], 8192, inner, 2, 2 * 0.5, rates) < 65536
    assert rows_of_group(group, "copy_linear.backward", *given, "cuda") == size
    scattered = rows_of_group(group, "linear_reduce_scatter", *given, "cuda")
    assert scattered == group_size([65536], 8192, inner, 2, 0.5, rates)
    assert len(group.decisions) == 2
