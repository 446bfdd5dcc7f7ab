"""A schedule for measured, unequal times: fills bubbles under a limit of memory."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product

from tp_kernels.comm.errors import ShapeError

from .generators import SCHEDULES
from .line import Line, Orders, Rule
from .schedule import Action, Kind, Schedule, lay_out
from .simulate import Costs

# By chunks per rank: the published schedules to start from, and never to be worse than.
_PUBLISHED = {
    1: ("gpipe", "one_f_one_b", "zero_bubble_h1", "zero_bubble_h2"),
    2: ("interleaved_one_f_one_b", "zero_bubble_v", "dual_pipe_v"),
}
_STARTS = 4  # orders that are improved
_WORK = 100_000  # changes tried on each of them, times micro-batches and stages
_MOVES = 400  # but at least so many

Progress = Callable[[str, int, int], None]


def search(
    ranks: int,
    micro_batches: int,
    costs: Costs,
    memory_limit: float | Sequence[float] = math.inf,
    chunks: int = 1,
    *,
    stage_to_rank: Sequence[int] | None = None,
    moves: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Schedule:
    """The schedule with the shortest `simulate(costs).makespan` that was found.

    It is at most as long as the best published schedule within the limit. The orders that priority rules
    give (forwards or backwards first, weight gradients in gaps, different numbers of micro-batches in
    flight; the idea of Qi et al., arXiv 2401.10241, section 3) are improved by moving actions along the
    critical path, with annealing, as is usual for job shops. Equal arguments give the same schedule, on
    every rank: there is randomness with a seed, and no clock.

    Args:
        costs: seconds of every stage, per micro-batch; `activation` is in the unit of `memory_limit`.
        memory_limit: what a rank may keep for its backwards at a time, one number or one per rank.
        chunks: stages per rank.
        stage_to_rank: where the stages are; default: s mod ranks, and for several chunks also the V.
        moves: changes tried on each of several orders; default: more for larger schedules.
        progress: called with a text, how much is done, and the whole.

    Raises:
        ScheduleError: no schedule fits: one micro-batch at a time already keeps more than the limit.
    """
    if min(ranks, micro_batches, chunks) < 1:
        raise ShapeError(
            f"ranks {ranks}, micro_batches {micro_batches}, chunks {chunks}: use 1 or more"
        )
    costs.check(ranks * chunks)
    limits = (
        tuple(memory_limit)
        if isinstance(memory_limit, Sequence)
        else (float(memory_limit),) * ranks
    )
    if len(limits) != ranks:
        raise ShapeError(f"memory_limit has {len(limits)} numbers for {ranks} ranks")
    if any(math.isnan(limit) for limit in limits):
        raise ShapeError(f"memory_limit is {memory_limit}: use numbers, infinity for none")
    report = progress or (lambda what, done, total: None)
    placements = _placements(ranks, chunks, stage_to_rank)
    lines = [Line(ranks, micro_batches, costs, placement, limits) for placement in placements]
    published: list[Schedule] = []
    starts: list[tuple[float, Line, Orders]] = []
    rules = list(_rules(ranks))
    for at, line in enumerate(lines):
        line.check()
        known = _published(ranks, micro_batches, chunks, line.stage_to_rank)
        fitting = [schedule for schedule in known if _fits(schedule, costs, limits)]
        published += fitting
        orders = [line.orders_of(schedule) for schedule in fitting]
        for done, rule in enumerate(rules):
            report("priority rules", at * len(rules) + done, len(lines) * len(rules))
            orders.append(line.by_rule(rule))
        starts += [(line.length(order), line, order) for order in _distinct(orders)]
    starts = sorted(starts, key=lambda start: start[0])[:_STARTS]
    tries = moves if moves is not None else max(_MOVES, _WORK // (ranks * chunks * micro_batches))
    better: list[tuple[float, Line, Orders]] = []
    for at, (_, line, order) in enumerate(starts):
        report("moves", at, len(starts))
        length, order = _anneal(line, order, tries, random.Random(seed + at))
        better.append((length, line, order))
    _, line, order = min(better, key=lambda found: found[0])
    cells = [line.actions(row) for row in order]
    found = lay_out("search", cells, line.stage_to_rank, micro_batches)
    # The first of equal ones: the published schedule, whose name says more.
    candidates = [*published, _whole_backwards(found, costs)]
    return min(candidates, key=lambda schedule: schedule.simulate(costs).makespan)


def _placements(
    ranks: int, chunks: int, stage_to_rank: Sequence[int] | None
) -> list[tuple[int, ...]]:
    if stage_to_rank is not None:
        if sorted(stage_to_rank) != sorted(list(range(ranks)) * chunks):
            raise ShapeError(f"stage_to_rank must name each of {ranks} ranks {chunks} times")
        return [tuple(stage_to_rank)]
    stages = range(ranks * chunks)
    loop = tuple(stage % ranks for stage in stages)
    turns = tuple(
        ranks - 1 - stage % ranks if stage // ranks % 2 else stage % ranks for stage in stages
    )
    return [loop] if loop == turns else [loop, turns]


def _published(
    ranks: int, micro_batches: int, chunks: int, placement: tuple[int, ...]
) -> Iterator[Schedule]:
    for name in _PUBLISHED.get(chunks, ("interleaved_one_f_one_b",)):
        looped = name == "interleaved_one_f_one_b"
        schedule = SCHEDULES[name](ranks, micro_batches, *([chunks] if looped else []))
        if schedule.stage_to_rank == placement:
            yield schedule


def _fits(schedule: Schedule, costs: Costs, limits: Sequence[float]) -> bool:
    found = schedule.simulate(costs)
    return all(found.peak_memory(rank) <= limit * (1 + 1e-12) for rank, limit in enumerate(limits))


def _rules(ranks: int) -> Iterator[Rule]:
    ahead: list[Callable[[int], float]] = [
        lambda rank: math.inf,
        lambda rank: ranks - rank,
        lambda rank: 2 * (ranks - rank) - 1,
        lambda rank: ranks,
    ]
    for caps, backward_first, eager, patience, deep in product(
        ahead, (True, False), (False, True), (0.0, 0.5), (True, False)
    ):
        if eager and patience:
            continue  # nothing waits then
        yield Rule([caps(rank) for rank in range(ranks)], backward_first, eager, patience, deep)


def _distinct(orders: Sequence[Orders]) -> list[Orders]:
    return list({str(order): order for order in orders}.values())


def _anneal(line: Line, start: Orders, tries: int, rng: random.Random) -> tuple[float, Orders]:
    """The shortest orders that moves along the critical path lead to, and their length."""
    now = best = start
    length, path = line.critical(now)
    shortest = length
    unit = min((cost for cost in line.seconds if cost > 0), default=1.0)
    for done in range(tries):
        heat = 0.3 * unit * (1 - done / tries)
        changed = _move(line, now, path, rng)
        if changed is None:
            continue
        new_length, new_path = line.critical(changed)
        if new_length > length and rng.random() >= math.exp((length - new_length) / heat):
            continue
        now, length, path = changed, new_length, new_path
        if length < shortest - 1e-12:
            best, shortest = now, length
    return shortest, best


def _move(
    line: Line, orders: Orders, path: list[tuple[int, int]], rng: random.Random
) -> Orders | None:
    """`orders` with one critical action somewhere else on its rank; None if that cannot be."""
    rank, at = rng.choice(path)
    order = orders[rank]
    to = at + rng.choice((-1, 1)) * rng.choice((1, 1, 1, 2, 3, 5))
    if not 0 <= to < len(order) or order[to] == order[at]:
        return None
    moved = [*order[:at], *order[at + 1 :]]
    moved.insert(to, order[at])
    if not line.allowed(moved, rank):
        return None
    return [moved if r == rank else other for r, other in enumerate(orders)]


def _whole_backwards(schedule: Schedule, costs: Costs) -> Schedule:
    """`schedule` with I and W in one go where nobody waits for what I computes: less work for autograd."""
    timeline = schedule.simulate(costs)
    times = {(e.stage, e.kind, e.micro_batch): e for e in timeline.events}
    rows: list[list[Action]] = []
    for rank in range(schedule.ranks):
        row: list[Action] = []
        for action in schedule.order(rank):
            stage, k = action.stage, action.micro_batch or 0
            if action.kind is Kind.W and row and row[-1] == action._replace(kind=Kind.I):
                needed = times.get((stage - 1, "I", k)) or times.get((stage - 1, "B", k))
                end = times[stage, "W", k].end + (
                    costs.transfer(stage, stage - 1) if stage else 0.0
                )
                if needed is None or end <= needed.start:
                    row[-1] = action._replace(kind=Kind.B)
                    continue
            row.append(action)
        rows.append(row)
    joined = lay_out(schedule.name, rows, schedule.stage_to_rank, schedule.micro_batches)
    # A message that leaves later may hold up the next one on its link.
    return joined if joined.simulate(costs).makespan <= timeline.makespan else schedule
