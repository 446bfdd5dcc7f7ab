"""Every cut of a model into two stages, run in turns beside what was predicted for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, sleep, thread_time
from typing import Any

from rich.console import Console

from tp_kernels import Ranks
from tp_kernels.bench.report import new_table
from tp_kernels.pipeline.plan import LayerCost, Plan, seconds

from .progress import converted, progress_bars
from .worker import Source, loaded


@dataclass(frozen=True)
class Trial:
    """What every rank has to know."""

    checkpoint: Path
    slowdowns: tuple[float, ...]  # by stage; 2: takes twice its time
    batch: tuple[int, int]  # rows and tokens of a micro-batch
    micro_batches: int


def try_cuts(
    console: Console,
    model: str,
    costs: Sequence[LayerCost],
    plan: Plan,
    batch: tuple[int, int],
    rounds: int,
) -> float:
    """Print micro-batches per second of every cut; returns that of the plan, divided by the best.

    Two ranks of one thread run forwards that fill the pipe. A stage on a slow device sleeps, after its
    computation, for as long as that device would still compute. On a busy machine throughput is that of the
    other programs; what the slowest stage computes, in seconds of its own thread, is still to be compared.
    """
    fastest = max(stage.speed for stage in plan.stages)
    slowdowns = tuple(fastest / stage.speed for stage in plan.stages)
    cuts = range(1, len(costs))
    rates: dict[int, list[float]] = {cut: [] for cut in cuts}
    paces: dict[int, list[float]] = {cut: [] for cut in cuts}
    with progress_bars() as bars, Ranks(2, threads=1) as ranks:
        trial = Trial(converted(model, bars), slowdowns, batch, plan.micro_batches)
        task = bars.add_task("trying cuts", total=len(cuts) * rounds)
        ranks.run(seconds_of_cut, trial, (0, 1, len(costs)))  # loads the model
        for _ in range(rounds):
            for cut in cuts:
                wall, computing = zip(
                    *ranks.run(seconds_of_cut, trial, (0, cut, len(costs))), strict=True
                )
                rates[cut].append(trial.micro_batches / max(wall))
                paces[cut].append(max(computing) / trial.micro_batches)
                bars.advance(task)
    rate = {cut: median(values) for cut, values in rates.items()}
    pace = {cut: median(values) for cut, values in paces.items()}
    chosen = plan.bounds[1]
    best, quickest = max(cuts, key=rate.__getitem__), min(cuts, key=pace.__getitem__)
    table = new_table(
        "first stage ends with",
        "predicted",
        "computed",
        "of best",
        "micro-batches/s",
        "of best",
        "",
    )
    for cut in cuts:
        slowest = max(
            slow * sum(cost.forward for cost in part)
            for slow, part in zip(slowdowns, (costs[:cut], costs[cut:]), strict=True)
        )
        table.add_row(
            costs[cut - 1].name,
            seconds(slowest),
            seconds(pace[cut]),
            f"{pace[quickest] / pace[cut]:.1%}",
            f"{rate[cut]:.2f} ({min(rates[cut]):.2f}..{max(rates[cut]):.2f})",
            f"{rate[cut] / rate[best]:.1%}",
            "the plan" if cut == chosen else "",
        )
    console.print(table)
    share = rate[chosen] / rate[best]
    console.print(
        f"{rounds} rounds of {trial.micro_batches} micro-batches of {batch[0]} x {batch[1]} tokens; "
        f"stages slowed {', '.join(f'{slow:g}x' for slow in slowdowns)}; computed: seconds of the slowest "
        f"stage per micro-batch.\nThe plan reaches {share:.1%} of the throughput of the best cut, aimed at "
        f"90%: {'reached' if share >= 0.9 else 'missed'}. Its slowest stage computes at "
        f"{pace[quickest] / pace[chosen]:.1%} of the pace of the best.",
        highlight=False,
        soft_wrap=True,
    )
    return share


_state: dict[Path, tuple[Any, Any]] = {}


def seconds_of_cut(trial: Trial, bounds: tuple[int, ...]) -> tuple[float, float]:
    """On a rank: seconds from before the first forward to after the last one, and of its computation."""
    import torch

    from tp_kernels import ParallelGroup
    from tp_kernels.comm.collectives import barrier
    from tp_kernels.pipeline import PipelineCommunicator
    from tp_kernels.pipeline.causal_lm import split_layers
    from tp_kernels.pipeline.runner import PipelineRunner

    if trial.checkpoint not in _state:
        model, _ = loaded(Source(trial.checkpoint, plain=True))
        group = ParallelGroup(timeout=120)
        _state[trial.checkpoint] = model, PipelineCommunicator(group)
    model, channel = _state[trial.checkpoint]
    stage = split_layers(model, bounds)[channel.rank]
    slowdown, started, computed = trial.slowdowns[channel.rank], 0.0, 0.0

    def start(*_: Any) -> None:
        nonlocal started
        started = thread_time()

    def slow_down(*_: Any) -> None:
        nonlocal computed
        own = thread_time() - started
        computed += slowdown * own
        sleep((slowdown - 1) * own)

    stage.register_forward_pre_hook(start)
    stage.register_forward_hook(slow_down)
    rows, tokens = trial.batch
    draw = torch.Generator().manual_seed(1)
    words = model.config.get_text_config().vocab_size
    ids = torch.randint(0, words, (rows * trial.micro_batches, tokens), generator=draw)
    runner = PipelineRunner(stage, "forward_only", channel, micro_batches=trial.micro_batches)
    barrier(channel.group)
    begin = perf_counter()
    runner.forward(ids)
    channel.flush()  # nothing moves on while this rank waits in the barrier
    barrier(channel.group)
    return perf_counter() - begin, computed
