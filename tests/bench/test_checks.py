"""The checks that stand between a wrong result and a row: each finds what it is for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tp_kernels import ParallelGroup
from tp_kernels.bench import block_work, linear_work, peer_worker, pool, slices
from tp_kernels.bench.products import column_sum_error, product_error, random

WORLD, NUMEL = 3, 3001


def result(op: str, rank: int, dtype: str = "float32") -> torch.Tensor:
    """What a correct collective gives, in `dtype`."""
    parts = [torch.from_numpy(slices.pattern(r, 0, NUMEL)) for r in range(WORLD)]
    _, _, counts = slices.collective_sizes(op, NUMEL, WORLD, rank)
    kind = getattr(torch, dtype)
    if op == "all_gather":
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]).to(kind)
    total = sum(part.to(kind).float() for part in parts).to(kind)
    return total if op == "all_reduce" else total.split(counts)[rank]


def error(op: str, rank: int, found: torch.Tensor, dtype: str = "float32") -> float:
    read = lambda start, stop: found[start:stop].float().numpy()
    return slices.collective_error(op, NUMEL, WORLD, rank, dtype, read)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_right_collective_passes(op, dtype):
    for rank in range(WORLD):
        assert error(op, rank, result(op, rank, dtype), dtype) <= 1.0


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_wrong_collective_is_found(op):
    right = result(op, 1)
    one, nan, moved = right.clone(), right.clone(), right.roll(1)
    one[700] += 1e-4
    nan[-1] = math.nan
    for wrong in (one, nan, moved, torch.zeros_like(right), right * 2):
        assert error(op, 1, wrong) > 1.0
    missing = right.clone()
    missing[:999] -= torch.from_numpy(slices.pattern(2, 0, 999))
    assert error(op, 1, missing) > 1.0


def test_the_known_input_has_no_period_and_fits_every_dtype():
    values = slices.pattern(1, 0, 1 << 16)
    assert values.min() == -2.0 and values.max() < 2.0
    for dtype in (torch.bfloat16, torch.float16):
        assert np.array_equal(torch.from_numpy(values).to(dtype).float().numpy(), values)
    assert np.array_equal(slices.pattern(1, 100, 200), values[100:200])
    for shift in (1, 2, 64, 256, 1024, 4096, 1 << 15):
        assert np.mean(values[shift:] == values[:-shift]) < 0.02
    assert np.mean(slices.pattern(2, 0, 1 << 16) == values) < 0.02


def test_a_piece_of_rows_is_not_divided():
    assert slices.collective_sizes("reduce_scatter", 30, 2, 1, width=10) == (30, 10, [20, 10])
    assert slices.collective_sizes("all_gather", 10, 2, 1, width=10) == (0, 10, [10, 0])
    assert slices.collective_sizes("all_reduce", 30, 2, 1) == (30, 30, [15, 15])


def test_products_are_checked_in_every_row():
    a, b = random(1, 300, 64), random(2, 64, 40)
    right = a @ b
    assert product_error(right, a, b) < 0.5
    for row in range(0, 300, 7):  # more rows than are compared element by element
        wrong = right.clone()
        wrong[row, row % 40] += 0.01
        assert product_error(wrong, a, b) > 1.0, row
    assert product_error(a[:, :32] @ b[:32], a, b) > 1.0
    assert product_error(torch.full_like(right, math.nan), a, b) == math.inf
    assert product_error(right[:-1], a, b) == math.inf
    assert product_error(right[:0], a[:0], b) == 0.0


def test_sums_of_columns_are_checked():
    a = random(3, 50, 8)
    assert column_sum_error(a.sum(0), a) <= 1.0
    assert column_sum_error(a[1:].sum(0), a) > 1.0
    assert column_sum_error(a.sum(0)[1:], a) == math.inf


def test_ranks_meet_between_writing_and_every_call(monkeypatch):
    log: list[str] = []
    work = slices.Work(lambda: log.append("call"), lambda: 0.0, lambda: log.append("write"))
    clock = iter([0, 1, 10, 12, 20, 23])
    monkeypatch.setattr(slices, "perf_counter", lambda: log.append("clock") or next(clock))
    assert slices.timed_calls(work, 2, 1, lambda: log.append("meet")) == [2, 3]
    assert log == ["write", "meet", "clock", "call", "clock"] * 3


@pytest.mark.parametrize("in_place", [True, False])
def test_the_last_timed_call_is_checked_too(in_place):
    buffers = slices.Buffers(
        {"op": "all_reduce", "dtype": "float32", "bytes": 400}, 0, 1, in_place=in_place
    )
    work = buffers.work(lambda: buffers.out.copy_(buffers.x))
    slices.timed_calls(work, 1, 1, lambda: None)
    assert work.check() == 0.0
    buffers.out[7] += 1
    assert work.check() > 1.0


class MPI:
    """The calls of mpi4py that a lone rank makes."""

    SUM = FLOAT = None

    def Allreduce(self, x, out, _):
        out[:] = x

    def Reduce_scatter(self, x, out, counts, _):
        assert counts == [len(x)]
        out[:] = x

    def Allgatherv(self, x, whole):
        out, counts, starts, _ = whole
        assert (counts, starts) == ([len(x)], [0])
        out[:] = x


def peer(kind: type, **attributes) -> object:
    """One of the peers as a lone rank, without its library."""
    made = object.__new__(kind)
    made.__dict__ |= {"rank": 0, "world": 1, **attributes}
    return made


DEEPSPEED = peer(peer_worker.DeepSpeed, level=2, all_reduce=lambda x: x)
OPENMPI = peer(peer_worker.OpenMPI, comm=MPI(), mpi=MPI)


@pytest.mark.parametrize(
    ("one", "op", "dtype"),
    [
        (DEEPSPEED, "all_reduce", "float32"),
        (DEEPSPEED, "all_reduce", "bfloat16"),
        (OPENMPI, "all_reduce", "float32"),
        (OPENMPI, "reduce_scatter", "float32"),
        (OPENMPI, "all_gather", "float32"),
    ],
)
def test_peers_write_their_input(one, op, dtype):
    """Without that the result is wrong."""
    work = peer_worker.prepare(one, {"op": op, "dtype": dtype, "bytes": 400})
    slices.timed_calls(work, 1, 1, lambda: None)
    assert work.check() == 0.0
    work.before = lambda: None
    assert work.check() > 1.0


@pytest.fixture
def alone(monkeypatch) -> ParallelGroup:
    """This process as a pool of one rank."""
    group = ParallelGroup()
    monkeypatch.setattr(pool, "_group", group)
    for cached in (block_work.layer, block_work.oracle, linear_work.whole):
        cached.cache_clear()
    return group


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("op", list(linear_work.OPS))
def test_a_wrong_linear_op_is_found(op, way, alone, monkeypatch):
    case = {"op": op, "pass": way, "dtype": "float32", "hidden": 24, "rows": 5}
    implementation = "local" if linear_work.collective_of(case) is None else "reference"
    assert linear_work.op(alone, case, implementation).check() <= 1.0
    right = linear_work.OPS[op]
    monkeypatch.setitem(linear_work.OPS, op, lambda x, *rest, **o: right(x * 1.001, *rest, **o))
    assert linear_work.op(alone, case, implementation).check() > 1.0


@pytest.mark.parametrize("variant", ["mm", "linear", "mv"])
def test_a_wrong_product_is_found(variant, alone, monkeypatch):
    case = {"op": "copy_linear", "pass": "forward", "dtype": "float32", "hidden": 24, "rows": 1}
    work = linear_work.product(alone, case, variant)
    assert work.check() <= 1.0
    function = {"mm": (torch, "mm"), "mv": (torch, "mv"), "linear": (torch.nn.functional, "linear")}
    holder, name = function[variant]
    right = getattr(holder, name)
    monkeypatch.setattr(holder, name, lambda *args, **o: right(*args, **o).mul_(1.001))
    assert work.check() > 1.0


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("part", block_work.PARTS)
def test_a_wrong_block_is_found(part, rows, alone):
    way = "forward" if rows == 1 else "forward+backward"
    case = {"part": part, "pass": way, "hidden": 64, "rows": rows}
    work = block_work.work(alone, case, "reference")
    assert work.check() <= 1.0
    parameters = list(block_work.layer(part, 64).module.parameters())
    for parameter in parameters:
        with torch.no_grad():
            kept = parameter.clone()
            parameter *= 1.01
        assert work.check() > 1.0, parameter.shape
        with torch.no_grad():
            parameter.copy_(kept)
    assert work.check() <= 1.0


def test_every_gradient_of_a_block_is_checked(alone):
    module = block_work.layer("block", 64).module
    exact = block_work.oracle("block", 64, 5, True)
    leaf = random(1, 1, 5, 64).requires_grad_()
    found = torch.autograd.grad(module(leaf), [leaf, *module.parameters()], random(2, 1, 5, 64))
    assert block_work.gradient_error(module, found, exact) <= 1.0
    for index in range(len(found)):
        wrong = [gradient.clone() for gradient in found]
        wrong[index].view(-1)[3] += 0.1 * wrong[index].abs().max()
        assert block_work.gradient_error(module, tuple(wrong), exact) > 1.0, index
