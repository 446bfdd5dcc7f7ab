"""The runner against one process: losses and every gradient, for every schedule."""

from __future__ import annotations

import pytest

from tp_kernels.pipeline.generators import SCHEDULES
from tp_kernels.pipeline.runner import PipelineRunner
from tp_kernels.pipeline.schedule import Action, Kind, Schedule, lay_out

from .stages import (
    check_gradients,
    make_batch,
    make_stages,
    mean_loss,
    mine,
    one_process,
    pipeline,
    schedule_of,
)

TRAINING = [name for name in SCHEDULES if name not in ("pipedream", "forward_only")]


def in_order(schedule: Schedule) -> bool:
    """Whether every stage accumulates its micro-batches in their order."""
    for rank in range(schedule.ranks):
        for stage in schedule.stages_of(rank):
            for kinds in ("BI", "BW"):
                done = [
                    a.micro_batch
                    for a in schedule.order(rank)
                    if a.stage == stage and a.kind.value in kinds
                ]
                if done != sorted(done):
                    return False
    return True


def every_count(name: str, ranks: int) -> list[bool]:
    """m = 1, 2, p, 2p + 1, and batches that do not divide; whether bits were compared."""
    placement = schedule_of(name, ranks, 1).stage_to_rank
    stages = make_stages(len(placement))
    exact = []
    with pipeline(placement) as channel:
        own = mine(stages, channel)
        runner = PipelineRunner(own, name, channel, mean_loss)
        for m in (1, 2, ranks, 2 * ranks + 1):
            for rows in (m, 2 * m + 1):
                batch, target = make_batch(rows)
                for stage in (*own, *stages):
                    stage.zero_grad()
                expected = one_process(stages, batch, target, m)
                exact.append(in_order(schedule_of(name, ranks, m)))
                losses = runner.step(*batch, target=target, micro_batches=m)
                assert losses.each == tuple(expected)
                assert losses.total == pytest.approx(sum(expected) / m, rel=1e-12)
                for index, stage in zip(channel.my_stages, own, strict=True):
                    check_gradients(stage, stages[index], exact[-1], (name, m, index))
                assert runner.eval(*batch, target=target, micro_batches=m) == losses
    return exact


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_equals_one_process(world, name: str, ranks: int) -> None:
    """fp64, the same bits: all published schedules run the backwards of a stage in order."""
    for exact in world(ranks).run(every_count, name, ranks):
        assert all(exact)


def other_orders() -> None:
    """Backwards in the reverse order: the same sums in another order."""
    stages = make_stages(2)
    with pipeline() as channel:
        m = 5
        orders = [
            [
                *(Action(s, Kind.F, k) for k in range(m)),
                *(Action(s, Kind.B, k) for k in reversed(range(m))),
            ]
            for s in range(2)
        ]
        made = lay_out("reversed", orders, [0, 1], m)
        assert not in_order(made)
        own = mine(stages, channel)
        batch, target = make_batch(7)
        expected = one_process(stages, batch, target, m)
        # through its CSV, as a schedule of one's own arrives
        read = Schedule.from_csv(made.to_csv(), name="reversed")
        losses = PipelineRunner(own, read, channel, mean_loss).step(*batch, target=target)
        assert losses.each == tuple(expected)
        check_gradients(own[0], stages[channel.rank], exact=False)


def test_other_orders(world) -> None:
    world(2).run(other_orders)


def through_a_process_group(name: str) -> None:
    placement = schedule_of(name, 2, 1).stage_to_rank
    stages = make_stages(len(placement))
    with pipeline(placement, provider="none") as channel:
        own = mine(stages, channel)
        batch, target = make_batch(9)
        expected = one_process(stages, batch, target, 4)
        runner = PipelineRunner(own, name, channel, mean_loss, micro_batches=4)
        assert runner.step(*batch, target=target).each == tuple(expected)
        for index, stage in zip(channel.my_stages, own, strict=True):
            check_gradients(stage, stages[index])
        assert runner.eval(*batch, target=target).each == tuple(expected)


def test_through_a_process_group(world) -> None:
    for name in ("one_f_one_b", "zero_bubble_v"):
        world(2).run(through_a_process_group, name)
