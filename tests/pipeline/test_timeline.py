"""Timelines: recorded by threads and ranks, counted, as a table, a trace and a picture."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from tp_kernels import ParallelGroup, Ranks
from tp_kernels.pipeline.clocks import clock_offsets, offsets_of
from tp_kernels.pipeline.generators import (
    SCHEDULES,
    forward_only,
    one_f_one_b,
    zero_bubble_v,
)
from tp_kernels.pipeline.picture import COLOURS, save_pictures
from tp_kernels.pipeline.simulate import Costs
from tp_kernels.pipeline.timeline import Event, Memory, Recorder, Timeline


def events(*rows: tuple[int, int, str, int, float, float]) -> tuple[Event, ...]:
    return tuple(Event(*row) for row in rows)


SMALL = Timeline(
    "small",
    events(
        (0, 0, "F", 0, 10.0, 12.0),
        (0, 0, "SEND_F", 0, 12.0, 13.0),
        (1, 1, "WAIT_F", 0, 10.0, 13.0),
        (1, 1, "F", 0, 13.0, 14.0),
        (1, 1, "B", 0, 14.0, 16.0),
        (0, 0, "WAIT_B", 0, 12.5, 16.5),
        (0, 0, "B", 0, 16.5, 20.0),
        (0, -1, "OPT", -1, 20.0, 20.5),
    ),
)


def test_what_follows_from_events() -> None:
    assert SMALL.ranks == (0, 1) and SMALL.start == 10.0
    assert SMALL.makespan == 10.5
    assert (SMALL.busy(0), SMALL.busy(1)) == (6.0, 3.0)
    assert (SMALL.idle(0), SMALL.idle(1)) == (4.5, 7.5)
    assert (SMALL.waiting(0), SMALL.waiting(1)) == (4.0, 3.0)
    assert (SMALL.transferring(0), SMALL.transferring(1)) == (1.0, 0.0)
    assert SMALL.bubble_over_ideal == pytest.approx(12.0 / 9.0)
    assert SMALL.bubble_over_total == pytest.approx(12.0 / 21.0)
    assert SMALL.period == 10.5 and SMALL.steady_bubble == pytest.approx(10.5 / 4.5 - 1)
    assert SMALL.latency == 4.0
    assert SMALL.throughput == pytest.approx(1 / 10.5)
    assert (SMALL.peak_activations(0), SMALL.peak_activations(1), SMALL.peak_activations(0, 1)) == (
        1,
        1,
        0,
    )
    # Time that two events share counts once.
    both = Timeline("both", events((0, 0, "F", 0, 0.0, 2.0), (0, 1, "B", 0, 1.0, 3.0)))
    assert both.busy(0) == 3.0


def test_nothing_takes_time() -> None:
    for empty in (Timeline("nothing", ()), Timeline("no time", events((0, 0, "F", 0, 1.0, 1.0)))):
        bubbles = empty.bubble_over_ideal, empty.bubble_over_total, empty.steady_bubble
        assert bubbles == (0.0, 0.0, 0.0)


def test_peak_memory_adds_stages() -> None:
    samples = [
        (0, 0, 0.0, 5.0),
        (0, 1, 1.0, 4.0),
        (0, 0, 2.0, 1.0),
        (0, 1, 3.0, 7.0),
        (1, 2, 0.0, 99.0),
    ]
    timeline = Timeline("m", SMALL.events, tuple(Memory(*sample) for sample in samples))
    assert timeline.peak_memory(0) == 9.0 and timeline.peak_memory(1) == 99.0
    assert SMALL.peak_memory(0) == 0.0


def test_several_steps() -> None:
    """The same micro-batch twice: both passes count."""
    twice = Timeline(
        "twice",
        events(
            *(
                (stage, stage, "F", 0, begin + 2 * stage, begin + 2 * stage + 1)
                for begin in (0.0, 10.0)
                for stage in (0, 1)
            )
        ),
    )
    assert twice.latency == 3.0
    assert twice.throughput == pytest.approx(2 / 13)


def test_threads_record_at_the_same_time() -> None:
    recorder = Recorder()

    def record(stage: int) -> None:
        for k in range(500):
            recorder.record("F", stage, k, 5.0 + k, 6.0 + k, 8)

    threads = [threading.Thread(target=record, args=(stage,)) for stage in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.record("OPT", None, None, 4.0, 5.0)
    recorder.memory(2, 100)
    found = recorder.timeline()
    assert len(found.events) == 2001 and found.ranks == (0,)
    assert found.events[0] == Event(0, -1, "OPT", -1, 0.0, 1.0)
    assert {e.nbytes for e in found.events if e.kind == "F"} == {8}
    assert found.peak_memory(0) == 100.0 and found.unit == "bytes"
    recorder.clear()
    assert recorder.timeline().events == ()


def gathered(group: ParallelGroup) -> Timeline:
    recorder = Recorder()
    now = Recorder.now()
    recorder.record("F", group.rank, 3, now, now + 0.25, 16)
    recorder.memory(group.rank, 7 + group.rank)
    return recorder.timeline(group, name="all")


def test_ranks_are_gathered(world: Callable[[int], Ranks]) -> None:
    first, second = world(2).run(in_group, gathered)
    assert first == second and first.name == "all"
    assert [(e.rank, e.stage, e.kind, e.micro_batch, e.nbytes) for e in first.events] in (
        [(0, 0, "F", 3, 16), (1, 1, "F", 3, 16)],
        [(1, 1, "F", 3, 16), (0, 0, "F", 3, 16)],
    )
    assert first.start == 0.0 and first.peak_memory(1) == 8.0
    assert all(e.end - e.start == pytest.approx(0.25) for e in first.events)
    assert first.makespan < 60.0  # one clock: seconds apart, not the age of a machine


def offsets(group: ParallelGroup) -> list[float]:
    return clock_offsets(group)


def on_hosts_of_their_own(group: ParallelGroup) -> tuple[list[float], Timeline]:
    """As if every rank was on a host of its own, with a clock 100 s ahead of the one before."""
    from tp_kernels.pipeline import clocks

    true_clock, true_kernel = clocks.perf_counter, clocks._kernel
    clocks.perf_counter = lambda: true_clock() + 100.0 * group.rank
    clocks._kernel = lambda: f"host {group.rank}"
    try:
        recorder = Recorder()
        now = clocks.perf_counter()
        recorder.record("F", group.rank, 0, now, now + 0.25)
        recorder._memory.append((group.rank, now, 5.0))
        return clock_offsets(group), recorder.timeline(group)
    finally:
        clocks.perf_counter, clocks._kernel = true_clock, true_kernel


def in_group(function: Callable[[ParallelGroup], Any]) -> Any:
    with ParallelGroup() as group:
        return function(group)


def test_clocks(world: Callable[[int], Ranks]) -> None:
    assert world(2).run(in_group, offsets) == [[0.0, 0.0]] * 2
    (first, timeline), (second, _) = world(2).run(in_group, on_hosts_of_their_own)
    assert first == second and first[0] == 0.0
    assert first[1] == pytest.approx(100.0, abs=5.0)
    assert timeline.makespan < 50.0
    assert max(sample.time for sample in timeline.memory) < 50.0


def test_offsets_take_the_shortest_exchange() -> None:
    rounds = [
        [(0.0, 9.0), (50.0, 51.0)],
        [(20.0, 20.2), (70.1, 70.3)],
        [(30.0, 31.0), (80.0, 89.0)],
    ]
    assert offsets_of(rounds) == [0.0, pytest.approx(50.1)]


def test_table() -> None:
    lines = SMALL.table().splitlines()
    assert lines[0].split() == [
        "rank",
        "work",
        "s",
        "wait",
        "s",
        "transfer",
        "s",
        "idle",
        "activations",
    ]
    assert lines[1].split() == ["0", "6.00", "4.00", "1.00", "42.9%", "1"]
    assert lines[2].split() == ["1", "3.00", "3.00", "0.00", "71.4%", "1"]
    assert lines[3] == (
        "small: 10.50 s, bubble 133.3% of ideal, 57.1% of total (133.3% of ideal in a long run); "
        "latency 4.00 s, 0.09524 micro-batches/s"
    )
    sized = one_f_one_b(2, 2).simulate(Costs(1e-3, activation=3 << 20, unit="bytes"))
    assert sized.table().splitlines()[1].split()[-2:] == ["6.0", "MiB"]
    assert Timeline("none", ()).table().splitlines()[-1] == "none: nothing was computed"


def test_chrome_trace(tmp_path: Path) -> None:
    timeline = zero_bubble_v(2, 3).simulate(Costs(1.0, 1.0, 1.0, communication=2.5))
    timeline.save_chrome(tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in found if event["ph"] == "X"]
    assert len(slices) == len(timeline.events)
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
    one = next(event for event in slices if event["name"] == "1F2")
    event = next(e for e in timeline.events if (e.stage, e.kind, e.micro_batch) == (1, "F", 2))
    assert (one["pid"], one["ts"], one["dur"]) == (1, event.start * 1e6, 1e6)
    # Slices of a thread follow each other; work that overlaps a message is on another thread.
    for rank in (0, 1):
        for thread in {e["tid"] for e in slices if e["pid"] == rank}:
            own = sorted(
                (e["ts"], e["dur"]) for e in slices if (e["pid"], e["tid"]) == (rank, thread)
            )
            assert all(a + length <= b + 1e-6 for (a, length), (b, _) in pairwise(own))
    # An arrow per message between ranks: 3 micro-batches over 2 boundaries in 2 directions.
    starts = {event["id"]: event for event in found if event["ph"] == "s"}
    ends = {event["id"]: event for event in found if event["ph"] == "f"}
    assert len(starts) == len(ends) == 12 and starts.keys() == ends.keys()
    for number, start in starts.items():
        end = ends[number]
        assert start["pid"] != end["pid"] and start["ts"] < end["ts"] and end["bp"] == "e"
        for arrow in (start, end):  # inside of a slice of work, else Perfetto drops it
            assert any(
                (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])
                and e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"]
                and e["cat"] in ("F", "I")
                for e in slices
            )
    names = {(e["pid"], e["args"]["name"]) for e in found if e["ph"] == "M"}
    assert {
        (0, "rank 0"),
        (0, "stage 0"),
        (0, "stage 3"),
        (1, "stage 1"),
        (1, "stage 2 SEND_F"),
    } <= names
    counters = {event["name"] for event in found if event["ph"] == "C"}
    assert counters == {f"activations of stage {stage}" for stage in range(4)}


def test_chrome_arrows_of_several_steps() -> None:
    from tp_kernels.pipeline.show import trace_events

    step = forward_only(2, 1).simulate().events
    later = [e._replace(start=e.start + 10, end=e.end + 10) for e in step]
    found = trace_events(Timeline("two", (*step, *later)))
    arrows = [(e["ph"], round(e["ts"] / 1e6)) for e in found if e["ph"] in "sf"]
    assert arrows == [("s", 1), ("f", 1), ("s", 11), ("f", 11)]


def test_picture(tmp_path: Path) -> None:
    """Colours of everything that happens are in the picture, and grey where a rank is idle."""
    timelines = [make(3, 4).simulate() for make in (one_f_one_b, SCHEDULES["zero_bubble_h1"])]
    save_pictures(timelines, tmp_path / "two.png")
    timelines[0].save_picture(tmp_path / "one.png")
    one, two = (
        matplotlib.image.imread(tmp_path / name)[..., :3] for name in ("one.png", "two.png")
    )
    assert two.shape[0] > 1.5 * one.shape[0]

    def share(picture: np.ndarray, colour: str) -> float:
        wanted = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        return float((np.abs(picture - wanted).max(axis=-1) < 0.02).mean())

    assert share(one, COLOURS["F"]) > 0.05
    assert share(one, COLOURS["B"]) == pytest.approx(2 * share(one, COLOURS["F"]), rel=0.3)
    assert share(one, COLOURS["W"]) == 0.0
    assert min(share(two, COLOURS[kind]) for kind in "FBIW") > 0.02
    # Idle share of 1F1B, 3 ranks, 4 micro-batches: 1/3 of the bars, and bars are what is coloured.
    coloured = sum(share(one, COLOURS[kind]) for kind in "FB")
    idle = share(one, "#EEEEEE")
    assert idle / (idle + coloured) == pytest.approx(timelines[0].bubble_over_total, abs=0.05)
