"""Schedules equal those of torch.distributed.pipelining; sizes that torch refuses are served."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from torch import nn

from tp_kernels import ShapeError
from tp_kernels.pipeline.generators import (
    SCHEDULES,
    dual_pipe_v,
    forward_only,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    pipedream,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from tp_kernels.pipeline.schedule import Action, Kind, Schedule

RANKS = (1, 2, 3, 4, 6, 8)
MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 17)


def torch_schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Any:
    """torch's schedule object, made without processes; None where torch refuses the sizes."""
    stages = [
        SimpleNamespace(
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            is_last=False,
            submod=nn.Identity(),
        )
        for _ in range(chunks)
    ]
    make = getattr(torch_schedules, name)
    single = name in ("ScheduleGPipe", "Schedule1F1B")
    try:
        return make(stages[0] if single else stages, micro_batches)
    except ValueError:
        return None


def texts(actions: Any) -> list[str]:
    return [
        str(action)
        for action in actions
        if action is not None and "REDUCE_GRAD" not in str(action) and "SHARD" not in str(action)
    ]


def as_torch(action: Action) -> Any:
    parts = tuple(map(as_torch, action.parts)) or None
    kind = torch_schedules._ComputationType(str(action.kind))
    return torch_schedules._Action(action.stage, kind, action.micro_batch, parts)


def cells(schedule: Schedule, rank: int) -> list[str]:
    return texts(schedule.actions[rank])


@pytest.mark.parametrize(
    ("name", "make", "chunks", "refused"),
    [
        ("ScheduleGPipe", gpipe, (1,), 0),
        ("Schedule1F1B", one_f_one_b, (1,), 18),
        ("ScheduleInterleaved1F1B", interleaved_one_f_one_b, (1, 2, 3, 4), 40),
        ("ScheduleInterleavedZeroBubble", zero_bubble_h1, (1,), 10),
        ("ScheduleZBVZeroBubble", zero_bubble_v, (2,), 0),
        ("ScheduleDualPipeV", dual_pipe_v, (2,), 35),
    ],
)
def test_equals_torch(
    name: str, make: Callable[..., Schedule], chunks: tuple[int, ...], refused: int
) -> None:
    refusals = 0
    for ranks in RANKS:
        for micro_batches in MICRO_BATCHES:
            for v in chunks:
                theirs = torch_schedule(name, ranks, micro_batches, v)
                if theirs is None:
                    refusals += 1
                    continue
                args = (v,) if make is interleaved_one_f_one_b else ()
                ours = make(ranks, micro_batches, *args)
                for rank in range(ranks):
                    expected = texts(theirs.pipeline_order[rank])
                    if name == "Schedule1F1B" and rank == ranks - 1:
                        # torch's table, which only its pictures use, numbers the forwards of the last
                        # rank from 1; what it runs starts with 0.
                        assert expected[0] == f"{rank}F1"
                        expected = [
                            f"{rank}F{int(a.split('F')[1]) - 1}" if "F" in a else a
                            for a in expected
                        ]
                    assert cells(ours, rank) == expected, (ranks, micro_batches, v, rank)
    assert refusals == refused  # that much of the grid compares nothing


@pytest.mark.parametrize("make", [one_f_one_b, interleaved_one_f_one_b, zero_bubble_v, dual_pipe_v])
def test_messages_are_where_torch_places_them(make: Callable[..., Schedule]) -> None:
    for ranks in (1, 2, 3, 4):
        for micro_batches in (1, 3, 8):
            ours = make(ranks, micro_batches)
            placed = torch_schedules._add_send_recv(
                {rank: [*map(as_torch, filter(None, ours.actions[rank]))] for rank in range(ranks)},
                stage_to_rank=lambda stage: ours.stage_to_rank[stage],  # noqa: B023
                num_stages=ours.stages,
            )
            found = ours.with_communication()
            assert found.communicates is (ranks > 1)
            for rank in range(ranks):
                assert cells(found, rank) == texts(placed[rank])
                assert found.order(rank) == ours.order(rank)


def test_small_schedules_by_hand() -> None:
    def orders(schedule: Schedule) -> list[str]:
        return [" ".join(map(str, schedule.order(rank))) for rank in range(schedule.ranks)]

    assert orders(gpipe(2, 2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert orders(one_f_one_b(2, 3)) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert orders(one_f_one_b(3, 1)) == ["0F0 0B0", "1F0 1B0", "2F0 2B0"]
    assert orders(zero_bubble_h2(2, 3)) == [
        "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2",
    ]
    assert orders(zero_bubble_h1(2, 3)) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]
    assert orders(forward_only(2, 2, 2)) == ["0F0 0F1 2F0 2F1", "1F0 1F1 3F0 3F1"]
    assert orders(dual_pipe_v(1, 1)) == ["0F0 1F0 1B0 0B0"]
    assert orders(dual_pipe_v(1, 2)) == ["0F0 1F0 0F1 1B0 1F1 0B0 1B1 0I1 0W1"]


def test_interleaved_serves_uneven_rounds() -> None:
    # 5 micro-batches on 2 ranks: rounds of 2, 2 and 1. torch refuses.
    assert torch_schedule("ScheduleInterleaved1F1B", 2, 5, 2) is None
    order = interleaved_one_f_one_b(2, 5).order(0)
    forwards = [str(action) for action in order if action.kind is Kind.F]
    assert forwards == ["0F0", "0F1", "2F0", "2F1", "0F2", "0F3", "2F2", "2F3", "0F4", "2F4"]
    backwards = [str(action) for action in order if action.kind is Kind.B]
    assert backwards == ["2B0", "2B1", "0B0", "0B1", "2B2", "2B3", "0B2", "0B3", "2B4", "0B4"]


def test_table_is_drawn_at_unit_time() -> None:
    schedule = one_f_one_b(2, 2)
    assert [[str(cell or ".") for cell in row] for row in schedule.actions] == [
        ["0F0", "0F1", ".", "0B0", ".", "0B1"],
        [".", "1F0", "1B0", "1F1", "1B1", "."],
    ]
    assert str(schedule).splitlines()[0] == "one_f_one_b: 2 ranks, 2 stages, 2 micro-batches"
    assert str(schedule).splitlines()[3].split() == [
        "rank",
        "0",
        "0F0",
        "0F1",
        ".",
        "0B0",
        ".",
        "0B1",
    ]
    wide = str(gpipe(4, 40)).splitlines()
    assert max(map(len, wide)) <= 100
    assert sum("rank 3" in line for line in wide) == 5  # in blocks


def test_properties() -> None:
    assert {name: make(2, 4).splits for name, make in SCHEDULES.items()} == {
        "gpipe": False,
        "one_f_one_b": False,
        "interleaved_one_f_one_b": False,
        "pipedream": False,
        "zero_bubble_h1": True,
        "zero_bubble_h2": True,
        "zero_bubble_v": True,
        "dual_pipe_v": True,
        "forward_only": False,
    }
    assert [name for name, make in SCHEDULES.items() if not make(2, 4).trains] == ["forward_only"]
    assert [name for name, make in SCHEDULES.items() if not make(2, 4).flush] == ["pipedream"]
    for name, make in SCHEDULES.items():
        assert make(3, 2).name == name
    assert zero_bubble_v(3, 4).stage_to_rank == (0, 1, 2, 2, 1, 0)
    assert zero_bubble_v(3, 4).stages_of(1) == (1, 4)
    assert interleaved_one_f_one_b(3, 4).stage_to_rank == (0, 1, 2, 0, 1, 2)
    pair = next(cell for cell in dual_pipe_v(2, 4).actions[0] if cell and cell.parts)
    assert pair.parts == (Action(0, Kind.F, 3), Action(3, Kind.B, 1))
    assert all(not action.parts for action in dual_pipe_v(2, 4).order(0))
    assert pipedream(3, 4).actions == one_f_one_b(3, 4).actions


def test_refuses_sizes_that_mean_nothing() -> None:
    with pytest.raises(ShapeError, match="micro_batches is 0"):
        gpipe(2, 0)
    with pytest.raises(ShapeError, match="ranks is 0"):
        zero_bubble_v(0, 1)
    with pytest.raises(ShapeError, match="chunks is -1"):
        forward_only(2, 1, -1)
