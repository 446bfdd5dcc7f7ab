"""Cut a list of layers into the stages of a pipeline: the slowest stage as fast as it can be.

A pipeline runs at the pace of its slowest stage, so the cut that makes the slowest stage fastest is searched
for, exactly, by dynamic programming over (stages so far, layers so far): O(stages * layers^2). Making the
*spread* of the stages small is another problem, whose answer may be slower: with unequal devices or transfers
stages that are equally slow beat none. Ties go to the smallest sum of times (filling and draining the
pipeline), then to the smallest sum of squares (spread).
Limits: one stage per device where devices differ; transfers are counted per link, not per shared network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from tp_kernels.comm.errors import ShapeError, UnsupportedError

from .plan import LayerCost, Plan, StagePlan, as_bytes, in_flight, schedule_of

Method = Literal["profile", "parameters", "uniform"]
Floats = npt.NDArray[np.float64]

_REORDER_LIMIT = 8  # devices; the search visits their 2^n subsets
_SAME = 1e-9  # relative: sums of the same times in another order


def partition(
    costs: Sequence[LayerCost],
    stages: int,
    *,
    method: Method = "profile",
    speeds: Sequence[float] | None = None,
    memory: int | Sequence[int | None] | None = None,
    bandwidth: float | Sequence[float] | None = None,
    latency: float = 0.0,
    overlap: bool = True,
    schedule: str = "one_f_one_b",
    micro_batches: int | None = None,
    optimizer_factor: float = 2.0,
    checkpoint: bool = False,
    reorder: bool = False,
) -> Plan:
    """The contiguous cut of `costs` into `stages` whose slowest stage is fastest.

    Args:
        costs: of the layers, in order, for one micro-batch on a device of speed 1.
        method: what a stage's time is made of: "profile" seconds, "parameters" bytes of parameters, or
            "uniform" the number of layers. Transfers count with "profile" only.
        speeds: of each stage's device; a layer takes its time divided by the speed. Default: all 1.
        memory: bytes of each stage's device, or of all; None: no limit. Needed are parameters, their
            gradients, `optimizer_factor` times the parameters for the optimizer's state (2: Adam), and the
            activations of all micro-batches that the schedule keeps at that stage ("pipedream": the
            parameters of so many versions as well). With "forward_only": the parameters, and
            `activation_bytes` (a KV cache) of every micro-batch.
        bandwidth: bytes per second from each stage to the next (stages - 1 of them), or of all links; None:
            transfers cost nothing.
        latency: seconds per message, with `bandwidth`.
        overlap: whether transfers run beside computation. Then a link is one more thing that may be the
            slowest; otherwise its sender waits, and its time is part of the stage's.
        schedule: a name in `SCHEDULES` with one stage per rank. "forward_only" counts forwards; the others
            forwards and backwards.
        micro_batches: per step; default: twice the stages.
        checkpoint: a stage keeps only its input per micro-batch, and repeats its forward in the backward.
        reorder: also find the best order of the devices that `speeds` and `memory` describe (at most 8).

    Raises:
        ShapeError: fewer layers than stages, lists of another length than stages, numbers that are not
            finite or have the wrong sign.
        UnsupportedError: a schedule that puts several stages on a rank; or no cut fits into memory: it
            names the stage, what it lacks, and what would fit.
    """
    request = _Request(
        tuple(costs),
        _count("stages", stages),
        method,
        _each("speeds", speeds, stages, 1.0),
        tuple(None if b is None else int(b) for b in _each("memory", memory, stages, None)),
        _each("bandwidth", bandwidth, stages - 1, None),
        latency,
        overlap,
        schedule,
        _count("micro_batches", 2 * stages if micro_batches is None else micro_batches),
        optimizer_factor,
        checkpoint,
        reorder,
    )
    request.check()
    found = request.solve()
    if found is None:
        raise UnsupportedError(request.why_nothing_fits())
    return request.plan(*found)


def _count(name: str, given: Any) -> int:
    if not isinstance(given, Integral) or given < 1:
        raise ShapeError(f"{name}={given!r}: use a whole number from 1")
    return int(given)


def _within(number: Any, least: float) -> bool:
    """Whether it is a number from `least` on, and finite."""
    return isinstance(number, Real) and bool(least <= number < np.inf)  # type: ignore[operator]


def _each(name: str, given: Any, count: int, default: Any) -> tuple[Any, ...]:
    """One number (or None, where it is the default) per stage or link: finite and positive."""
    if given is None:
        return (default,) * count
    values = [given] * count if isinstance(given, Real) else list(given)
    if len(values) != count:
        what = "links" if name == "bandwidth" else "stages"
        raise ShapeError(f"{name} has {len(values)} values for {count} {what}: {values}")
    least = (
        0.0 if name == "memory" else float(np.nextafter(0.0, 1.0))
    )  # a device may have no memory left
    for value in values:
        if value is None and default is None:
            continue
        if not _within(value, least):
            raise ShapeError(f"{name}={values}: all must be finite and positive")
    return tuple(None if value is None else float(value) for value in values)


@dataclass(frozen=True)
class _Request:
    costs: tuple[LayerCost, ...]
    stages: int
    method: Method
    speeds: tuple[float, ...]
    memory: tuple[int | None, ...]
    bandwidth: tuple[float | None, ...]
    latency: float
    overlap: bool
    schedule: str
    micro_batches: int
    optimizer_factor: float
    checkpoint: bool
    reorder: bool

    def check(self) -> None:
        if not 1 <= self.stages <= len(self.costs):
            raise ShapeError(
                f"{len(self.costs)} layers for {self.stages} stages: a stage needs at least one layer; "
                f"use 1 to {len(self.costs)} stages, or describe smaller layers"
            )
        if self.method not in get_args(Method):
            raise UnsupportedError(f"method={self.method!r}: use one of {get_args(Method)}")
        for name, number in (
            ("latency", self.latency),
            ("optimizer_factor", self.optimizer_factor),
        ):
            if not _within(number, 0.0):
                raise ShapeError(f"{name}={number!r}: it must be finite and not negative")
        schedule_of(self.schedule, self.stages, self.micro_batches)
        for cost in self.costs:
            for name, number in vars(cost).items():
                if name != "name" and not _within(number, 0.0):
                    raise ShapeError(
                        f"layer {cost.name!r}: {name}={number!r} must be finite and not negative"
                    )
        if self.reorder and self.stages > _REORDER_LIMIT:
            raise UnsupportedError(
                f"reorder=True with {self.stages} devices: at most {_REORDER_LIMIT}; "
                "give them in a sensible order, such as along the network"
            )
        if self.reorder and len(set(self.bandwidth)) > 1:
            raise UnsupportedError(
                "reorder=True with one bandwidth per link: the links of other orders are unknown; "
                "give one bandwidth for all"
            )

    @property
    def trains(self) -> bool:
        return self.schedule != "forward_only"

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """Micro-batches that each stage keeps at once."""
        return in_flight(self.schedule, self.stages, self.micro_batches)

    def solve(self) -> tuple[list[int], list[int]] | None:
        """Bounds [stages + 1] and the device of each stage, or None if nothing fits."""
        least = self._search(self._missing)
        assert least is not None
        if least.value > 0:
            return None
        slowest = self._search(self._pace)
        if slowest is None:
            raise ShapeError(
                "no cut takes a finite time: costs / speeds or sizes / bandwidth overflow"
            )
        # None where the squares of its times overflow.
        chosen = self._search(self._pace, at_most=slowest.value * (1 + _SAME)) or slowest
        return chosen.bounds, chosen.devices

    def _search(self, table: Any, at_most: float | None = None) -> _Found | None:
        """The cut with the smallest largest entry of `table`; with `at_most` given, the best of those whose
        entries do not exceed it: smallest sum of times, then of their squares.
        """
        count, layers = self.stages, len(self.costs)
        everyone = range(count)
        start = np.full(layers + 1, np.inf)
        start[0] = 0.0
        # Of the devices used so far: the best value for every number of layers so far, and how it came about.
        states: dict[int, tuple[Floats, ...]] = {0: (start, start)}
        steps: list[dict[int, list[tuple[int, Any]]]] = []
        for stage in everyone:
            devices = everyone if self.reorder else [stage]
            tables = {device: self._tables(table, stage, device, at_most) for device in devices}
            reached: dict[int, list[tuple[int, tuple[Floats, ...], Any]]] = {}
            for used, state in states.items():
                for device in devices:
                    if not used >> device & 1:
                        *values, choice = _extend(state, tables[device], at_most is None)
                        reached.setdefault(used | 1 << device, []).append(
                            (device, tuple(values), choice)
                        )
            states, step = {}, {}
            for used, ways in reached.items():
                states[used], step[used] = _best(ways, layers)
            steps.append(step)
        used = (1 << count) - 1
        value, end = float(states[used][0][layers]), layers
        bounds, order = [layers], list[int]()
        if not np.isfinite(value):
            return None
        for step in reversed(steps):
            device, end = step[used][end]
            bounds.append(end)
            order.append(device)
            used &= ~(1 << device)
        return _Found(value, bounds[::-1], order[::-1])

    def _tables(self, table: Any, stage: int, device: int, at_most: float | None) -> Any:
        """[layers + 1, layers + 1]: what a stage of the layers from row to column costs; infinite where it
        has no layer, exceeds memory (unless that is asked for) or `at_most`.
        """
        limits = table(stage, device)
        forbidden = np.tri(len(self.costs) + 1, dtype=bool)
        if table != self._missing:
            forbidden |= self._missing(stage, device) > 0
        if at_most is None:
            return (np.where(forbidden, np.inf, limits),)
        forbidden |= limits > at_most
        seconds = self._seconds(stage, device)
        total = seconds + self._sending(stage)[None, :] * (2 if self.trains else 1)
        with np.errstate(over="ignore"):
            return tuple(np.where(forbidden, np.inf, part) for part in (total, seconds**2))

    def _seconds(self, stage: int, device: int) -> Floats:
        with np.errstate(over="ignore"):
            return _between(self._weights) / self.speeds[device]

    @cached_property
    def _weights(self) -> Floats:
        if self.method == "uniform":
            return np.ones(len(self.costs))
        if self.method == "parameters":
            return np.array([cost.parameter_bytes for cost in self.costs], float)
        return np.array([self.time(cost) for cost in self.costs], float)

    def time(self, cost: LayerCost) -> float:
        """Seconds of a layer in one micro-batch at speed 1."""
        if not self.trains:
            return cost.forward
        return cost.forward * (2 if self.checkpoint else 1) + cost.backward

    def _sending(self, stage: int) -> Floats:
        """[layers + 1]: seconds to send one micro-batch on from `stage` when it ends after so many layers."""
        seconds = np.zeros(len(self.costs) + 1)
        if self.method == "profile" and 0 <= stage < self.stages - 1:
            rate = self.bandwidth[stage]
            if rate is not None:
                sizes = np.array([cost.output_bytes for cost in self.costs], float)
                seconds[1:] = self.latency + sizes / rate
        return seconds

    def _pace(self, stage: int, device: int) -> Floats:
        """Seconds between two micro-batches, if no other stage is slower."""
        seconds, forward = self._seconds(stage, device), self._sending(stage)
        if self.overlap:  # the two directions of a link do not share it
            return np.maximum(seconds, forward[None, :])
        backward = self._sending(stage - 1) if self.trains else np.zeros_like(forward)
        return seconds + forward[None, :] + backward[:, None]

    def _missing(self, stage: int, device: int) -> Floats:
        """Bytes that the device lacks; 0 or less where the stage fits."""
        limit = self.memory[device]
        if limit is None:
            return np.zeros((len(self.costs) + 1,) * 2)
        return self.needed(stage) - float(limit)

    def needed(self, stage: int) -> Floats:
        """Bytes that the layers from row to column need as `stage`."""
        copies = 2.0 + self.optimizer_factor if self.trains else 1.0
        if not schedule_of(self.schedule, self.stages, self.micro_batches).flush:
            copies += self.kept[stage] - 1  # versions of weights whose backward is still to come
        parameters = _between(np.array([cost.parameter_bytes for cost in self.costs], float))
        activations = _between(np.array([cost.activation_bytes for cost in self.costs], float))
        if self.checkpoint and self.trains:
            inputs = np.array([0, *(cost.output_bytes for cost in self.costs)], float)
            return copies * parameters + self.kept[stage] * inputs[:, None] + activations
        return copies * parameters + self.kept[stage] * activations

    def plan(self, bounds: list[int], devices: list[int]) -> Plan:
        stages = []
        for stage, device in enumerate(devices):
            first, last = bounds[stage], bounds[stage + 1]
            layers, speed = self.costs[first:last], self.speeds[device]
            repeated = sum(cost.forward for cost in layers) if self.checkpoint else 0.0
            stages.append(
                StagePlan(
                    first=first,
                    last=last,
                    names=(layers[0].name, layers[-1].name),
                    device=device,
                    speed=speed,
                    parameter_bytes=sum(cost.parameter_bytes for cost in layers),
                    activation_bytes=sum(cost.activation_bytes for cost in layers),
                    forward=sum(cost.forward for cost in layers) / speed,
                    backward=(sum(cost.backward for cost in layers) + repeated) / speed
                    if self.trains
                    else 0.0,
                    sending=float(self._sending(stage)[last]),
                    memory=int(self.needed(stage)[first, last]),
                    limit=self.memory[device],
                    in_flight=self.kept[stage],
                )
            )
        return Plan(tuple(stages), self.method, self.schedule, self.micro_batches, self.overlap)

    def why_nothing_fits(self) -> str:
        least = self._search(self._missing)
        assert least is not None
        lacks = [
            float(self._missing(stage, device)[least.bounds[stage], least.bounds[stage + 1]])
            for stage, device in enumerate(least.devices)
        ]
        stage = int(np.argmax(lacks))
        device, first, last = least.devices[stage], least.bounds[stage], least.bounds[stage + 1]
        needed = float(self.needed(stage)[first, last])
        limit = self.memory[device] or 0
        equal = self._with(memory=(0,) * self.stages)
        even = equal._search(equal._missing)
        assert even is not None
        ways = [f"{as_bytes(even.value)} on every device"]
        for text, changes in self._remedies():
            if self._with(**changes).solve() is not None:
                ways.append(text)
        return (
            f"no cut of {len(self.costs)} layers into {self.stages} stages fits into memory. In the cut that "
            f"lacks least, stage {stage} on device {device} ({self.costs[first].name} to "
            f"{self.costs[last - 1].name}, {self.kept[stage]} micro-batches kept) needs {as_bytes(needed)} "
            f"of {as_bytes(limit)}: {as_bytes(needed - limit)} are missing. What would fit: "
            f"{'; '.join(ways)}; or smaller micro-batches, or more stages"
        )

    def _remedies(self) -> Iterable[tuple[str, dict[str, Any]]]:
        if self.trains and not self.checkpoint:
            yield "checkpoint=True", {"checkpoint": True}
        if self.schedule == "gpipe":
            yield "schedule='one_f_one_b'", {"schedule": "one_f_one_b"}
        if not self.reorder and self.stages <= _REORDER_LIMIT and len(set(self.bandwidth)) <= 1:
            yield "another order of the devices (reorder=True)", {"reorder": True}
        for count in range(self.micro_batches - 1, 0, -1):
            fewer = self._with(micro_batches=count)
            if fewer.kept != self.kept and fewer.solve() is not None:
                yield f"micro_batches={count} of the same size", {"micro_batches": count}
                return

    def _with(self, **changes: Any) -> _Request:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return _Request(**(fields | changes))


@dataclass(frozen=True)
class _Found:
    value: float
    bounds: list[int]
    devices: list[int]


def _between(values: Floats) -> Floats:
    """[n + 1, n + 1]: the sum of `values` from row to column."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return sums[None, :] - sums[:, None]


def _extend(
    state: tuple[Floats, ...], tables: tuple[Floats, ...], largest: bool
) -> tuple[Any, ...]:
    """One more stage: the best values for every end, and where that stage begins."""
    if largest:
        values = np.maximum(state[0][:, None], tables[0])
        choice = values.argmin(0)
        best = values[choice, np.arange(len(choice))]
        return best, best, choice
    sums = state[0][:, None] + tables[0]
    least = sums.min(0)
    squares = np.where(sums <= least * (1 + _SAME), state[1][:, None] + tables[1], np.inf)
    choice = squares.argmin(0)
    columns = np.arange(len(choice))
    return sums[choice, columns], squares[choice, columns], choice


def _best(
    ways: list[tuple[int, tuple[Floats, ...], Any]], layers: int
) -> tuple[tuple[Floats, ...], list[tuple[int, int]]]:
    """The better of several devices for the last stage, for every end."""
    first = np.stack([value[0] for _, value, _ in ways])
    second = np.stack([value[1] for _, value, _ in ways])
    least = first.min(0)
    winner = np.where(first <= least * (1 + _SAME), second, np.inf).argmin(0)
    columns = np.arange(layers + 1)
    chosen = [(ways[w][0], int(ways[w][2][end])) for end, w in enumerate(winner)]
    return (first[winner, columns], second[winner, columns]), chosen
