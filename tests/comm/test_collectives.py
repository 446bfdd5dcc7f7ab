"""Plain collectives: values and bits for every dtype, provider and shape, and wrong arguments."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.oracle import digest, lay_out, poison
from tp_kernels import (
    GroupMismatchError,
    ParallelGroup,
    ShapeError,
    UnsupportedError,
    split_range,
    split_sizes,
)
from tp_kernels.comm import all_gather, all_reduce, barrier, broadcast, reduce_scatter

REDUCIBLE = (torch.float32, torch.bfloat16, torch.float16)
EXACT = (torch.float64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.complex64)
OPAQUE = (torch.bool, torch.int8, torch.uint16, torch.float8_e4m3fn)
LARGE = {torch.float64: 1 << 50, torch.int64: 1 << 50, torch.int32: 1 << 28}  # fp32 would round
SHAPES = ((), (1,), (5,), (3, 7), (0, 4), (4, 0), (2, 3, 5), (700, 3))
LAYOUTS = ("plain", "transposed", "offset", "strided")


def draw(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype in REDUCIBLE:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, LARGE.get(dtype, 5), shape, generator=generator).to(dtype)


def ordered(parts: list[Tensor]) -> Tensor:
    """The sum that the package promises: fp32, in rank order, rounded once."""
    wide = torch.float32 if parts[0].dtype in REDUCIBLE else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def groups() -> Iterator[ParallelGroup]:
    for options in ({}, {"provider": "none"}, {"window": 512}):
        with ParallelGroup(timeout=30, **options) as group:
            yield group


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_reductions(world, size):
    by_rank = world(size).run(reduce_everything)
    assert all(digests == by_rank[0] for digests in by_rank)


def reduce_everything() -> list[str]:
    digests = []
    for group in groups():
        for index, shape in enumerate(SHAPES):
            for dtype in (*REDUCIBLE, *EXACT):
                parts = [draw(rank, shape, dtype) for rank in range(group.size)]
                x = parts[group.rank]
                if shape:
                    x = lay_out(x, LAYOUTS[index % 4]) if dtype in REDUCIBLE else x
                before = x.clone()
                poison(group)
                y = all_reduce(x, group)
                assert digest(y) == digest(ordered(parts)), (group, shape, dtype)
                digests.append(digest(y))
                if shape:
                    poison(group)
                    z = reduce_scatter(x, group)
                    mine = ordered(parts).tensor_split(group.size)[group.rank]
                    assert digest(z) == digest(mine), (group, shape, dtype)
                assert digest(x) == digest(before), "the input was changed"
                assert y.data_ptr() != x.data_ptr() or y.numel() == 0
    return digests


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gathers(world, size):
    world(size).run(gather_everything)


def gather_everything() -> None:
    for group in groups():
        for shape in SHAPES[1:]:
            for dtype in (*REDUCIBLE, *EXACT, *OPAQUE):
                whole = draw(3, shape, dtype)
                mine = whole.tensor_split(group.size)[group.rank]
                poison(group)
                assert digest(all_gather(mine, group, rows=shape[0])) == digest(whole)
                parts = [draw(rank, shape, dtype) for rank in range(group.size)]
                assert digest(all_gather(parts[group.rank], group)) == digest(torch.cat(parts))
        counts = [(rank * 5) % 7 for rank in range(group.size)]  # also none
        parts = [draw(rank, (count, 3), torch.float32) for rank, count in enumerate(counts)]
        y = all_gather(parts[group.rank], group, counts=counts)
        assert digest(y) == digest(torch.cat(parts))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_broadcasts(world, size):
    world(size).run(broadcast_everything)


def broadcast_everything() -> None:
    for group in groups():
        for index, shape in enumerate(SHAPES):
            for dtype in (*REDUCIBLE, *EXACT, *OPAQUE):
                source = index % group.size
                whole = draw(3, shape, dtype)
                x = whole if group.rank == source else draw(4 + group.rank, shape, dtype)
                x = lay_out(x, LAYOUTS[index % 4]) if shape and dtype in REDUCIBLE else x
                before = x.clone()
                poison(group)
                y = broadcast(x, group, source)
                assert digest(y) == digest(whole), (group, shape, dtype)
                assert digest(x) == digest(before), "the input was changed"
                assert y.data_ptr() != x.data_ptr() or y.numel() == 0
        conjugate = torch.tensor([1 + 2j]).conj()
        assert broadcast(conjugate, group).resolve_conj().tolist() == [1 - 2j]
        with pytest.raises(UnsupportedError, match=f"source={group.size} is not a rank"):
            broadcast(whole, group, group.size)


@pytest.mark.parametrize("what", ["size", "dtype", "source"])
@pytest.mark.parametrize("provider", ["host", "none"])
def test_broadcasts_that_differ(world, provider, what):
    for error in world(3).run(broadcast_differently, provider, what):
        assert "GroupMismatchError: broadcast: ranks" in error


def broadcast_differently(provider: str, what: str) -> str:
    odd = dist.get_rank() == 1
    x = torch.ones(5 if odd and what == "size" else 4)
    x = x.bfloat16() if odd and what == "dtype" else x
    with ParallelGroup(provider=provider, timeout=10) as group:
        with pytest.raises(GroupMismatchError) as caught:
            broadcast(x, group, source=2 if odd and what == "source" else 0)
        return f"{type(caught.value).__name__}: {caught.value}"


def test_sums_that_overflow_or_are_not_finite(world):
    world(3).run(overflow)


def overflow() -> None:
    for group in groups():
        for values, total in (
            ((60000.0, 60000.0, -60000.0), 60000.0),  # fp16 overflows on the way only
            ((60000.0, 60000.0, 60000.0), float("inf")),
            ((float("inf"), 1.0, 2.0), float("inf")),
            ((float("inf"), -float("inf"), 0.0), float("nan")),
            ((float("nan"), 1.0, 2.0), float("nan")),
        ):
            x = torch.full((9,), values[group.rank], dtype=torch.float16)
            y = all_reduce(x, group)
            assert torch.equal(y.isnan(), torch.full_like(y, total).isnan())
            assert y.isnan().all() or (y == total).all()


def test_a_barrier_waits_for_all(world):
    for elapsed in world(3).run(wait_for_the_last):
        assert all(seconds > 0.25 for seconds in elapsed)


def wait_for_the_last() -> list[float]:
    elapsed = []
    for group in groups():
        barrier(group)
        start = time.monotonic()
        if group.rank == 1:
            time.sleep(0.3)
        barrier(group)
        elapsed.append(time.monotonic() - start)
    return elapsed


@pytest.mark.parametrize("size", [2, 4, 8])
def test_back_to_back(world, size):
    world(size).run(repeat, 200)


def repeat(calls: int) -> None:
    """Sums of integers, exact in any dtype, by ranks that dawdle in turn; two groups."""
    shared, own = Random(1), Random()
    with ParallelGroup(window=512, timeout=30) as a, ParallelGroup(timeout=30) as b:
        for call in range(calls):
            group, rows = shared.choice((a, b)), shared.choice((1, 2, 50, 400))
            dtype = shared.choice(REDUCIBLE)
            base = (torch.arange(rows * 3) % 17 + call % 5).view(rows, 3)
            x = (base * (group.rank + 1)).to(dtype)
            total = (base * sum(range(1, group.size + 1))).to(dtype)
            if own.random() < 0.1:
                time.sleep(0.002 * own.random())
            which = shared.randrange(3)
            if which == 0:
                assert torch.equal(all_reduce(x, group), total)
            elif which == 1:
                mine = total.tensor_split(group.size)[group.rank]
                assert torch.equal(reduce_scatter(x, group), mine)
            else:
                parts = [(base * (rank + 1)).to(dtype) for rank in range(group.size)]
                assert torch.equal(all_gather(x, group), torch.cat(parts))


def test_wrong_arguments(world):
    world(2).run(refuse)


def refuse() -> None:
    scalar = torch.tensor(1.0)
    refused: dict[str, Callable[[ParallelGroup], Tensor]] = {
        "all_gather: a scalar": lambda group: all_gather(scalar, group),
        "reduce_scatter: a scalar": lambda group: reduce_scatter(scalar, group),
        "its share of rows=7": lambda group: all_gather(torch.ones(2), group, rows=7),
    }
    for group in groups():
        for text, call in refused.items():
            with pytest.raises(ShapeError, match=text):
                call(group)
        assert not group.stats()["calls"]
        assert all_reduce(scalar, group) == 2


def test_what_ran_is_counted(world):
    for host, none in world(2).run(count):
        assert host == {
            "all_reduce": {"host": 1, "process_group": 1},
            "all_gather": {"host": 2},
            "barrier": {"host": 1},
        }
        assert none == {
            "all_reduce": {"process_group": 2},
            "all_gather": {"process_group": 2},
            "barrier": {"process_group": 1},
        }


def count() -> list[dict[str, dict[str, int]]]:
    counted = []
    for provider in ("host", "none"):
        with ParallelGroup(provider=provider, timeout=30) as group:
            for x in (torch.ones(2), torch.ones(2, dtype=torch.float64)):
                all_reduce(x, group)
                all_gather(x, group)
            barrier(group)
            counted.append(group.stats()["calls"])
    return counted


@pytest.mark.parametrize("size", [1, 2, 3])
def test_results_in_a_given_tensor(world, size):
    world(size).run(into_given_tensors)


def into_given_tensors() -> None:
    for group in groups():
        for shape in ((5,), (4, 0), (2, 3, 5), (700, 3)):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                give_tensors(group, [draw(rank, shape, dtype) for rank in range(group.size)])


def give_tensors(group: ParallelGroup, parts: list[Tensor]) -> None:
    x, total = parts[group.rank].clone(), ordered(parts)
    for call, result in (
        (lambda out: all_reduce(x, group, out), total),
        (lambda out: reduce_scatter(x, group, out), total.tensor_split(group.size)[group.rank]),
        (lambda out: all_gather(x, group, out=out), torch.cat(parts)),
    ):
        out = torch.full(result.shape, 77, dtype=x.dtype)
        poison(group)
        assert call(out) is out
        assert digest(out) == digest(result), (group, x.shape, x.dtype)
    assert digest(x) == digest(parts[group.rank]), "the input was changed"
    assert all_reduce(x, group, x) is x
    assert digest(x) == digest(total), (group, x.shape, x.dtype)


@pytest.mark.parametrize("size", [1, 2])
def test_a_tensor_that_cannot_take_the_result_is_refused(world, size):
    world(size).run(refuse_tensors)


def refuse_tensors() -> None:
    for group in groups():
        refuse_tensors_of(group)


def refuse_tensors_of(group: ParallelGroup) -> None:
    memory = torch.zeros(64)
    x = memory[:12].view(4, 3)
    for name, call, rows in (
        ("all_reduce", lambda out: all_reduce(x, group, out), 4),
        (
            "reduce_scatter",
            lambda out: reduce_scatter(x, group, out),
            split_sizes(4, group.size)[group.rank],
        ),
        ("all_gather", lambda out: all_gather(x, group, out=out), 4 * group.size),
    ):
        for text, out in (
            ("has shape", torch.zeros(rows + 1, 3)),
            ("has shape", torch.zeros(rows * 3)),
            ("float64 on cpu, x is torch.float32", torch.zeros(rows, 3, dtype=torch.float64)),
            ("on meta, x is", torch.zeros(rows, 3, device="meta")),
            ("must be contiguous", torch.zeros(3, rows).t()),
            ("shares memory with x", memory[9 : 9 + rows * 3].view(rows, 3)),
        ):
            with pytest.raises(ShapeError, match=f"{name} on rank {group.rank}: out.*{text}"):
                call(out)
        call(memory[12 : 12 + rows * 3].view(rows, 3))  # beside x is fine
    strided = torch.zeros(3, 4).t()
    with pytest.raises(ShapeError, match="only a contiguous tensor"):
        all_reduce(strided, group, strided)


@pytest.mark.parametrize("total", [0, 1, 3, 4, 5, 1000])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_split(total, world_size):
    parts = torch.arange(total).tensor_split(world_size)
    assert split_sizes(total, world_size) == [len(part) for part in parts]
    for rank, part in enumerate(parts):
        start, stop = split_range(total, world_size, rank)
        assert torch.equal(torch.arange(start, stop), part)
