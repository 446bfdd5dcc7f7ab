"""When everything of a schedule happens, given how long actions and messages take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tp_kernels.comm.errors import ShapeError

from .schedule import Action, Kind, Schedule, ScheduleError, sources
from .timeline import Event, Memory, Timeline

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Seconds of an action on one micro-batch: a number, or one per stage.

    `backward` is that of a whole backward, by default the sum of its two parts. `communication` is what a
    message takes from one stage to the next (one number per boundary s -> s + 1); it overlaps with
    work, and a rank sends one message at a time to another rank. `activation` is what one micro-batch
    keeps from its forward to its backward, and `activation_weight` the part of it that stays until W where
    the backward is split (default: all), both in any unit, for instance bytes.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    backward: PerStage | None = None
    communication: PerStage = 0.0
    activation: PerStage = 1.0
    activation_weight: PerStage | None = None
    unit: str = "activations"

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            for number in value if isinstance(value, Sequence) else [value]:
                if number is not None and not 0 <= number < float("inf"):
                    raise ShapeError(f"{name} is {number}: costs are finite and not negative")

    def check(self, stages: int) -> None:
        """ShapeError unless every list has one number per stage (communication: per boundary)."""
        for name in _NUMBERS:
            value = getattr(self, name)
            expected = stages - 1 if name == "communication" else stages
            if isinstance(value, Sequence) and len(value) != expected:
                raise ShapeError(
                    f"{name} has {len(value)} numbers, but {stages} stages need {expected}: give one number "
                    f"for all, or {expected}"
                )

    def of(self, kind: Kind, stage: int) -> float:
        """Seconds of one computation of `stage`."""
        if kind is Kind.F:
            return _at(self.forward, stage)
        if kind is Kind.I:
            return _at(self.backward_input, stage)
        if kind is Kind.W:
            return _at(self.backward_weight, stage)
        if self.backward is not None:
            return _at(self.backward, stage)
        return _at(self.backward_input, stage) + _at(self.backward_weight, stage)

    def transfer(self, source: int, target: int) -> float:
        """Seconds of a message between two neighbouring stages on different ranks."""
        return _at(self.communication, min(source, target))

    def kept(self, stage: int, *, split: bool = False) -> float:
        """What a micro-batch keeps in `stage`; `split`: between the two parts of its backward."""
        if split and self.activation_weight is not None:
            return _at(self.activation_weight, stage)
        return _at(self.activation, stage)


_NUMBERS = [name for name in Costs.__dataclass_fields__ if name != "unit"]


def _at(value: PerStage, index: int) -> float:
    return value[index] if isinstance(value, Sequence) else value


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of `schedule` if everything takes as long as `costs` says.

    Every rank runs its order, an action as soon as the one before it has ended and its input has
    arrived. Parts of an overlapped pair run one after the other. ScheduleError if a rank waits forever.
    """
    costs.check(schedule.stages)
    orders = [schedule.order(rank) for rank in range(schedule.ranks)]
    placement = schedule.stage_to_rank
    ends: dict[Action, float] = {}
    arrivals: dict[tuple[Action, int], float] = {}
    links: dict[tuple[int, int], float] = {}
    events: list[Event] = []
    clocks, heads = [0.0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while heads[rank] < len(order):
                action = order[heads[rank]]
                ready = 0.0
                if needs := sources(action, schedule.stages):
                    source = next((need for need in needs if need in ends), None)
                    if source is None:
                        break
                    ready = arrivals.get((source, action.stage), ends[source])
                stage, kind, k = action.stage, action.kind, action.micro_batch or 0
                start = max(clocks[rank], ready)
                if start > clocks[rank]:
                    wait = "WAIT_F" if kind is Kind.F else "WAIT_B"
                    events.append(Event(rank, stage, wait, k, clocks[rank], start))
                end = start + costs.of(kind, stage)
                events.append(Event(rank, stage, str(kind), k, start, end))
                ends[action] = clocks[rank] = end
                heads[rank] += 1
                moved = True
                target = stage + 1 if kind is Kind.F else stage - 1
                if kind is Kind.W or not 0 <= target < schedule.stages or placement[target] == rank:
                    continue
                seconds = costs.transfer(stage, target)
                link = (rank, placement[target])
                begin = max(end, links.get(link, 0.0))
                links[link] = arrivals[action, target] = begin + seconds
                if seconds:
                    send = "SEND_F" if kind is Kind.F else "SEND_B"
                    events.append(Event(rank, stage, send, k, begin, begin + seconds))
    for rank, order in enumerate(orders):
        if heads[rank] < len(order):
            raise ScheduleError("its input never arrives", rank, action=order[heads[rank]])
    events.sort(key=lambda event: (event.start, event.rank))
    memory = _memory(schedule, costs, events) if schedule.trains else ()
    return Timeline(schedule.name, tuple(events), memory, costs.unit)


def _memory(schedule: Schedule, costs: Costs, events: Sequence[Event]) -> tuple[Memory, ...]:
    """What every stage keeps whenever that changes: more when a forward starts, less when a backward ends."""
    changes: list[tuple[float, float, int, int]] = []
    for event in events:
        whole, late = costs.kept(event.stage), costs.kept(event.stage, split=True)
        if event.kind == "F":
            changes.append((event.start, whole, event.rank, event.stage))
        elif event.kind in ("B", "I", "W"):
            freed = {"B": whole, "I": whole - late, "W": late}[event.kind]
            changes.append((event.end, -freed, event.rank, event.stage))
    held = [0.0] * schedule.stages
    samples = []
    for time, change, rank, stage in sorted(changes):
        held[stage] += change
        samples.append(Memory(rank, stage, time, held[stage]))
    return tuple(samples)
