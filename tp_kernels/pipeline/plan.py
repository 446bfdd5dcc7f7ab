"""What a layer costs, and a cut of layers into stages with what it will cost: printable, as JSON and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tp_kernels.comm.errors import UnsupportedError


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
            return Plan(stages=tuple(stages), **fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnsupportedError(f"not a plan as Plan.to_json() writes it: {error}") from error

    def __str__(self) -> str:
        slowest = max(self.times)
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
                    f"{1e3 * stage.forward:.3g} ms",
                    f"{1e3 * stage.backward:.3g} ms",
                    memory,
                    f"{idle:.0%}",
                )
            )
        return _columns(rows)


def in_flight(schedule: str, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches whose activations a stage keeps at once, by stage."""
    if schedule in (
        "gpipe",
        "forward_only",
    ):  # in inference every request keeps its cache everywhere
        return (micro_batches,) * stages
    return tuple(min(stages - stage, micro_batches) for stage in range(stages))


def as_bytes(count: float) -> str:
    """A number of bytes for people, rounded to three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1000 or unit == "GiB":
            return f"{count:.3g} {unit}"
        count /= 1024
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
