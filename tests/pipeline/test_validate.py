"""Every generated schedule can run, and every kind of broken one is refused with its cell named."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_kernels import ShapeError
from tp_kernels.pipeline.generators import (
    SCHEDULES,
    dual_pipe_v,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)
from tp_kernels.pipeline.schedule import Action, Schedule, ScheduleError, lay_out


def chunked(make: Callable[..., Schedule]) -> bool:
    return "chunks" in inspect.signature(make).parameters


def generated(name: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    make = SCHEDULES[name]
    return make(ranks, micro_batches, *([chunks] if chunked(make) else []))


def credits_of(name: str, ranks: int, micro_batches: int) -> int:
    """Messages that wait at a boundary: more than one in the longer rounds of the interleaved schedule."""
    rounds = max(1, micro_batches // ranks)
    even = name == "interleaved_one_f_one_b" and rounds > 1 and micro_batches % rounds == 0
    return micro_batches // rounds - ranks + 1 if even else 1


def test_every_generated_schedule_is_valid() -> None:
    count = 0
    for name, ranks, micro_batches in product(SCHEDULES, range(1, 9), range(1, 17)):
        for chunks in range(1, 5) if chunked(SCHEDULES[name]) else (1,):
            schedule = generated(name, ranks, micro_batches, chunks)
            schedule.validate(credits=credits_of(name, ranks, micro_batches))
            assert sum(len(schedule.order(rank)) for rank in range(ranks)) >= (
                schedule.stages * micro_batches * (2 if schedule.trains else 1)
            )
            count += 1
    assert count == 1920


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 8),
    st.integers(1, 16),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_placed_messages_run_with_any_credits(
    name: str, ranks: int, micro_batches: int, chunks: int, credits: int
) -> None:
    schedule = generated(name, ranks, micro_batches, chunks).with_communication()
    assert schedule.validate(credits=credits) is schedule
    assert schedule.with_communication() == schedule


# Each case: cells of 1F1B on 2 ranks with 3 micro-batches, rank 0 and rank 1, and what is said.
#                0  1  2  3  4  5          rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
#                                          rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
@pytest.mark.parametrize(
    ("rank", "order", "place", "message"),
    [
        (1, "1B0 1F0 1F1 1B1 1F2 1B2", (1, 0, "1B0"), "comes before 1F0, which is at step 1"),
        (0, "0F0 0F1 0B0 0F2 0B1 0B1", (0, 5, "0B1"), "happens twice: 0B1 is at step 4 already"),
        (0, "0F0 0F1 0B0 0F2 0B1 0I1", (0, 5, "0I1"), "happens twice: 0B1 is at step 4"),
        (0, "0F0 0F1 0B0 0F2 0B1", (0, None, "0B2"), "is missing"),
        (0, "0F0 0F1 0B0 0F2 0B1 0I2", (0, None, "0W2"), "is missing"),
        (1, "1F0 1B0 1F1 1B1 1F2 1B2 0F2", (1, 6, "0F2"), "stage 0 is on rank 0"),
        (1, "1F0 1B0 1F1 1B1 1F2 1B2 1F3", (1, 6, "1F3"), "there are 3 micro-batches"),
        (1, "1F0 1B0 1F1 1B1 1F2 1B2 2F2", (1, 6, "2F2"), "there are 2 stages"),
        (
            0,
            "0F0 0B0 0B1 0F1 0F2 0B2",
            (0, 2, "0B1"),
            "comes before 0F1, which is at step 3",
        ),
        (
            1,
            "1F1 1B1 1F0 1B0 1F2 1B2",
            (0, 2, "0B0"),
            None,  # possible: 0B0 waits for 1B0, which only needs 0F0
        ),
        (
            0,
            "0F0 0B0 0F2 0B2 0F1 0B1",
            (0, 3, "0B2"),
            "deadlock: waits for 1SEND_B2 of rank 1; rank 1 at step 2, 1F1, waits for 0SEND_F1 of rank 0",
        ),
    ],
)
def test_broken_orders(
    rank: int, order: str, place: tuple[int, int | None, str], message: str | None
) -> None:
    good = one_f_one_b(2, 3)
    rows = [good.order(0), good.order(1)]
    rows[rank] = tuple(map(Action.parse, order.split()))
    broken = replace(good, actions=tuple(rows))
    if message is None:
        broken.validate()
        return
    with pytest.raises(ScheduleError, match=message) as caught:
        broken.validate()
    error = caught.value
    assert (error.rank, error.step, str(error.action)) == place
    step = "" if place[1] is None else f", step {place[1]}"
    assert str(error).startswith(f"rank {place[0]}{step}, {place[2]}: ")


def test_steps_are_those_of_the_table() -> None:
    """A cell is named by its column, with idle cells counted."""
    good = one_f_one_b(3, 3)
    table = [list(row) for row in good.actions]
    first, second = table[2].index(Action.parse("2F1")), table[2].index(Action.parse("2B1"))
    table[2][first], table[2][second] = table[2][second], table[2][first]
    with pytest.raises(ScheduleError, match=f"rank 2, step {first}, 2B1: comes before 2F1"):
        replace(good, actions=tuple(map(tuple, table))).validate()
    assert first == 4


def test_split_backward_in_order() -> None:
    good = zero_bubble_h1(2, 2)
    order = [str(action) for action in good.order(0)]
    i, w = order.index("0I0"), order.index("0W0")
    order[i], order[w] = order[w], order[i]
    broken = replace(good, actions=(tuple(map(Action.parse, order)), good.order(1)))
    with pytest.raises(ScheduleError, match=r"rank 0, step 2, 0W0: comes before 0I0"):
        broken.validate()


def test_pairs_are_looked_into() -> None:
    good = dual_pipe_v(2, 4)
    assert good.actions[0][7] is not None and len(good.actions[0][7].parts) == 2
    text = good.to_csv().replace("(0F3;3B1)", "(0F3;3B2)")
    with pytest.raises(
        ScheduleError, match=r"rank 0, step 9, 3B2: happens twice: 3B2 is at step 7"
    ):
        Schedule.from_csv(text).validate()
    swapped = good.to_csv().replace("(0F3;3B1)OVERLAP_F_B", "(3B1;0F3)OVERLAP_F_B")
    Schedule.from_csv(swapped).validate()


def test_messages_as_cells() -> None:
    good = one_f_one_b(2, 2).with_communication()

    def broken(old: str, new: str) -> Schedule:
        lines = [",".join(filter(None, line.split(","))) for line in good.to_csv().splitlines()]
        text = "\n".join(lines)
        assert old in text
        return Schedule.from_csv(text.replace(old, new))

    broken("1F0", "1F0").validate()
    for old, new, message in (
        ("1RECV_F0,", "", "rank 1, 1RECV_F0: is missing: 1F0 needs it"),
        ("0SEND_F1,", "", "rank 0, 0SEND_F1: is missing: 1F1 needs it"),
        ("0RECV_B0,", "", "rank 0, 0RECV_B0: is missing: 0B0 needs it"),
        ("0F0,0SEND_F0", "0SEND_F0,0F0", "rank 0, step 0, 0SEND_F0: comes before 0F0"),
        ("1RECV_F0,1F0", "1F0,1RECV_F0", "rank 1, step 0, 1F0: comes before 1RECV_F0"),
        ("1F0", "1F0,1SEND_F0", "rank 1, step 2, 1SEND_F0: no other rank takes part"),
        ("1F0", "1F0,1RECV_F0", "rank 1, step 2, 1RECV_F0: happens twice"),
    ):
        with pytest.raises(ScheduleError, match=message):
            broken(old, new).validate()


def test_too_few_credits() -> None:
    """Rank 1 wants the second of two messages first: with one credit the second is never sent."""
    orders = ["0F0 0F1 0B1 0B0", "1F1 1F0 1B1 1B0"]
    schedule = lay_out("turned", [[*map(Action.parse, o.split())] for o in orders], range(2), 2)
    schedule.validate(credits=2)
    message = (
        r"rank 0, step 1, 0F1: deadlock: waits for rank 1 to receive one of 1 messages before 0SEND_F1; "
        r"rank 1 at step 2, 1F1, waits for 0SEND_F1 of rank 0"
    )
    with pytest.raises(ScheduleError, match=message):
        schedule.validate(credits=1)
    # Both neighbours send first: impossible if a send waits for its receive.
    with pytest.raises(
        ScheduleError, match="waits for rank 1 to receive 0SEND_F1; rank 1 at step 2"
    ):
        one_f_one_b(2, 2).validate(credits=0)
    gpipe(4, 8).validate(credits=0)
    with pytest.raises(ScheduleError, match="one of 1 messages"):
        interleaved_one_f_one_b(3, 8).validate(credits=1)


def test_order_between_stages_of_one_rank() -> None:
    text = "0F0,1F0,0B0,1B0\n"
    message = "rank 0, step 2, 0B0: deadlock: waits for 1B0, which comes later on this rank"
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text).validate()
    with pytest.raises(ScheduleError, match="waits for 1I0, which comes later on this rank"):
        Schedule.from_csv("0F0,1F0,0B0,1I0,1W0\n").validate()
    Schedule.from_csv("0F0,1F0,1I0,0I0,0W0,1W0\n").validate()


def test_memory_limit() -> None:
    gpipe(2, 4).validate(memory=4)
    with pytest.raises(
        ScheduleError, match="rank 0, step 3, 0F3: keeps 4 activations, the limit is 3"
    ):
        gpipe(2, 4).validate(memory=3)
    one_f_one_b(4, 16).validate(memory=4)
    with pytest.raises(ScheduleError, match="rank 0, step 3, 0F3: keeps 4"):
        one_f_one_b(4, 16).validate(memory=3)
    # A split backward keeps until W.
    zero_bubble_v(4, 16).validate(memory=8)
    with pytest.raises(ScheduleError, match="keeps 8"):
        zero_bubble_v(4, 16).validate(memory=7)
    SCHEDULES["forward_only"](2, 9).validate(memory=1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("(0F0;1F0)OVERLAP_F_B,1B0,0B0", "step 0, .*: 1F0 needs 0F0, which runs beside it"),
        ("0F0,(1F0;1B0)OVERLAP_F_B,0B0", "step 1, .*: 1B0 needs 1F0"),
        ("0F0,1F0,(1I0;0I0)OVERLAP_F_B,1W0,0W0", "step 2, .*: 0I0 needs 1I0"),
    ],
)
def test_pairs_do_not_need_each_other(row: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=f"rank 0, {message}"):
        Schedule.from_csv(f"{row}\n").validate()


def test_tables_that_are_none() -> None:
    good = gpipe(2, 2)
    with pytest.raises(ScheduleError, match="0 micro-batches: there is nothing to do"):
        replace(good, micro_batches=0, actions=((), ())).validate()
    with pytest.raises(ScheduleError, match="1 rows of actions for 2 ranks"):
        replace(good, actions=good.actions[:1]).validate()
    with pytest.raises(ScheduleError, match="1 stages are placed of 2"):
        replace(good, stage_to_rank=(0,)).validate()
    with pytest.raises(ScheduleError, match="stage 1 is placed on rank 2 of 2"):
        replace(good, stage_to_rank=(0, 2)).validate()
    with pytest.raises(ShapeError, match="credits is -1"):
        good.validate(credits=-1)
    with pytest.raises(ShapeError, match="memory is 0"):
        good.validate(memory=0)
