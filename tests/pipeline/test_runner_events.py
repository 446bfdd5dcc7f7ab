"""What a runner records of its steps."""

from __future__ import annotations

from tp_kernels.pipeline import PipelineRunner
from tp_kernels.pipeline.generators import zero_bubble_h1
from tp_kernels.pipeline.timeline import Recorder

from .stages import (
    mine,
    pipeline,
)
from .test_runner_options import numbers, plain_stages, squares


def test_events(world) -> None:
    world(2).run(events)


def events() -> None:
    stages = plain_stages(2)
    recorder = Recorder()
    with pipeline(recorder=recorder) as channel:
        runner = PipelineRunner(mine(stages, channel), "zero_bubble_h1", channel, squares)
        x, target = numbers(6)
        runner.step(x, target=target, micro_batches=3)
        made = zero_bubble_h1(2, 3)
        timeline = recorder.timeline(channel.group)
        for rank in range(2):
            ran = [
                f"{e.stage}{e.kind}{e.micro_batch}"
                for e in timeline.events
                if e.rank == rank and e.kind in "FIWB"
            ]
            assert ran == [str(action) for action in made.order(rank)]
        assert all(e.end >= e.start >= 0 for e in timeline.events)
        assert timeline.memory and timeline.memory[-1].amount == 0
