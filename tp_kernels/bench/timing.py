"""One case, several contestants, in turns: who ran how long, and who dropped out.

A contestant is a set of rank processes that is asked for a slice: some calls on every rank, each of which the
ranks start together. A call takes as long as on its slowest rank. Contestants take turns for several rounds,
so that a slow moment of the machine hits all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tp_kernels.comm.errors import TpKernelsError

Progress = Callable[[str, int, int], None]  # what runs, steps done, steps in all

MOST_CALLS = 400
LEAST_CALLS = 3


class WrongResultError(TpKernelsError):
    """A contestant computed something else than the oracle: its times mean nothing."""


class ContestantLost(TpKernelsError):
    """A contestant cannot go on; the others can. The message says why."""


@dataclass(frozen=True)
class RankSlice:
    """What one rank did in a slice: seconds by call, and the error of the result if it was checked.

    error: in units of what rounding explains; more than 1 is a wrong result.
    """

    seconds: list[float]
    error: float | None = None


class Contestant(Protocol):
    """A set of rank processes that waits without using a core until it is its turn."""

    name: str
    ours: bool  # whether a wrong result is a fault of this package

    def prepare(self, case: Mapping[str, Any]) -> str | None:
        """Make tensors for `case`; returns why this contestant does not run it, or None."""

    def slice(self, calls: int, warm: int, check: bool) -> list[RankSlice]:
        """`calls` timed calls after `warm` others, on every rank."""

    def finish(self) -> None:
        """Let go of the tensors."""


@dataclass
class Sample:
    """Times of one contestant in one case, in seconds, over all calls of all rounds."""

    seconds: list[float] = field(default_factory=list)
    error: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p10(self) -> float:
        return percentile(self.seconds, 0.1)

    @property
    def p90(self) -> float:
        return percentile(self.seconds, 0.9)

    def to_json(self) -> dict[str, Any]:
        return {
            "median_us": self.median * 1e6,
            "p10_us": self.p10 * 1e6,
            "p90_us": self.p90 * 1e6,
            "calls": len(self.seconds),
            "correct": True,  # a wrong result is not a sample
            "error": self.error,
        }


@dataclass(frozen=True)
class Budget:
    """How long to measure: `rounds` slices per contestant and case of `seconds` each, or a few calls."""

    rounds: int = 5
    seconds: float = 0.04


def percentile(values: Sequence[float], share: float) -> float:
    """Value below which `share` of `values` are, by linear interpolation."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def slowest(ranks: Sequence[RankSlice]) -> list[float]:
    """Seconds of each call on the rank where that call took longest."""
    return [max(call) for call in zip(*(rank.seconds for rank in ranks), strict=True)]


def calls_for(seconds: float, budget: float) -> int:
    """Calls of a slice, for calls of `seconds` each: what fits, but some; one if that is too long."""
    if seconds >= budget:
        return 1
    return max(LEAST_CALLS, min(MOST_CALLS, int(budget / seconds)))


class Measurement:
    """All contestants in one case: `samples` by contestant, and why the others are `absent`.

    `lost` outlives the case: who drops out is added, and skipped in later cases.
    """

    def __init__(self, case: Mapping[str, Any], budget: Budget, lost: dict[str, str]) -> None:
        self.case = case
        self.samples: dict[str, Sample] = {}
        self.absent: dict[str, str] = {}
        self._budget = budget
        self._lost = lost
        self._running: list[Contestant] = []
        self._calls: dict[str, int] = {}

    def run(self, contestants: Sequence[Contestant]) -> Measurement:
        """Let everybody take their turns.

        Raises:
            WrongResultError: this package gave a wrong result, before or after the rounds.
        """
        for one in contestants:
            if one.name not in self._lost:
                self._or_drop(one, self._start)
        rounds = self._budget.rounds
        for turn in range(rounds):
            first = turn % len(self._running) if self._running else 0
            # Rotated, so that nobody always follows the same one.
            for one in self._running[first:] + self._running[:first]:
                self._or_drop(one, self._last_turn if turn == rounds - 1 else self._turn)
        for one in self._running:
            one.finish()
        return self

    def _start(self, one: Contestant) -> None:
        why_not = one.prepare(self.case)
        if why_not:
            self.absent[one.name] = why_not
            return
        self.samples[one.name] = Sample()
        trial = self._slice(one, 1, 1, check=True)[0]
        if trial < self._budget.seconds:
            trial = statistics.median(self._slice(one, LEAST_CALLS, 1, check=False))
        self._calls[one.name] = calls_for(trial, self._budget.seconds)
        self._running.append(one)

    def _turn(self, one: Contestant, last: bool = False) -> None:
        calls = self._calls[one.name]
        seconds = self._slice(one, calls, 0 if calls == 1 else 2, check=last)
        self.samples[one.name].seconds += seconds

    def _last_turn(self, one: Contestant) -> None:
        self._turn(one, last=True)

    def _or_drop(self, one: Contestant, step: Callable[[Contestant], None]) -> None:
        try:
            step(one)
        except (ContestantLost, WrongResultError) as failure:
            if one.ours and isinstance(failure, WrongResultError):
                raise
            self._lost[one.name] = self.absent[one.name] = f"{failure} ({describe(self.case)})"
            self.samples.pop(one.name, None)
            self._running = [other for other in self._running if other is not one]

    def _slice(self, one: Contestant, calls: int, warm: int, check: bool) -> list[float]:
        ranks = one.slice(calls, warm, check)
        if check:
            for rank, found in enumerate(ranks):
                error = found.error
                if error is None or not error <= 1.0:
                    how = "not checked" if error is None else f"{error:.3g} times what rounding may"
                    raise WrongResultError(
                        f"{one.name}: wrong result on rank {rank} at {describe(self.case)}: {how}"
                    )
                self.samples[one.name].error = max(self.samples[one.name].error, error)
        return slowest(ranks)


def describe(case: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in case.items())
