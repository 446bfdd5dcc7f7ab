"""Measure candidates on all ranks of a group and agree on one.

All ranks run the same candidates in the same order. After every step they exchange what came of it, and all
decide from those same numbers, so they agree on what comes next and on the winner. A call lasts as long as on
its slowest rank. A candidate that fails on one rank, or there has other bits than the built-in choice, is
dropped on all of them.

    for each candidate:         compile, one call, compare its bits
    for each round, candidate:  some calls, each after a meeting of all ranks; rounds start in turn with each

Rounds are interleaved, so that a slow moment of the machine hits all candidates. Time is bounded by `Limits`
and, where a rank does not come, by the timeouts of the group and of the subject.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from tp_kernels.comm.collectives import barrier
from tp_kernels.comm.errors import GroupMismatchError, UnsupportedError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.objects import all_gather_object

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# What is chosen from, a frozen dataclass: tilings of a product, rows of a group.
C = TypeVar("C", bound="DataclassInstance")
C_contra = TypeVar("C_contra", contravariant=True)
Progress = Callable[[str, int, int], None]  # what runs, steps done, steps in all

MOST_CALLS = 200


class Subject(Protocol[C_contra]):
    """What can be computed with any candidate. Methods raise what they like if one does not work."""

    def prepare(self, candidate: C_contra, /) -> None:
        """Compile. Local: no rank waits for another."""

    def digest(self, candidate: C_contra, /) -> str:
        """Compute; equal for results of equal bits on this rank. Collective."""

    def ready(self) -> None:
        """What a rank has to do before every timed call, not timed. Local."""

    def seconds(self, candidate: C_contra, /) -> float:
        """Compute; what it took on this rank, from a meeting of all ranks on. Collective."""

    def recover(self) -> None:
        """Make later calls possible after one that failed on some rank. Collective."""


@dataclass(frozen=True)
class Limits:
    """How long to measure; equal on all ranks.

    Args:
        rounds: turns of every candidate.
        turn: seconds of a turn; a longer call is made once a turn.
        seconds: after so many nothing new is begun: no other candidate, and no round but the first.
    """

    rounds: int = 5
    turn: float = 0.02
    seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UnsupportedError(f"{self}: without a round there is no time")

    def calls(self, seconds: float) -> int:
        """Calls of a turn, for calls of `seconds` each."""
        return max(1, min(MOST_CALLS, int(self.turn / max(seconds, 1e-9))))


@dataclass(frozen=True)
class Timing:
    """Seconds of a call on its slowest rank: median, tenth and ninetieth percentile of `calls` calls."""

    median: float
    p10: float
    p90: float
    calls: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Timing:
        tenths = statistics.quantiles(seconds, n=10, method="inclusive") if seconds[1:] else seconds
        return Timing(statistics.median(seconds), tenths[0], tenths[-1], len(seconds))


@dataclass(frozen=True)
class Tuned(Generic[C]):
    """What ranks agreed on; the same on all of them.

    Args:
        winner: the candidate to use; the built-in choice unless another is faster beyond its spread.
        timings: of all candidates that ran.
        dropped: why the others have no timing.
    """

    winner: C
    timings: dict[C, Timing]
    dropped: dict[C, str]


def tune(
    group: ParallelGroup,
    candidates: Sequence[C],
    subject: Subject[C],
    limits: Limits | None = None,
    progress: Progress = lambda what, done, total: None,
    label: Callable[[C], str] = str,
) -> Tuned[C]:
    """Find the fastest of `candidates`, the first of which is the built-in choice. Collective.

    `progress` is told the `label` of what runs.

    Raises:
        GroupMismatchError: ranks have different candidates or limits; on every rank.
        UnsupportedError: the built-in choice does not work, so there is nothing to compare with.
        PeerLostError, CollectiveTimeoutError: a rank has gone.
    """
    session = _Session(group, candidates, subject, limits or Limits(), progress, label)
    session.compare_bits()
    session.measure()
    return session.result()


class _Session(Generic[C]):
    def __init__(
        self,
        group: ParallelGroup,
        candidates: Sequence[C],
        subject: Subject[C],
        limits: Limits,
        progress: Progress,
        label: Callable[[C], str],
    ) -> None:
        plan = [[asdict(one) for one in candidates], asdict(limits)]
        if any(other != plan for other in all_gather_object(plan, group)):
            raise GroupMismatchError(
                f"rank {group.rank}: the ranks are to tune other candidates, or within other limits"
            )
        self.group, self.subject, self.limits, self.progress = group, subject, limits, progress
        self.label = label
        self.built_in = candidates[0]
        self.running = list(candidates)
        self.dropped: dict[C, str] = {}
        self.seconds: dict[C, list[float]] = {}
        self.begin = perf_counter()
        self.elapsed = 0.0  # on the slowest rank, when they last exchanged
        self.steps, self.done = len(candidates) * (1 + limits.rounds), 0

    def compare_bits(self) -> None:
        """Leave those that compile, run, and have the bits of the first on every rank."""
        expected = self._digests(self.built_in)
        if not expected:
            raise UnsupportedError(
                f"rank {self.group.rank}: the built-in choice {self.built_in} does not work: "
                f"{self.dropped[self.built_in]}"
            )
        for candidate in self.running[1:]:
            if self.elapsed > self.limits.seconds:
                self._drop(candidate, f"no time left after {self.limits.seconds:g} s")
                continue
            digests = self._digests(candidate)
            wrong = [rank for rank, one in enumerate(digests) if one != expected[rank]]
            if digests and wrong:
                self._drop(candidate, f"other bits than the built-in choice on rank {wrong[0]}")

    def measure(self) -> None:
        """Rounds of turns; how many calls a turn has follows from a first one."""
        calls = dict.fromkeys(self.running, 1)
        for turn in range(self.limits.rounds):
            if turn and self.elapsed > self.limits.seconds:
                break
            first = turn % len(self.running) if self.running else 0
            for candidate in self.running[first:] + self.running[:first]:
                self._step(candidate)
                if not turn:
                    trial = self._turn(candidate, 1)
                    if not trial:
                        continue
                    calls[candidate] = self.limits.calls(trial[0])
                self.seconds.setdefault(candidate, []).extend(
                    self._turn(candidate, calls[candidate])
                )

    def result(self) -> Tuned[C]:
        timings = {candidate: Timing.of(self.seconds[candidate]) for candidate in self.running}
        if not timings:
            raise UnsupportedError(
                f"rank {self.group.rank}: no candidate ran to the end: {self.dropped}"
            )
        # Of equal ones the first: `min` goes by the order of the candidates.
        winner = min(timings, key=lambda candidate: timings[candidate].median)
        usual = timings.get(self.built_in)
        if usual is not None and timings[winner].median >= usual.p10:
            winner = self.built_in
        return Tuned(winner, timings, self.dropped)

    def _digests(self, candidate: C) -> list[Any]:
        """Of the result of every rank; none if some rank has none."""
        self._step(candidate)
        if not self._together(candidate, lambda: self.subject.prepare(candidate)):
            return []
        return self._together(candidate, lambda: self.subject.digest(candidate), collective=True)

    def _turn(self, candidate: C, calls: int) -> list[float]:
        """Seconds of each call on its slowest rank; none if some rank failed."""
        warm = int(calls > 1)

        def run() -> list[float]:
            seconds: list[float] = []
            failure: Exception | None = None
            for _ in range(warm + calls):
                # Whoever failed goes on to meet the others: they learn of it after the turn.
                try:
                    self.subject.ready()
                except Exception as error:
                    failure = failure or error
                barrier(self.group)
                if failure is None:
                    try:
                        seconds.append(self.subject.seconds(candidate))
                    except Exception as error:
                        failure = error
            if failure is not None:
                raise failure
            return seconds[warm:]

        ranks = self._together(candidate, run, collective=True)
        return [max(call) for call in zip(*ranks, strict=True)]

    def _together(
        self, candidate: C, action: Callable[[], Any], *, collective: bool = False
    ) -> list[Any]:
        """What `action` gives on each rank; nothing, and the candidate is dropped, if it fails on any."""
        outcome, failure = None, ""
        try:
            outcome = action()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"[:500]
        found = all_gather_object([failure, outcome, perf_counter() - self.begin], self.group)
        self.elapsed = max(elapsed for _, _, elapsed in found)
        failures = [f"rank {rank}: {text}" for rank, (text, _, _) in enumerate(found) if text]
        if failures:
            self._drop(candidate, "; ".join(failures))
            if collective:
                self.subject.recover()
            return []
        return [outcome for _, outcome, _ in found]

    def _drop(self, candidate: C, why: str) -> None:
        self.dropped[candidate] = why
        self.running = [one for one in self.running if one != candidate]

    def _step(self, candidate: C) -> None:
        self.progress(self.label(candidate), self.done, self.steps)
        self.done += 1
