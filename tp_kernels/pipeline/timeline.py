"""What happened when: events of a run or of a simulation, and what follows from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.objects import all_gather_object

WORK = frozenset({"F", "I", "W", "B", "OPT"})  # a rank is busy
WAITS = frozenset({"WAIT_F", "WAIT_B"})  # a rank waits for a message
TRANSFERS = frozenset({"SEND_F", "SEND_B", "RECV_F", "RECV_B"})  # overlaps with both


class Event(NamedTuple):
    """Something that a rank did from `start` to `end`, in seconds on a clock that all ranks share.

    `kind`: those of `Kind`, WAIT_F and WAIT_B (waiting for a message of that direction), OPT (optimizer
    step). `stage` and `micro_batch` are -1 where there is none.
    """

    rank: int
    stage: int
    kind: str
    micro_batch: int
    start: float
    end: float
    nbytes: int = 0


class Memory(NamedTuple):
    """From `time` on, `stage` of `rank` keeps `amount` of activations: bytes if measured."""

    rank: int
    stage: int
    time: float
    amount: float


@dataclass(frozen=True)
class Timeline:
    """Events of all ranks, measured by a `Recorder` or predicted by `simulate`.

    Bubbles follow two conventions: `bubble_over_ideal` is idle time / busy time, as the formulas of papers
    ((p - 1) / m for GPipe and 1F1B); `bubble_over_total` is idle time / (ranks * makespan), the share of
    the machine that does nothing. Both count from the first start to the last end of any rank;
    `steady_bubble` is the first of them for a long run of steps without synchronisation, in which the ramp
    of one step fills that of the step before (Qi et al., arXiv 2401.10241, call that zero bubble).
    """

    name: str
    events: tuple[Event, ...]
    memory: tuple[Memory, ...] = ()
    unit: str = "bytes"  # of `memory`: "bytes", or "activations" in a simulation without sizes

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have events, in order."""
        return tuple(sorted({event.rank for event in self.events}))

    @cached_property
    def start(self) -> float:
        """Seconds at which the first work begins."""
        return min((event.start for work in self._work.values() for event in work), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end of work of any rank."""
        ends = (event.end for work in self._work.values() for event in work)
        return max(ends, default=self.start) - self.start

    @cached_property
    def period(self) -> float:
        """The longest time, in seconds, from the first start to the last end of work on one rank."""
        spans = []
        for rank in self.ranks:
            work = self._work[rank]
            if work:
                spans.append(max(e.end for e in work) - min(e.start for e in work))
        return max(spans, default=0.0)

    @cached_property
    def _work(self) -> Mapping[int, list[Event]]:
        return self._of(WORK)

    def _of(self, kinds: Iterable[str]) -> Mapping[int, list[Event]]:
        found: dict[int, list[Event]] = defaultdict(list)
        for event in self.events:
            if event.kind in kinds:
                found[event.rank].append(event)
        return found

    def busy(self, rank: int) -> float:
        """Seconds in which `rank` computes."""
        return _covered(self._work[rank])

    def idle(self, rank: int) -> float:
        """Seconds of the makespan in which `rank` does not compute."""
        return self.makespan - self.busy(rank)

    def waiting(self, rank: int) -> float:
        """Seconds in which `rank` waits for messages."""
        return _covered(self._of(WAITS)[rank])

    def transferring(self, rank: int) -> float:
        """Seconds in which messages of `rank` are under way, hidden behind its work or not."""
        return _covered(self._of(TRANSFERS)[rank])

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time of all ranks / their busy time; 0 where nothing takes time."""
        busy = sum(map(self.busy, self.ranks))
        return (len(self.ranks) * self.makespan - busy) / busy if busy else 0.0

    @property
    def bubble_over_total(self) -> float:
        """Idle time of all ranks / (ranks * makespan); 0 where nothing takes time."""
        whole = len(self.ranks) * self.makespan
        return 1 - sum(map(self.busy, self.ranks)) / whole if whole else 0.0

    @property
    def steady_bubble(self) -> float:
        """(longest span of one rank - mean busy time) / mean busy time; 0 where nothing takes time."""
        busy = sum(map(self.busy, self.ranks)) / max(1, len(self.ranks))
        return self.period / busy - 1 if busy else 0.0

    def peak_activations(self, rank: int, stage: int | None = None) -> int:
        """The most activations, one per micro-batch and stage, that `rank` or a stage of it keeps at once.

        An activation is kept from the start of its forward to the end of its backward (of W where it is
        split). Forwards of a timeline without backwards keep nothing.
        """
        work = [e for e in self._work[rank] if stage is None or e.stage == stage]
        if not any(event.kind in ("B", "W") for event in work):
            return 0
        # At equal times an end comes first: what it frees is there for what starts.
        changes = [(e.start, 1) for e in work if e.kind == "F"]
        changes += [(e.end, -1) for e in work if e.kind in ("B", "W")]
        held = most = 0
        for _, change in sorted(changes):
            held += change
            most = max(most, held)
        return most

    def peak_memory(self, rank: int) -> float:
        """The most that `rank` keeps for its backwards at a time, in `unit`; 0 where nothing was recorded."""
        held: dict[int, float] = {}
        most = 0.0
        for sample in sorted((m for m in self.memory if m.rank == rank), key=lambda m: m.time):
            held[sample.stage] = sample.amount
            most = max(most, sum(held.values()))
        return most

    @cached_property
    def latency(self) -> float:
        """Mean seconds from the start of a micro-batch in the first stage to the end of its last forward."""
        first: dict[int, list[float]] = defaultdict(list)
        last: dict[int, list[float]] = defaultdict(list)
        forwards = [event for event in self.events if event.kind == "F"]
        stages = max((event.stage for event in forwards), default=0)
        for event in sorted(forwards, key=lambda event: event.start):
            if event.stage == 0:
                first[event.micro_batch].append(event.start)
            if event.stage == stages:
                last[event.micro_batch].append(event.end)
        times = [end - start for k in first for start, end in zip(first[k], last[k], strict=False)]
        return sum(times) / len(times) if times else 0.0

    @cached_property
    def throughput(self) -> float:
        """Micro-batches per second of makespan."""
        count = sum(event.kind == "F" and event.stage == 0 for event in self.events)
        return count / self.makespan if self.makespan else 0.0

    def renamed(self, name: str) -> Timeline:
        """The same timeline under another name."""
        return replace(self, name=name)

    def table(self) -> str:
        """A line per rank: seconds of work, waiting and transfers, share of idle time, most activations."""
        from .show import table

        return table(self)

    def save_chrome(self, path: str | Path) -> None:
        """Write a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: ranks, stages, messages."""
        from .show import save_chrome

        save_chrome(self, Path(path))

    def save_picture(self, path: str | Path) -> None:
        """Write a picture, a line per rank; needs matplotlib, else UnsupportedError."""
        from .picture import save_picture

        save_picture(self, Path(path))


def _covered(events: Iterable[Event]) -> float:
    """Seconds covered by any of `events`."""
    total, until = 0.0, float("-inf")
    for start, end in sorted((event.start, event.end) for event in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


class Recorder:
    """Collects the events of one rank; the runner and the communicator write, `timeline` reads.

    Threads may record at the same time: an event is one append to a list.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything, for instance after steps that only warm up."""
        self._events: list[tuple[str, int, int, float, float, int]] = []
        self._memory: list[tuple[int, float, float]] = []

    @staticmethod
    def now() -> float:
        """Seconds on the clock that events are in: `time.perf_counter`, which ranks of a host share."""
        return perf_counter()

    def record(
        self,
        kind: str,
        stage: int | None,
        micro_batch: int | None,
        start: float,
        end: float,
        nbytes: int = 0,
    ) -> None:
        """An event from `start` to `end` (seconds of `now`)."""
        self._events.append(
            (
                str(kind),
                -1 if stage is None else stage,
                -1 if micro_batch is None else micro_batch,
                start,
                end,
                nbytes,
            )
        )

    def memory(self, stage: int, nbytes: int) -> None:
        """`stage` keeps `nbytes` of activations for its backwards from now on."""
        self._memory.append((stage, perf_counter(), nbytes))

    def timeline(self, group: ParallelGroup | None = None, name: str = "measured") -> Timeline:
        """The events of this rank (as rank 0), or of all ranks of `group`; then all of them must call.

        Time begins with the first event of any rank. Ranks of one host share their clock; the clocks of
        several hosts are compared by round trips (`clock_offsets`).
        """
        own = (self._events[:], self._memory[:])
        if group is None:
            found, offsets = [own], [0.0]
        else:
            from .clocks import clock_offsets

            found, offsets = all_gather_object(own, group), clock_offsets(group)
        zero = min(
            (
                start - offsets[rank]
                for rank, (events, _) in enumerate(found)
                for _, _, _, start, _, _ in events
            ),
            default=0.0,
        )
        events = [
            Event(
                rank,
                stage,
                kind,
                k,
                start - offsets[rank] - zero,
                end - offsets[rank] - zero,
                nbytes,
            )
            for rank, (recorded, _) in enumerate(found)
            for kind, stage, k, start, end, nbytes in recorded
        ]
        memory = [
            Memory(rank, stage, time - offsets[rank] - zero, amount)
            for rank, (_, recorded) in enumerate(found)
            for stage, time, amount in recorded
        ]
        return Timeline(name, tuple(sorted(events, key=lambda e: (e.start, e.rank))), tuple(memory))
