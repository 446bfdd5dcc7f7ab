"""Actions and tables as text: torch's notation, there and back."""

from __future__ import annotations

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from tp_kernels.pipeline.generators import SCHEDULES, dual_pipe_v, one_f_one_b
from tp_kernels.pipeline.schedule import Action, Kind, Schedule, ScheduleError, lay_out, overlap

TEXTS = ["0F0", "12I3", "3W14", "1B0", "2SEND_F0", "0RECV_F7", "1SEND_B2", "3RECV_B10"]


@pytest.mark.parametrize("text", [*TEXTS, "(0F3;7B0)OVERLAP_F_B", "(3B1;0F12)OVERLAP_F_B"])
def test_notation_is_that_of_torch(text: str) -> None:
    action = Action.parse(text)
    assert str(action) == text
    theirs = torch_schedules._Action.from_str(text)
    assert str(theirs) == text
    assert action.stage == theirs.stage_index
    assert str(action.kind) == theirs.computation_type.value
    assert action.micro_batch == theirs.microbatch_index


def test_parse_says_what_is_wrong() -> None:
    for text in (
        "",
        "F0",
        "0X1",
        "0F",
        "0F1 0F2",
        "(0F1;0F2)",
        "-1F0",
        "()OVERLAP_F_B",
        "0OVERLAP_F_B1",
    ):
        with pytest.raises(ScheduleError, match="is not an action"):
            Action.parse(text)
    assert Action.parse(" 2F0 ") == Action(2, Kind.F, 0)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_csv_there_and_back(name: str) -> None:
    for schedule in (SCHEDULES[name](3, 4), SCHEDULES[name](3, 4).with_communication()):
        read = Schedule.from_csv(schedule.to_csv(), name=name, flush=schedule.flush)
        assert read == schedule


def test_csv_of_torch_with_cells_of_fsdp() -> None:
    text = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n,1RECV_F0,1F0,1B0,1SEND_B0\n"
    schedule = Schedule.from_csv(text)
    assert [str(a) for _, a in schedule.steps(0)] == ["0F0", "0SEND_F0", "0RECV_B0", "0B0"]
    assert (schedule.ranks, schedule.stages, schedule.micro_batches) == (2, 2, 1)
    schedule.validate(credits=1)


def test_csv_that_is_wrong_names_the_cell() -> None:
    with pytest.raises(ScheduleError, match=r"rank 1, step 2: '1G0' is not an action"):
        Schedule.from_csv("0F0,0B0\n,1F0,1G0\n")
    with pytest.raises(ScheduleError, match="computes nothing"):
        Schedule.from_csv(",,\n")
    with pytest.raises(ScheduleError, match="no rank computes stage 1"):
        Schedule.from_csv("0F0\n2F0\n")
    assert Schedule.from_csv("0F0\n2F0\n", stage_to_rank=(0, 0, 1)).stages == 3


def test_steps_count_idle_cells() -> None:
    schedule = one_f_one_b(2, 1)
    assert [(step, str(action)) for step, action in schedule.steps(0)] == [(0, "0F0"), (3, "0B0")]
    pairs = dual_pipe_v(1, 2)
    assert [step for step, _ in pairs.steps(0)] == [0, 1, 2, 3, 4, 4, 5, 6, 7]


def test_lay_out_keeps_an_order_that_gets_stuck() -> None:
    orders = [
        [Action.parse("0F0"), Action.parse("0B0")],
        [Action.parse("1B0"), Action.parse("1F0")],
    ]
    stuck = lay_out("stuck", [orders[0], [Action.parse("1F1"), *orders[1]]], range(2), 1)
    assert [str(action) for action in stuck.order(1)] == ["1F1", "1B0", "1F0"]
    assert [str(action) for action in stuck.order(0)] == ["0F0", "0B0"]
    assert lay_out("x", [[overlap(*orders[0])]], [0], 1).order(0) == tuple(orders[0])
