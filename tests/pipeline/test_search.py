"""Searched schedules: never worse than published ones, within the limit, the best where all can be tried."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest

from tp_kernels import ParallelGroup, Ranks, ShapeError
from tp_kernels.bench.pipeline import Sleeper, check_step, loss
from tp_kernels.pipeline.communicator import PipelineCommunicator
from tp_kernels.pipeline.generators import SCHEDULES, one_f_one_b, zero_bubble_h1, zero_bubble_v
from tp_kernels.pipeline.line import Line, Rule
from tp_kernels.pipeline.runner import PipelineRunner
from tp_kernels.pipeline.schedule import Action, Kind, Schedule, ScheduleError
from tp_kernels.pipeline.search import search
from tp_kernels.pipeline.simulate import Costs

PUBLISHED = {
    1: ("gpipe", "one_f_one_b", "zero_bubble_h1", "zero_bubble_h2"),
    2: ("interleaved_one_f_one_b", "zero_bubble_v", "dual_pipe_v"),
}


def random_costs(rng: random.Random, stages: int) -> Costs:
    def several(low: float, high: float) -> list[float]:
        return [rng.uniform(low, high) for _ in range(stages)]

    return Costs(
        several(0.5, 1.5),
        several(0.5, 2.0),
        several(0.2, 1.5),
        communication=rng.choice([0.0, 0.1, 0.6]),
        activation=several(1.0, 2.0),
        activation_weight=rng.choice([None, 0.5]),
    )


def test_never_worse_than_published_and_within_the_limit() -> None:
    rng = random.Random(7)
    shorter = 0
    for ranks, micro_batches, chunks in [
        (2, 4, 1),
        (3, 6, 1),
        (4, 8, 1),
        (4, 5, 1),
        (2, 4, 2),
        (3, 6, 2),
    ]:
        for _ in range(2):
            costs = random_costs(rng, ranks * chunks)
            one = max(sum(costs.kept(s) for s in range(ranks * chunks)) / ranks, 3.0 * chunks)
            limit = one * rng.uniform(1.0, ranks)
            found = search(ranks, micro_batches, costs, limit, chunks, moves=300)
            found.validate(credits=4)
            timeline = found.simulate(costs)
            assert max(timeline.peak_memory(rank) for rank in range(ranks)) <= limit * (1 + 1e-9)
            best = math.inf
            for name in PUBLISHED[chunks]:
                other = SCHEDULES[name](ranks, micro_batches).simulate(costs)
                if max(other.peak_memory(rank) for rank in range(ranks)) <= limit:
                    best = min(best, other.makespan)
            assert timeline.makespan <= best + 1e-9
            shorter += timeline.makespan < best - 1e-6
    assert shorter >= 8  # else the search adds nothing


def in_order(micro_batches: int) -> Iterator[list[Kind]]:
    """All orders of F, I and W of one stage in which each kind takes the micro-batches by number."""

    def extend(order: list[Kind]) -> Iterator[list[Kind]]:
        f, i, w = (order.count(kind) for kind in (Kind.F, Kind.I, Kind.W))
        if w == micro_batches:
            yield order
        for kind, possible in ((Kind.F, f < micro_batches), (Kind.I, i < f), (Kind.W, w < i)):
            if possible:
                yield from extend([*order, kind])

    return extend([])


def all_schedules(ranks: int, micro_batches: int) -> Iterator[Schedule]:
    def actions(rank: int, kinds: list[Kind]) -> tuple[Action, ...]:
        return tuple(Action(rank, kind, kinds[:at].count(kind)) for at, kind in enumerate(kinds))

    for orders in product(*([*in_order(micro_batches)] for _ in range(ranks))):
        yield Schedule(
            "tried",
            ranks,
            ranks,
            micro_batches,
            tuple(range(ranks)),
            tuple(actions(rank, kinds) for rank, kinds in enumerate(orders)),
        )


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "count"), [(2, 2, 25), (3, 2, 125), (2, 3, 1764)]
)
def test_equals_trying_all(ranks: int, micro_batches: int, count: int) -> None:
    rng = random.Random(ranks * 10 + micro_batches)
    everything = list(all_schedules(ranks, micro_batches))
    assert len(everything) == count
    for limit in (1.0, 2.0) if count < 1000 else (2.0,):
        costs = Costs(
            *([rng.uniform(0.3, 1.5) for _ in range(ranks)] for _ in range(3)),
            communication=rng.choice([0.0, 0.3]),
        )
        best = math.inf
        for schedule in everything:
            try:
                schedule.validate(memory=int(limit))
            except ScheduleError:
                continue
            best = min(best, schedule.simulate(costs).makespan)
        found = search(ranks, micro_batches, costs, limit)
        assert found.simulate(costs).makespan == pytest.approx(best, abs=1e-9)


def test_times_are_those_of_the_simulation() -> None:
    """What the search counts with is what `simulate` says, for published orders and for those of rules."""
    rng = random.Random(5)
    for ranks, chunks in ((2, 1), (4, 1), (3, 2)):
        costs = replace(random_costs(rng, ranks * chunks), communication=rng.uniform(0.5, 2.0))
        for name in PUBLISHED[chunks]:
            schedule = SCHEDULES[name](ranks, 6)
            line = Line(ranks, 6, costs, schedule.stage_to_rank, [math.inf] * ranks)
            rule = Rule([math.inf] * ranks, True, False, 0.5, True)
            for orders in (line.orders_of(schedule), line.by_rule(rule)):
                same = replace(schedule, actions=tuple(tuple(line.actions(o)) for o in orders))
                length, path = line.critical(orders)
                assert length == pytest.approx(same.validate().simulate(costs).makespan)
                assert path[-1][1] == 0  # back to a start


def test_fills_the_bubbles_of_unequal_stages() -> None:
    """Stages whose parts take unequal times: no published order knows where the gaps are."""
    costs = Costs([1.0, 2.0, 1.0], [2.0, 2.0, 1.0], [1.0, 1.0, 3.0])
    found = search(3, 6, costs, 3.0).simulate(costs)
    assert found.makespan < zero_bubble_h1(3, 6).simulate(costs).makespan - 1.0
    # Nothing can be shorter than the work of a rank and the way to it and back.
    assert found.makespan >= 6 * 5.0 + 1.0 + 2.0


def test_unequal_memory() -> None:
    costs = Costs(1.0, 1.2, 0.8)
    timeline = search(2, 6, costs, (4.0, 1.0)).simulate(costs)
    assert (timeline.peak_memory(0), timeline.peak_memory(1)) == (2.0, 1.0)
    timeline = search(2, 6, costs, (1.0, 4.0)).simulate(costs)
    assert (timeline.peak_memory(0), timeline.peak_memory(1)) == (1.0, 1.0)


def test_equal_on_every_rank_and_of_any_placement() -> None:
    costs = Costs(1.0, [1.1] * 6, 0.7, communication=0.2)
    first, second = (search(3, 4, costs, 8.0, 2, moves=100) for _ in range(2))
    assert first == second
    turned = search(3, 4, costs, 8.0, 2, stage_to_rank=(2, 1, 0, 2, 1, 0), moves=50)
    assert turned.stage_to_rank == (2, 1, 0, 2, 1, 0)
    turned.validate(credits=4)
    assert search(2, 3, Costs(), chunks=3, moves=50).validate().stages == 6


def test_published_where_nothing_is_shorter() -> None:
    costs = Costs(1.0, 1.0, 1.0)
    assert search(1, 4, costs).simulate(costs).bubble_over_ideal == 0.0
    assert search(4, 8, costs, 8.0, 2, moves=50) == zero_bubble_v(4, 8)


def test_whole_backwards_where_nobody_waits() -> None:
    """The first stage has nobody to send gradients to; the last must not keep others waiting."""
    costs = Costs([1.0, 1.3], 1.0, 0.4)
    found = search(2, 6, costs, 2.0)
    kinds = [{action.kind for action in found.order(rank)} for rank in (0, 1)]
    assert Kind.B in kinds[0] and Kind.I in kinds[1]
    # A whole backward that costs less than its parts is used where it can be.
    cheap = Costs(1.0, 1.0, 1.0, backward=1.2)
    assert search(2, 4, cheap, 2.0).simulate(cheap).makespan <= (
        one_f_one_b(2, 4).simulate(cheap).makespan
    )


def run_tables(tables: list[str]) -> int:
    """In every rank: one step per schedule, whose losses and gradients are checked."""
    for text in tables:
        schedule = Schedule.from_csv(text)
        with (
            ParallelGroup() as group,
            PipelineCommunicator(group, stage_to_rank=schedule.stage_to_rank) as channel,
        ):
            stages = [Sleeper(0.0) for _ in channel.my_stages]
            check_step(
                PipelineRunner(stages, schedule, channel, loss, scale="sum"), stages, schedule
            )
    return len(tables)


def test_found_schedules_run(world: Callable[[int], Ranks]) -> None:
    costs = Costs(1.0, 1.3, 0.4, communication=0.2)
    found = [search(2, 5, costs, 2.0), search(2, 3, costs, 4.0, 2), search(2, 4, costs, 8.0, 3)]
    assert [schedule.name for schedule in found].count("search") >= 2
    assert world(2).run(run_tables, [schedule.to_csv() for schedule in found]) == [3, 3]


def test_tells_how_far_it_is() -> None:
    told: list[tuple[str, int, int]] = []
    search(2, 2, Costs(), moves=10, progress=lambda *step: told.append(step))
    assert {what for what, _, _ in told} == {"priority rules", "moves"}
    assert all(0 <= done < total for _, done, total in told)


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(
        ScheduleError, match="rank 0: one micro-batch keeps 4, the memory limit is 3"
    ):
        search(2, 2, Costs(activation=2.0), 3.0, 2)
    with pytest.raises(ShapeError, match="memory_limit has 3 numbers for 2 ranks"):
        search(2, 2, Costs(), (1.0, 1.0, 1.0))
    with pytest.raises(ShapeError, match="memory_limit is nan"):
        search(2, 2, Costs(), float("nan"))
    with pytest.raises(ShapeError, match="use 1 or more"):
        search(2, 0, Costs())
    with pytest.raises(ShapeError, match="must name each of 2 ranks 1 times"):
        search(2, 2, Costs(), stage_to_rank=(0, 0))
