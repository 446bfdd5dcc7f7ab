"""Every cut of a model into two stages, run in turns beside what was predicted for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
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
    threads: int = 1,
) -> float:
    """Print micro-batches per second of every cut; returns that of the plan, divided by the best.

    Two ranks with so many threads each run forwards that fill the pipe. A stage on a slow device sleeps,
    after its computation, for as long as that device would still compute.
    """
    fastest = max(stage.speed for stage in plan.stages)
    slowdowns = tuple(fastest / stage.speed for stage in plan.stages)
    cuts = range(1, len(costs))
    measured: dict[int, list[float]] = {cut: [] for cut in cuts}
    with progress_bars() as bars, Ranks(2, threads=threads) as ranks:
        trial = Trial(converted(model, bars), slowdowns, batch, plan.micro_batches)
        task = bars.add_task("trying cuts", total=len(cuts) * (rounds + 1))
        for turn in range(rounds + 1):
            for cut in cuts:
                took = max(ranks.run(seconds_of_cut, trial, (0, cut, len(costs))))
                if turn:  # the first allocates and reads
                    measured[cut].append(took)
                bars.advance(task)
    rates = {cut: trial.micro_batches / median(times) for cut, times in measured.items()}
    chosen, best = plan.bounds[1], max(rates, key=lambda cut: rates[cut])
    table = new_table("first stage ends with", "predicted", "micro-batches/s", "of the best", "")
    for cut in cuts:
        slowest = max(
            slow * sum(cost.forward for cost in part)
            for slow, part in zip(slowdowns, (costs[:cut], costs[cut:]), strict=True)
        )
        spread = [trial.micro_batches / took for took in measured[cut]]
        note = "the plan" if cut == chosen else ""
        table.add_row(
            costs[cut - 1].name,
            seconds(slowest),
            f"{rates[cut]:.2f} ({min(spread):.2f}..{max(spread):.2f})",
            f"{rates[cut] / rates[best]:.1%}",
            f"{note}{', ' if note and cut == best else ''}{'the best' if cut == best else ''}",
        )
    console.print(table)
    share = rates[chosen] / rates[best]
    console.print(
        f"{rounds} rounds of {trial.micro_batches} micro-batches of {batch[0]} x {batch[1]} tokens; "
        "stages slowed "
        f"{', '.join(f'{slow:g}x' for slow in slowdowns)}. The plan reaches {share:.1%} of the best cut; "
        f"aimed at 90%: {'reached' if share >= 0.9 else 'missed'}",
        highlight=False,
        soft_wrap=True,
    )
    return share


_state: dict[Path, tuple[Any, Any]] = {}


def seconds_of_cut(trial: Trial, bounds: tuple[int, ...]) -> float:
    """On a rank: the time from before the first forward to after the last one."""
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
    slowdown, started = trial.slowdowns[channel.rank], 0.0

    def start(*_: Any) -> None:
        nonlocal started
        started = perf_counter()

    def slow_down(*_: Any) -> None:
        sleep((slowdown - 1) * (perf_counter() - started))

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
    return perf_counter() - begin
