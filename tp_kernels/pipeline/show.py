"""A timeline as a table, and as a trace for Perfetto."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from .timeline import TRANSFERS, Event, Timeline

# Names of the colours that Perfetto and chrome://tracing know.
_COLOURS = {
    "F": "good",
    "B": "thread_state_runnable",
    "I": "thread_state_running",
    "W": "rail_animation",
    "OPT": "grey",
    "WAIT_F": "white",
    "WAIT_B": "white",
}


def table(timeline: Timeline) -> str:
    """A line per rank, and the sums; seconds in the unit that suits them."""
    unit, scale = _unit(timeline.makespan)
    sized = any(
        timeline.peak_memory(r) not in (0, timeline.peak_activations(r)) for r in timeline.ranks
    )
    headings = ["rank", f"work {unit}", f"wait {unit}", f"transfer {unit}", "idle", "activations"]
    headings += ["memory"] if sized else []
    rows = []
    for rank in timeline.ranks:
        row = [
            str(rank),
            f"{timeline.busy(rank) * scale:.2f}",
            f"{timeline.waiting(rank) * scale:.2f}",
            f"{timeline.transferring(rank) * scale:.2f}",
            f"{timeline.idle(rank) / timeline.makespan:.1%}" if timeline.makespan else "-",
            str(timeline.peak_activations(rank)),
        ]
        rows.append([*row, _amount(timeline, rank)] if sized else row)
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = [
        "  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True))
        for row in (headings, *rows)
    ]
    return "\n".join([*lines, summary(timeline)])


def summary(timeline: Timeline) -> str:
    """One line: makespan, both bubbles, latency, throughput."""
    if not any(timeline.busy(rank) for rank in timeline.ranks):
        return f"{timeline.name}: nothing was computed"
    unit, scale = _unit(timeline.makespan)
    return (
        f"{timeline.name}: {timeline.makespan * scale:.2f} {unit}, bubble "
        f"{timeline.bubble_over_ideal:.1%} of ideal, {timeline.bubble_over_total:.1%} of total "
        f"({timeline.steady_bubble:.1%} of ideal in a long run); latency "
        f"{timeline.latency * scale:.2f} {unit}, {timeline.throughput:.4g} micro-batches/s"
    )


def _unit(seconds: float) -> tuple[str, float]:
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)


def _amount(timeline: Timeline, rank: int) -> str:
    amount = timeline.peak_memory(rank)
    return f"{amount / 2**20:.1f} MiB" if timeline.unit == "bytes" else f"{amount:g}"


def save_chrome(timeline: Timeline, path: Path) -> None:
    """Write the events as JSON (Trace Event Format): ranks, stages, arrows for messages.

    Every kind of transfer has a thread of its own, since they overlap with work and each other; activations
    are a counter.
    """
    path.write_text(json.dumps({"traceEvents": trace_events(timeline), "displayTimeUnit": "ms"}))


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """The list of `save_chrome`; times in microseconds from the first event."""
    found: list[dict[str, Any]] = []
    zero = min((event.start for event in timeline.events), default=0.0)
    threads: dict[tuple[int, int], str] = {}
    for event in timeline.events:
        thread = _thread(event)
        stage = "rank" if event.stage < 0 else f"stage {event.stage}"
        threads[event.rank, thread] = f"{stage} {event.kind}" if event.kind in TRANSFERS else stage
        where = "" if event.stage < 0 else str(event.stage)
        entry = {
            "ph": "X",
            "name": f"{where}{event.kind}{event.micro_batch if event.micro_batch >= 0 else ''}",
            "cat": event.kind,
            "pid": event.rank,
            "tid": thread,
            "ts": (event.start - zero) * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "args": {"stage": event.stage, "micro_batch": event.micro_batch, "bytes": event.nbytes},
        }
        if colour := _COLOURS.get(event.kind):
            entry["cname"] = colour
        found.append(entry)
    for number, (source, target) in enumerate(_messages(timeline)):
        common = {"name": "message", "cat": "message", "id": number}
        for phase, event, time in (("s", source, source.end), ("f", target, target.start)):
            # An arrow ends at a slice that is there at its time: hence a little inside of both.
            inside = min(1e-7, (event.end - event.start) / 2)
            time += inside if phase == "f" else -inside
            entry = {**common, "ph": phase, "pid": event.rank, "tid": _thread(event)}
            found.append(
                {**entry, "ts": (time - zero) * 1e6} | ({"bp": "e"} if phase == "f" else {})
            )
    for sample in timeline.memory:
        name, ts = f"activations of stage {sample.stage}", (sample.time - zero) * 1e6
        args = {timeline.unit: sample.amount}
        found.append({"ph": "C", "name": name, "pid": sample.rank, "ts": ts, "args": args})
    for rank in timeline.ranks:
        found.append(
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
    for (rank, thread), name in sorted(threads.items()):
        label = {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread}
        found.append({**label, "args": {"name": name}})
    return found


def _thread(event: Event) -> int:
    kinds = sorted(TRANSFERS)
    return (len(kinds) + 1) * (event.stage + 1) + (
        kinds.index(event.kind) + 1 if event.kind in TRANSFERS else 0
    )


def _messages(timeline: Timeline) -> list[tuple[Event, Event]]:
    """(what was computed, what used it) wherever a message went from one rank to another."""
    used: dict[tuple[str, int, int], list[Event]] = defaultdict(list)
    work = [event for event in timeline.events if event.kind in ("F", "B", "I")]
    for event in work:
        used[_direction(event), event.stage, event.micro_batch].append(event)
    seen: dict[tuple[str, int, int], int] = defaultdict(int)
    found = []
    for event in work:
        hop = 1 if event.kind == "F" else -1
        key = _direction(event), event.stage, event.micro_batch
        users = used[key[0], event.stage + hop, event.micro_batch]
        # In several steps a micro-batch comes again: the n-th use is that of the n-th message.
        if seen[key] < len(users) and users[seen[key]].rank != event.rank:
            found.append((event, users[seen[key]]))
        seen[key] += 1
    return found


def _direction(event: Event) -> str:
    return "forward" if event.kind == "F" else "backward"
