"""`tp-kernels bench p2p`: messages from one rank to another, by size.

latency: half a round trip. A tensor goes to the other rank and one of its size comes back, a few times.
bandwidth: tensors go one way, as many as make 64 MiB or so; an empty answer ends the call.

`pipeline` is PipelineCommunicator: it describes every message and makes a new tensor of what arrives.
`channel` is P2PChannel and `gloo` torch.distributed: both receive into a tensor made before. What arrives is
compared, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from tp_kernels.comm import P2PChannel, ParallelGroup, ShapeError, UnsupportedError
from tp_kernels.pipeline import PipelineCommunicator

from . import measure
from .peers import Peers
from .pool import Case
from .report import Row, geometric_mean, grouped, microseconds, new_table, size, spread
from .slices import Work, pattern
from .timing import Budget, Contestant, Progress

MEASURES = ("latency", "bandwidth")
SIZES = tuple(1 << exponent for exponent in range(10, 27, 2))
SMALL, LARGE = 64 << 10, 4 << 20  # the targets: up to, and from
LATENCY_TARGET, BANDWIDTH_TARGET = 10.0, 2.0  # times gloo
_STREAM, _MOST_MESSAGES = 64 << 20, 64


@dataclass(frozen=True)
class Settings(measure.Settings):
    """What to measure, between two ranks."""

    measures: Sequence[str] = MEASURES
    sizes: Sequence[int] = SIZES


QUICK = Settings(sizes=(16 << 10, 4 << 20), budget=Budget(2, 0.01))


def run(settings: Settings, peers: Peers, progress: Progress) -> list[dict[str, Any]]:
    """One row per measure and number of bytes; `peers` records who did not run."""
    for nbytes in settings.sizes:
        if nbytes < 4 or nbytes % 4:
            raise ShapeError(f"{nbytes} bytes are not a number of float32 elements")
    if tuple(settings.worlds) != (2,):
        raise ShapeError(f"messages are measured between 2 ranks, not {list(settings.worlds)}")
    cases = [
        {"measure": name, "world": 2, "bytes": nbytes, "messages": messages_of(name, nbytes)}
        for name in settings.measures
        for nbytes in settings.sizes
    ]

    def start(stack: ExitStack, world: int) -> tuple[list[Contestant], measure.Derive]:
        pool = measure.start_pool(stack, settings, world)
        contestants: list[Contestant] = [
            pool.contestant("pipeline", through_pipeline),
            pool.contestant("channel", through_channel),
            pool.contestant("gloo", through_gloo, ours=False),
        ]
        return contestants, derived

    return measure.measure(cases, start, settings, peers, progress)


def messages_of(name: str, nbytes: int) -> int:
    """How many messages a call sends one after the other: a round trip has two."""
    if name == "latency":
        return 16 if nbytes <= SMALL else 2
    return max(4, min(_MOST_MESSAGES, _STREAM // nbytes))


def derived(case: Case, medians: Mapping[str, float]) -> dict[str, Any]:
    """Microseconds of a message and GB/s of each contestant, and gloo over ours, from seconds of a call."""
    messages, gloo = case["messages"], medians.get("gloo")
    ratio = gloo / medians["pipeline"] if gloo else None
    if case["measure"] == "latency":
        target = LATENCY_TARGET if case["bytes"] <= SMALL else None
    else:
        target = BANDWIDTH_TARGET if case["bytes"] >= LARGE else None
    return {
        "message_us": {name: 1e6 * seconds / messages for name, seconds in medians.items()},
        "gigabytes_per_second": {
            name: messages * case["bytes"] / seconds / 1e9 for name, seconds in medians.items()
        },
        "gloo_over_pipeline": ratio,
        "target": target,
    }


# In a rank.


@dataclass
class Way:
    """How one message goes: from rank 0 to rank 1 or back."""

    send: Callable[[Tensor, int], Any]  # to the other rank, as this message of the call
    receive: Callable[[int], Tensor]
    end: Callable[[], Any] = lambda: None  # of a call: what was sent has left


def work_of(group: ParallelGroup, case: Case, way: Way) -> Work:
    """The calls of a case; a message of the other rank has its pattern."""
    elements, messages = case["bytes"] // 4, case["messages"]
    mine, theirs = (
        torch.from_numpy(pattern(rank, 0, elements)) for rank in (group.rank, 1 - group.rank)
    )
    nothing = torch.empty(0)
    first = group.rank == 0
    arrived = [theirs.clone()]

    def latency() -> None:
        for index in range(messages // 2):
            if first:
                way.send(mine, index)
                arrived[0] = way.receive(index)
            else:
                arrived[0] = way.receive(index)
                way.send(mine, index)
        way.end()

    def bandwidth() -> None:
        if first:
            for index in range(messages):
                way.send(mine, index)
            way.receive(-1)
        else:
            for index in range(messages):
                arrived[0] = way.receive(index)
            way.send(nothing, -1)
        way.end()

    call = latency if case["measure"] == "latency" else bandwidth

    def check() -> float:
        if not first or case["measure"] == "latency":
            arrived[0].fill_(float("nan"))
        call()
        return 0.0 if torch.equal(arrived[0], theirs) else inf

    return Work(call, check)


def through_pipeline(group: ParallelGroup, case: Case) -> Work:
    if group.memory is None:
        raise UnsupportedError(f"there is no shared memory here: {group.provider_reason}")
    comm = PipelineCommunicator(group)

    if group.rank == 0:

        def send(x: Tensor, index: int) -> None:
            comm.send_forward(x, micro_batch=index + 1)

        def receive(index: int) -> Tensor:
            return comm.recv_backward(micro_batch=index + 1)
    else:

        def send(x: Tensor, index: int) -> None:
            comm.send_backward(x, micro_batch=index + 1)

        def receive(index: int) -> Tensor:
            return comm.recv_forward(micro_batch=index + 1)

    return work_of(group, case, Way(send, receive, comm.flush))


def through_channel(group: ParallelGroup, case: Case) -> Work:
    channel, peer = P2PChannel(group), 1 - group.rank
    out, nothing = torch.empty(case["bytes"] // 4), torch.empty(0)
    return work_of(
        group,
        case,
        Way(
            lambda x, index: channel.send(x, peer),
            lambda index: channel.recv(peer, nothing if index < 0 else out),
        ),
    )


def through_gloo(group: ParallelGroup, case: Case) -> Work:
    peer = 1 - group.rank
    out, nothing = torch.empty(case["bytes"] // 4), torch.empty(1)

    def send(x: Tensor, index: int) -> None:
        dist.send(nothing if index < 0 else x, peer)

    def receive(index: int) -> Tensor:
        into = nothing if index < 0 else out
        dist.recv(into, peer)
        return into

    return work_of(group, case, Way(send, receive))


# For people.


def show(console: Console, report: Mapping[str, Any]) -> None:
    """One row per measure and number of bytes."""
    console.print(
        "Latency: half a round trip in microseconds, median; pipeline with p10..p90. Bandwidth: GB/s.\n"
        "pipeline: PipelineCommunicator, describes each message and makes a new tensor of it; channel: "
        "P2PChannel; ratio: gloo / pipeline.",
        highlight=False,
    )
    for (name,), rows in grouped(report, "measure").items():
        console.print(f"\n[bold]{name}, 2 ranks[/]", highlight=False)
        table = new_table("bytes", "pipeline", "channel", "gloo", "ratio", "target")
        for row in rows:
            facts = row["derived"]
            ratio, target = facts["gloo_over_pipeline"], facts["target"]
            colour = "default" if target is None or ratio is None else _colour(ratio >= target)
            table.add_row(
                size(row["case"]["bytes"]),
                _value(row, "pipeline"),
                _value(row, "channel"),
                _value(row, "gloo"),
                "-" if ratio is None else f"[{colour}]{ratio:.1f}[/]",
                "" if target is None else f"{target:g}",
            )
        console.print(table)
    for line in summary(report["results"]):
        console.print(line, highlight=False)


def summary(rows: Sequence[Row]) -> list[str]:
    """Geometric means of the ratios that have a target, and the lowest."""
    lines = []
    for name, sizes in (("latency", "up to 64 KiB"), ("bandwidth", "from 4 MiB")):
        ratios = [
            row["derived"]["gloo_over_pipeline"]
            for row in rows
            if row["case"]["measure"] == name
            and row["derived"]["target"] is not None
            and row["derived"]["gloo_over_pipeline"] is not None
        ]
        if ratios:
            lines.append(
                f"{name} {sizes}: gloo / pipeline {geometric_mean(ratios):.1f} in the geometric mean, "
                f"lowest {min(ratios):.1f}"
            )
    return lines


def _value(row: Row, name: str) -> str:
    sample = row["contestants"].get(name)
    if sample is None:
        return "-"
    if row["case"]["measure"] == "bandwidth":
        return f"{row['derived']['gigabytes_per_second'][name]:.2f}"
    messages = row["case"]["messages"]
    each = {key: sample[key] / messages for key in ("median_us", "p10_us", "p90_us")}
    return spread(each) if name == "pipeline" else microseconds(each["median_us"])


def _colour(good: bool) -> str:
    return "green" if good else "red"


def plot(report: Mapping[str, Any], directory: Path) -> list[Path]:
    """Time of a message and GB/s by size, with the band p10..p90."""
    from .plots import COLOURS, MARKERS, _figure, _save

    written = []
    names = {"pipeline": "PipelineCommunicator", "channel": "P2PChannel", "gloo": "gloo"}
    like = {"pipeline": "host", "channel": "raw", "gloo": "gloo"}  # colours of the other pictures
    for (name,), rows in grouped(report, "measure").items():
        figure, (axes,) = _figure(8, 5)
        for contestant, label in names.items():
            here = [row for row in rows if contestant in row["contestants"]]
            x = [row["case"]["bytes"] for row in here]
            lines = {
                key: [_measured(row, contestant, key) for row in here]
                for key in ("median_us", "p10_us", "p90_us")
            }
            colour, marker = COLOURS[like[contestant]], MARKERS[like[contestant]]
            axes.fill_between(
                x, lines["p10_us"], lines["p90_us"], color=colour, alpha=0.15, linewidth=0
            )
            axes.plot(x, lines["median_us"], color=colour, marker=marker, label=label)
        ticks = [row["case"]["bytes"] for row in rows]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [size(tick) for tick in ticks], rotation=30, ha="right")
        axes.minorticks_off()
        axes.set_xlabel("size of a message")
        axes.set_ylabel("half a round trip (µs)" if name == "latency" else "one way (GB/s)")
        axes.set_title(f"{name} between 2 ranks: median, p10 to p90 shaded", fontsize=12)
        axes.legend(frameon=False)
        written.append(_save(figure, report, directory / f"p2p-{name}.png"))
    return written


def _measured(row: Row, contestant: str, key: str) -> float:
    microseconds_of_call = row["contestants"][contestant][key]
    if row["case"]["measure"] == "latency":
        return microseconds_of_call / row["case"]["messages"]
    return row["case"]["messages"] * row["case"]["bytes"] / microseconds_of_call / 1e3
