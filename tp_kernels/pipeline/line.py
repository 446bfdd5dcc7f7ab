"""Orders of a pipeline whose micro-batches are all alike, evaluated fast: what `search` works on.

Alike micro-batches can be served in the order of their numbers by every stage and kind of action without
loss, so the order of a rank is a sequence of (stage, kind): the k-th of a kind is that of micro-batch k.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from .schedule import Action, Kind, Schedule, ScheduleError
from .simulate import Costs

KINDS = (Kind.F, Kind.I, Kind.W)
Orders = list[list[int]]  # by rank; 3 * stage + index of the kind in KINDS


class Rule(NamedTuple):
    """How a rank chooses what to do next."""

    caps: list[float]  # by rank: micro-batches that may be in flight
    backward_first: bool
    eager: (
        bool  # weight gradients right after input gradients, not only where there is nothing else
    )
    patience: float  # share of the time of a weight gradient that a rank rather waits for an input
    deep: bool  # forwards of later stages first


class Line:
    """The stages, what they cost, where they are, and what every rank may keep."""

    def __init__(
        self,
        ranks: int,
        micro_batches: int,
        costs: Costs,
        stage_to_rank: tuple[int, ...],
        limits: Sequence[float],
    ) -> None:
        self.ranks, self.micro_batches = ranks, micro_batches
        self.stage_to_rank, self.limits = stage_to_rank, limits
        stages = range(len(stage_to_rank))
        self.own = [[s for s in stages if stage_to_rank[s] == rank] for rank in range(ranks)]
        self.seconds = [costs.of(kind, stage) for stage in stages for kind in KINDS]
        kept = [(costs.kept(s), costs.kept(s, split=True)) for s in stages]
        self.keeps = [change for whole, late in kept for change in (whole, late - whole, -late)]
        self.source = [-1] * len(self.seconds)  # what an action needs from a neighbouring stage
        self.target = [-1] * len(self.seconds)  # what needs an action there
        self.transfer = [0.0] * len(self.seconds)
        for stage in stages:
            neighbours = ((3 * stage, stage + 1), (3 * stage + 1, stage - 1))
            for code, other in neighbours:
                if other in stages:
                    self.target[code] = 3 * other + code % 3
                    self.source[self.target[code]] = code
                    if stage_to_rank[other] != stage_to_rank[stage]:
                        self.transfer[code] = costs.transfer(stage, other)

    def check(self) -> None:
        """ScheduleError if not even one micro-batch at a time fits."""
        for rank, own in enumerate(self.own):
            needed = sum(self.keeps[3 * stage] for stage in own)
            if needed > self.limits[rank]:
                raise ScheduleError(
                    f"one micro-batch keeps {needed:g}, the memory limit is {self.limits[rank]:g}",
                    rank,
                )

    def orders_of(self, schedule: Schedule) -> Orders:
        """The order of every rank, whole backwards in two parts."""
        found: Orders = []
        for rank in range(self.ranks):
            order: list[int] = []
            for action in schedule.order(rank):
                parts = (1, 2) if action.kind is Kind.B else (KINDS.index(action.kind),)
                order += [3 * action.stage + part for part in parts]
            found.append(order)
        return found

    def actions(self, order: Sequence[int]) -> list[Action]:
        """`order` as actions with their micro-batches."""
        counts = [0] * len(self.seconds)
        found = []
        for code in order:
            found.append(Action(code // 3, KINDS[code % 3], counts[code]))
            counts[code] += 1
        return found

    def allowed(self, order: Sequence[int], rank: int) -> bool:
        """Whether forwards precede backwards, and what the rank keeps stays within its limit."""
        counts = [0] * len(self.seconds)
        held, limit = 0.0, self.limits[rank] * (1 + 1e-12)
        for code in order:
            if code % 3 and counts[code] >= counts[code - 1]:
                return False
            counts[code] += 1
            held += self.keeps[code]
            if held > limit:
                return False
        return True

    def length(self, orders: Orders) -> float:
        """Seconds until everything is done; infinite for a deadlock."""
        return self.critical(orders)[0]

    def critical(self, orders: Orders) -> tuple[float, list[tuple[int, int]]]:
        """(seconds, the critical path from its end: (rank, place in the order) of actions)."""
        count = len(self.seconds)
        arrivals: list[list[float]] = [[] for _ in range(count)]
        places: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        waited: list[list[bool]] = [[] for _ in orders]
        ends, heads = [0.0] * self.ranks, [0] * self.ranks
        links: dict[tuple[int, int], float] = {}
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(orders):
                clock, head = ends[rank], heads[rank]
                while head < len(order):
                    code = order[head]
                    source, k = self.source[code], len(places[code])
                    late = False
                    if source >= 0:
                        if len(arrivals[source]) <= k:
                            break
                        if arrivals[source][k] > clock:
                            clock, late = arrivals[source][k], True
                    clock += self.seconds[code]
                    places[code].append((rank, head))
                    waited[rank].append(late)
                    arrival = clock
                    if self.transfer[code]:
                        link = rank, self.stage_to_rank[self.target[code] // 3]
                        arrival = max(clock, links.get(link, 0.0)) + self.transfer[code]
                        links[link] = arrival
                    arrivals[code].append(arrival)
                    head += 1
                if head > heads[rank]:
                    moved, heads[rank], ends[rank] = True, head, clock
        if any(head < len(order) for head, order in zip(heads, orders, strict=True)):
            return math.inf, [(0, 0)]
        last = max(range(self.ranks), key=ends.__getitem__)
        at, path = (last, len(orders[last]) - 1), []
        while at[1] >= 0:
            path.append(at)
            rank, place = at
            if waited[rank][place]:
                code = orders[rank][place]
                at = places[self.source[code]][places[code].index(at)]
            else:
                at = rank, place - 1
        return max(ends), path

    def by_rule(self, rule: Rule) -> Orders:
        """The orders that come out if every rank decides by `rule` whenever it is free."""
        return _Simulation(self, rule).run()


class _Simulation:
    """Ranks that decide at the time they are free, knowing what has arrived and what is under way."""

    def __init__(self, line: Line, rule: Rule) -> None:
        self.line, self.rule = line, rule
        self.arrivals: list[list[float]] = [[] for _ in line.seconds]
        self.counts = [0] * len(line.seconds)
        self.held = [0.0] * line.ranks
        self.links: dict[tuple[int, int], float] = {}

    def run(self) -> Orders:
        ranks = range(self.line.ranks)
        orders: Orders = [[] for _ in ranks]
        left = [3 * len(own) * self.line.micro_batches for own in self.line.own]
        idle = [False] * self.line.ranks
        again = [
            0.0
        ] * self.line.ranks  # when a rank decides next; other entries of the heap are stale
        heap = [(0.0, rank) for rank in ranks]
        while heap:
            time, rank = heapq.heappop(heap)
            if time != again[rank] or not left[rank]:
                continue
            code, again[rank] = self._choose(rank, time)
            idle[rank] = code is None
            if code is not None:
                orders[rank].append(code)
                left[rank] -= 1
                again[rank], arrival = self._do(code, rank, time)
                target = self.line.target[code]
                other = self.line.stage_to_rank[target // 3]
                if target >= 0 and idle[other] and arrival < again[other]:
                    again[other] = arrival
                    heapq.heappush(heap, (arrival, other))
            if again[rank] < math.inf:
                heapq.heappush(heap, (again[rank], rank))
        return orders

    def _do(self, code: int, rank: int, time: float) -> tuple[float, float]:
        """(when `rank` is free again, when what it computed is where it is needed)."""
        line = self.line
        end = arrival = time + line.seconds[code]
        self.counts[code] += 1
        self.held[rank] += line.keeps[code]
        if line.transfer[code]:
            link = rank, line.stage_to_rank[line.target[code] // 3]
            arrival = max(end, self.links.get(link, 0.0)) + line.transfer[code]
            self.links[link] = arrival
        self.arrivals[code].append(arrival)
        return end, arrival

    def _choose(self, rank: int, time: float) -> tuple[int | None, float]:
        """(what `rank` does now, or None; when the next input that is under way arrives)."""
        line, rule = self.line, self.rule
        forwards: list[int] = []
        backwards: list[int] = []
        weights: list[int] = []
        later = math.inf
        for stage in line.own[rank]:
            for code, ready in ((3 * stage, forwards), (3 * stage + 1, backwards)):
                k = self.counts[code]
                if k == line.micro_batches or (code % 3 and k >= self.counts[code - 1]):
                    continue
                source = line.source[code]
                if source >= 0 and len(self.arrivals[source]) <= k:
                    continue
                arrival = self.arrivals[source][k] if source >= 0 else 0.0
                if code % 3 == 0 and not self._room(code, rank):
                    continue
                if arrival <= time:
                    ready.append(code)
                else:
                    later = min(later, arrival)
            if self.counts[3 * stage + 2] < self.counts[3 * stage + 1]:
                weights.append(3 * stage + 2)
        forward = (max if rule.deep else min)(forwards, default=None)
        backward = min(backwards, default=None)
        weight = min(weights, default=None)
        inputs = (backward, forward) if rule.backward_first else (forward, backward)
        order = (weight, *inputs) if rule.eager else (*inputs, weight)
        chosen = next((code for code in order if code is not None), None)
        if chosen is None or chosen != weight:
            return chosen, later
        if later < time + rule.patience * line.seconds[chosen]:
            return None, later
        return chosen, later

    def _room(self, code: int, rank: int) -> bool:
        """Whether a forward fits, with room left for the oldest micro-batch to get through this rank."""
        line = self.line
        own = line.own[rank]
        k = self.counts[code]
        oldest = self.counts[3 * own[-1]]
        needed = line.keeps[code]
        needed += sum(
            line.keeps[3 * stage]
            for stage in own
            if self.counts[3 * stage] <= oldest and not (3 * stage == code and k == oldest)
        )
        if self.held[rank] + needed > line.limits[rank] * (1 + 1e-12):
            return False
        started = self.counts[3 * own[0]] - self.counts[3 * own[0] + 1]
        return 3 * own[0] != code or k == oldest or started < self.rule.caps[rank]
