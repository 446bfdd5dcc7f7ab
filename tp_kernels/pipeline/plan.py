"""What a layer costs, and a cut of layers into stages with what it will cost: printable, as JSON and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache

from tp_kernels.comm.errors import UnsupportedError

from .generators import SCHEDULES
from .schedule import Kind, Schedule
from .simulate import Costs
from .timeline import Timeline


@dataclass(frozen=True)
class LayerCost:
    """What a layer takes for one micro-batch.

    Attributes:
        forward, backward: seconds.
        parameter_bytes: of its parameters.
        activation_bytes: kept from its forward for its backward; in inference, its part of the KV cache.
        output_bytes: what it passes on.
    """

    name: str
    forward: float = 0.0
    backward: float = 0.0
    parameter_bytes: int = 0
    activation_bytes: int = 0
    output_bytes: int = 0


@dataclass(frozen=True)
class StagePlan:
    """Layers `first` to `last` - 1 on one device: seconds per micro-batch there, bytes per step."""

    first: int
    last: int
    names: tuple[str, str]  # of the first and the last layer
    device: int
    speed: float
    parameter_bytes: int
    activation_bytes: int  # of one micro-batch
    forward: float
    backward: float
    sending: float  # one micro-batch to the next stage
    memory: int
    limit: int | None
    in_flight: int  # micro-batches whose activations it keeps at once


@dataclass(frozen=True)
class Plan:
    """A cut of a list of layers into stages. `print` shows it as a table."""

    stages: tuple[StagePlan, ...]
    method: str
    schedule: str
    micro_batches: int
    overlap: bool

    @property
    def bounds(self) -> tuple[int, ...]:
        """[stages + 1]: stage s has the layers bounds[s] to bounds[s + 1] - 1."""
        return (0, *(stage.last for stage in self.stages))

    @property
    def times(self) -> tuple[float, ...]:
        """Seconds of computing per stage and micro-batch."""
        return tuple(stage.forward + stage.backward for stage in self.stages)

    @property
    def memory(self) -> tuple[int, ...]:
        """Bytes needed per stage."""
        return tuple(stage.memory for stage in self.stages)

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of each stage, as counted in `speeds` and `memory`."""
        return tuple(stage.device for stage in self.stages)

    @property
    def costs(self) -> Costs:
        """For `simulate`: whole backwards as measured, their two parts as halves of them."""
        forward = [stage.forward for stage in self.stages]
        backward = [stage.backward for stage in self.stages]
        links = [stage.sending for stage in self.stages[:-1]]
        if not self.overlap:  # whoever sends computes nothing meanwhile
            forward = [own + link for own, link in zip(forward, [*links, 0.0], strict=True)]
            if self.trains:
                backward = [own + link for own, link in zip(backward, [0.0, *links], strict=True)]
        half = [seconds / 2 for seconds in backward]
        return Costs(
            forward=forward,
            backward=backward,
            backward_input=half,
            backward_weight=half,
            communication=links if self.overlap else 0.0,
            activation=[stage.activation_bytes for stage in self.stages],
            unit="bytes",
        )

    @property
    def trains(self) -> bool:
        """Whether its schedule has backwards."""
        return self.schedule != "forward_only"

    @cached_property
    def timeline(self) -> Timeline:
        """The predicted step: its makespan, bubble, picture."""
        return schedule_of(self.schedule, len(self.stages), self.micro_batches).simulate(self.costs)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote. Raises UnsupportedError if `text` is anything else."""
        try:
            fields = json.loads(text)
            stages = [
                StagePlan(**(stage | {"names": tuple(stage["names"])}))
                for stage in fields.pop("stages")
            ]
            if not stages:
                raise ValueError("it has no stages")
            return Plan(stages=tuple(stages), **fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnsupportedError(f"not a plan as Plan.to_json() writes it: {error}") from error

    def __str__(self) -> str:
        slowest, step = max(self.times), self.timeline
        rows: list[Sequence[str]] = [
            ("stage", "device", "layers", "", "params", "forward", "backward", "memory", "waits")
        ]
        for number, stage in enumerate(self.stages):
            memory = as_bytes(stage.memory)
            if stage.limit is not None:
                memory += f" of {as_bytes(stage.limit)}"
            idle = 1 - self.times[number] / slowest if slowest else 0.0
            rows.append(
                (
                    str(number),
                    f"{stage.device} (x{stage.speed:g})",
                    str(stage.last - stage.first),
                    stage.names[0] if len(set(stage.names)) == 1 else "..".join(stage.names),
                    as_bytes(stage.parameter_bytes),
                    seconds(stage.forward),
                    seconds(stage.backward),
                    memory,
                    f"{idle:.0%}",
                )
            )
        title = (
            (
                f"{len(self.stages)} stages by {self.method}, {self.schedule}, "
                f"{self.micro_batches} micro-batches: "
                f"a step takes {seconds(step.makespan)}, bubble {step.bubble_over_total:.1%} of the time "
                f"({step.bubble_over_ideal:.1%} of the work)"
            )
            if slowest
            else f"{len(self.stages)} stages by {self.method}; nothing is known of their times"
        )
        return f"{title}\n{_columns(rows)}"


@lru_cache(maxsize=256)
def schedule_of(name: str, stages: int, micro_batches: int) -> Schedule:
    """The schedule called `name` with so many stages, one per rank.

    Raises UnsupportedError if there is none: an unknown name, or a schedule with several stages per rank.
    Which cut is best is another problem there: a rank takes the sum of stages that are no neighbours.
    """
    make = SCHEDULES.get(name)
    if make is None:
        raise UnsupportedError(f"schedule={name!r}: use one of {', '.join(SCHEDULES)}")
    if (per_rank := make(1, 1).stages) > 1:
        raise UnsupportedError(
            f"schedule={name!r} puts {per_rank} stages on each rank, whose times add up; a plan has one "
            "stage per device: plan with one_f_one_b or zero_bubble_h1, or choose bounds for split_layers"
        )
    return make(stages, micro_batches)


@lru_cache(maxsize=256)
def in_flight(name: str, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches whose activations a stage keeps at once, by stage.

    With "forward_only" all of them: in inference every request keeps its cache in every stage.
    """
    schedule = schedule_of(name, stages, micro_batches)
    if not schedule.trains:
        return (micro_batches,) * stages
    held, most = [0] * stages, [0] * stages
    for rank in range(schedule.ranks):
        for action in schedule.order(rank):
            stage = action.stage
            held[stage] += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(action.kind, 0)
            most[stage] = max(most[stage], held[stage])
    return tuple(most)


def as_bytes(count: float) -> str:
    """A number of bytes for people, rounded to three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1000 or unit == "GiB":
            return f"{count:.3g} {unit}"
        count /= 1024
    raise AssertionError


def seconds(value: float) -> str:
    """Seconds for people."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1 or unit == "us":
            return f"{value * factor:.3g} {unit}"
    raise AssertionError


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if column == 3 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
