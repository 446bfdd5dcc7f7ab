"""When everything of a schedule happens, given how long actions and messages take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tp_kernels.comm.errors import ShapeError

from .schedule import COMPUTE, Action, Kind, Schedule, ScheduleError, sources
from .timeline import Event, Memory, Timeline

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Seconds of an action on one micro-batch: a number, or one per stage.

    `backward` is that of a whole backward, by default the sum of its two parts. `communication` is what a
    message takes from one stage to the next (one number per boundary s -> s + 1); it overlaps with
    work, and a rank sends one message at a time to another rank. An overlapped pair takes `overlap` times
    the sum of its parts, starts when both inputs are there, and sends when both are done; None: its parts
    run one after the other. `activation` is what one micro-batch
    keeps from its forward to its backward, and `activation_weight` the part of it that stays until W where
    the backward is split (default: all), both in any unit, for instance bytes.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    backward: PerStage | None = None
    communication: PerStage = 0.0
    overlap: float | None = None
    activation: PerStage = 1.0
    activation_weight: PerStage | None = None
    unit: str = "activations"

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            for number in value if isinstance(value, Sequence) else [value]:
                if not isinstance(number, (int, float)):
                    raise ShapeError(f"{name} has {number!r}: use a number, or a list of numbers")
                if not 0 <= number < float("inf"):
                    raise ShapeError(f"{name} is {number}: costs are finite and not negative")

    def check(self, stages: int) -> None:
        """ShapeError unless every list has one number per stage (communication: per boundary).

        And unless what stays until W is a part of what is kept.
        """
        for name in _NUMBERS:
            value = getattr(self, name)
            expected = stages - 1 if name == "communication" else stages
            if isinstance(value, Sequence) and len(value) != expected:
                raise ShapeError(
                    f"{name} has {len(value)} numbers, but {stages} stages need {expected}: give one number "
                    f"for all, or {expected}"
                )

        for stage in range(stages):
            whole, late = self.kept(stage), self.kept(stage, split=True)
            if late > whole:
                raise ShapeError(
                    f"activation_weight is {late:g} in stage {stage}, activation only {whole:g}: what stays "
                    "until W is a part of it"
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


_OPTIONAL = ("backward", "overlap", "activation_weight")
_NUMBERS = [name for name in Costs.__dataclass_fields__ if name != "unit"]


def _at(value: PerStage, index: int) -> float:
    return value[index] if isinstance(value, Sequence) else value


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of `schedule` if everything takes as long as `costs` says.

    Every rank runs its order, an action as soon as the one before it has ended and its input has
    arrived. ScheduleError if a rank waits forever.
    """
    costs.check(schedule.stages)
    events = _Simulation(schedule, costs).run()
    memory = _memory(schedule, costs, events) if schedule.trains else ()
    return Timeline(schedule.name, tuple(events), memory, costs.unit)


class _Simulation:
    """Clocks of ranks and links, and what has happened so far."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.ends: dict[Action, float] = {}
        self.arrivals: dict[tuple[Action, int], float] = {}  # on the rank of a stage
        self.links: dict[tuple[int, int], float] = {}  # free from then on
        self.clocks = [0.0] * schedule.ranks
        self.events: list[Event] = []

    def run(self) -> list[Event]:
        """All events by start; which rank is looked at first makes no difference."""
        orders = [self._units(rank) for rank in range(self.schedule.ranks)]
        heads = [0] * len(orders)
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(orders):
                while heads[rank] < len(order) and self._do(order[heads[rank]], rank):
                    heads[rank] += 1
                    moved = True
        for rank, order in enumerate(orders):
            if heads[rank] < len(order):
                raise ScheduleError("its input never arrives", rank, action=order[heads[rank]][0])
        return sorted(self.events, key=lambda event: (event.start, event.rank))

    def _units(self, rank: int) -> list[tuple[Action, ...]]:
        """What `rank` runs one after the other: actions, and pairs that overlap."""
        if self.costs.overlap is None:
            return [(action,) for action in self.schedule.order(rank)]
        cells = [cell.unpacked() for cell in self.schedule.actions[rank] if cell is not None]
        return [unit for unit in cells if unit[0].kind in COMPUTE]

    def _do(self, unit: tuple[Action, ...], rank: int) -> bool:
        """Whether the inputs of `unit` will be there; then its times are known."""
        inputs = [self._input(action) for action in unit]
        if any(ready is None for ready in inputs):
            return False
        clock = self.clocks[rank]
        start = max([clock, *(ready for ready in inputs if ready is not None)])
        if start > clock:
            late = unit[max(range(len(unit)), key=lambda at: inputs[at] or 0.0)]
            wait = "WAIT_F" if late.kind is Kind.F else "WAIT_B"
            self._record(rank, late, wait, clock, start)
        seconds = sum(self.costs.of(action.kind, action.stage) for action in unit)
        if len(unit) > 1 and self.costs.overlap is not None:
            seconds *= self.costs.overlap
        self.clocks[rank] = start + seconds
        for action in unit:
            self._record(rank, action, str(action.kind), start, start + seconds)
            self.ends[action] = start + seconds
            self._send(action, rank)
        return True

    def _input(self, action: Action) -> float | None:
        """When what `action` needs is on its rank; None if that is not known yet."""
        needs = sources(action, self.schedule.stages)
        if not needs:
            return 0.0
        source = next((need for need in needs if need in self.ends), None)
        if source is None:
            return None
        return self.arrivals.get((source, action.stage), self.ends[source])

    def _send(self, action: Action, rank: int) -> None:
        stage = action.stage
        target = stage + 1 if action.kind is Kind.F else stage - 1
        if action.kind is Kind.W or not 0 <= target < self.schedule.stages:
            return
        other = self.schedule.stage_to_rank[target]
        seconds = self.costs.transfer(stage, target)
        if other == rank or not seconds:
            return
        begin = max(self.ends[action], self.links.get((rank, other), 0.0))
        self.links[rank, other] = self.arrivals[action, target] = begin + seconds
        kind = "SEND_F" if action.kind is Kind.F else "SEND_B"
        self._record(rank, action, kind, begin, begin + seconds)

    def _record(self, rank: int, action: Action, kind: str, start: float, end: float) -> None:
        self.events.append(Event(rank, action.stage, kind, action.micro_batch or 0, start, end))


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
