"""Simulated bubbles and activations equal the published formulas; times equal longest paths."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_kernels import ShapeError
from tp_kernels.pipeline.generators import (
    SCHEDULES,
    dual_pipe_v,
    forward_only,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from tp_kernels.pipeline.schedule import Action, Kind, Schedule, ScheduleError
from tp_kernels.pipeline.simulate import Costs
from tp_kernels.pipeline.timeline import Timeline

RANKS = (1, 2, 3, 4, 6, 8)


def close(value: float) -> object:
    return pytest.approx(value, abs=1e-9)


def work_of(timeline: Timeline) -> float:
    (busy,) = {round(timeline.busy(rank), 9) for rank in timeline.ranks}
    return busy


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_bubble_of_gpipe_and_1f1b(make: Callable[..., Schedule]) -> None:
    """(p - 1) / m of the ideal time, (p - 1) / (m + p - 1) of the whole (Narayanan et al., 2104.04473)."""
    for p, m, backward in product(RANKS, (1, 2, 3, 8, 15), (1.0, 2.0, 3.5)):
        found = make(p, m).simulate(Costs(1.5, backward_input=backward, backward_weight=0.0))
        assert found.makespan == close((m + p - 1) * (1.5 + backward))
        assert found.bubble_over_ideal == close((p - 1) / m)
        assert found.bubble_over_total == close((p - 1) / (m + p - 1))
        assert found.throughput == close(m / found.makespan)


def test_bubble_of_interleaved() -> None:
    """(p - 1) / (v m) where p divides m (Narayanan et al.)."""
    for p, rounds, v in product(RANKS, (1, 2, 3), (1, 2, 3, 4)):
        m = p * rounds
        found = interleaved_one_f_one_b(p, m, v).simulate(Costs(1.0, 1.3, 0.7))
        assert found.bubble_over_ideal == close((p - 1) / (v * m))


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (1, 1.2, 0.9), (2, 3, 1.5)])
def test_bubble_of_zero_bubble(times: tuple[float, float, float]) -> None:
    """H1: (p - 1)(F + I - W); H2: (p - 1)(F + I - 2W), start to end of a rank (2401.10241)."""
    f, i, w = times
    for p in RANKS:
        for m in (2 * p - 1, 2 * p, 3 * p + 1):
            first = zero_bubble_h1(p, m).simulate(Costs(f, i, w))
            assert first.makespan - work_of(first) == close((p - 1) * (f + i - w))
            assert first.bubble_over_ideal == close((p - 1) * (f + i - w) / (m * (f + i + w)))
            second = zero_bubble_h2(p, m).simulate(Costs(f, i, w))
            assert second.period - work_of(second) == close((p - 1) * (f + i - 2 * w))
            assert second.steady_bubble == close((p - 1) * (f + i - 2 * w) / (m * (f + i + w)))


def test_no_bubble_where_there_is_none() -> None:
    """H2 and V with F = I = W and m >= 2p - 1: no rank waits between its first and its last action."""
    for p in RANKS:
        for m in (2 * p - 1, 2 * p, 4 * p):
            for make in (zero_bubble_h2, zero_bubble_v):
                found = make(p, m).simulate(Costs(1.0, 1.0, 1.0))
                assert found.steady_bubble == close(0.0)
                # From the first start of any rank to the last end of any there is the ramp.
                assert found.makespan - work_of(found) == close(p - 1)
        few = zero_bubble_v(p, 2 * p - 2).simulate() if p > 1 else None
        assert few is None or few.steady_bubble > 0.01


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (1, 1, 0.5)])
def test_bubble_of_dual_pipe(times: tuple[float, float, float]) -> None:
    """(PP/2 - 1)(F&B + B - 3W) with PP = 2p chunks (github.com/deepseek-ai/DualPipe), here with F = I."""
    f, i, w = times
    for p in (1, 2, 3, 4, 8):
        for m in (2 * p, 2 * p + 3, 4 * p):
            found = dual_pipe_v(p, m).simulate(Costs(f, i, w, overlap=1.0))
            pair, b = f + i + w, i + w
            assert found.makespan - work_of(found) == close((p - 1) * (pair + b - 3 * w))
            # Parts one after the other do not wait for each other's input.
            assert dual_pipe_v(p, m).simulate(Costs(f, i, w)).makespan <= found.makespan


def test_overlapped_pairs() -> None:
    text = "0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B,1B1,0B1\n"
    schedule = Schedule.from_csv(text)
    assert schedule.simulate().makespan == 12.0
    found = schedule.simulate(Costs(overlap=0.5))
    assert found.makespan == 12.0 - 1.5 and found.busy(0) == 10.5
    pair = {(e.stage, e.kind): (e.start, e.end) for e in found.events if e.start == 5.0}
    assert pair == {(1, "F"): (5.0, 6.5), (0, "B"): (5.0, 6.5)}


def test_activations() -> None:
    for p, m in product(RANKS, (1, 2, 5, 8, 24)):
        ranks = range(p)
        found = gpipe(p, m).simulate()
        assert [found.peak_activations(rank) for rank in ranks] == [m] * p
        found = one_f_one_b(p, m).simulate()
        assert [found.peak_activations(rank) for rank in ranks] == [min(p - s, m) for s in ranks]
        found = zero_bubble_h1(p, m).simulate()
        assert max(found.peak_activations(rank) for rank in ranks) == min(p, m)
        if m >= 2 * p - 1:
            found = zero_bubble_h1(p, m).simulate()
            assert [found.peak_activations(rank) for rank in ranks] == [p] * p
            found = zero_bubble_h2(p, m).simulate()
            assert [found.peak_activations(rank) for rank in ranks] == [2 * p - 1] * p
            found = zero_bubble_v(p, m).simulate()
            assert [found.peak_activations(rank) for rank in ranks] == [2 * p] * p
        if m >= 2 * p + 1:
            found = dual_pipe_v(p, m).simulate()
            assert [found.peak_activations(rank) for rank in ranks] == [2 * p + 1] * p
        found = forward_only(p, m).simulate()
        assert [found.peak_activations(rank) for rank in ranks] == [0] * p
    # Narayanan et al.: the first rank holds p (1 + (p - 1) / (v p)) whole activations of v chunks each.
    for p, v in product((2, 4, 8), (2, 3, 4)):
        found = interleaved_one_f_one_b(p, 4 * p, v).simulate()
        assert found.peak_activations(0) == v * p + p - 1


def test_memory_in_units_of_the_costs() -> None:
    sizes = Costs(activation=[7.0, 3.0], activation_weight=[2.0, 1.0], unit="bytes")
    plain = one_f_one_b(2, 4).simulate(sizes)
    assert [plain.peak_memory(rank) for rank in (0, 1)] == [14.0, 3.0]
    split = zero_bubble_h1(2, 4).simulate(sizes)
    # Rank 1 starts a forward (3) while one micro-batch waits for its weight gradient (1).
    assert split.peak_memory(1) == 4.0
    assert split.unit == "bytes"
    whole = zero_bubble_h1(2, 4).simulate(Costs(activation=[7.0, 3.0]))
    assert whole.peak_memory(1) == 6.0
    assert whole.peak_memory(0) == 14.0
    assert forward_only(2, 4).simulate(sizes).memory == ()


def longest_paths(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """End of every action by relaxing all constraints until nothing changes."""
    orders = [schedule.order(rank) for rank in range(schedule.ranks)]
    ends = {action: costs.of(action.kind, action.stage) for order in orders for action in order}
    edges: list[tuple[Action, Action, float]] = []
    for rank, order in enumerate(orders):
        edges += [(a, b, 0.0) for a, b in pairwise(order)]
        for action in order:
            step = {Kind.F: -1, Kind.B: 1, Kind.I: 1}.get(action.kind, 0)
            for kind in Kind:
                source = Action(action.stage + step, kind, action.micro_batch)
                forward = kind is Kind.F and action.kind is Kind.F
                backward = {kind, action.kind} <= {Kind.B, Kind.I}
                if step and source in ends and (forward or backward):
                    away = schedule.stage_to_rank[source.stage] != rank
                    edges.append(
                        (
                            source,
                            action,
                            costs.transfer(source.stage, action.stage) if away else 0.0,
                        )
                    )
    changed = True
    while changed:
        changed = False
        for source, target, seconds in edges:
            end = ends[source] + seconds + costs.of(target.kind, target.stage)
            if end > ends[target] + 1e-12:
                ends[target], changed = end, True
    return ends


@settings(max_examples=40)
@given(st.data())
def test_times_are_longest_paths(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SCHEDULES)))
    ranks, micro_batches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    schedule = SCHEDULES[name](ranks, micro_batches)
    seconds = st.lists(st.floats(0.5, 2.0), min_size=schedule.stages, max_size=schedule.stages)
    costs = Costs(
        data.draw(seconds),
        data.draw(seconds),
        data.draw(seconds),
        # Shorter than any work, so that no message finds its link taken.
        communication=data.draw(st.floats(0.0, 0.5)),
    )
    found = schedule.simulate(costs)
    expected = longest_paths(schedule, costs)
    work = [event for event in found.events if event.kind in ("F", "I", "W", "B")]
    assert len(work) == len(expected)
    for event in work:
        action = Action(event.stage, Kind(event.kind), event.micro_batch)
        assert event.end == close(expected[action])
        assert event.end - event.start == close(costs.of(action.kind, action.stage))
    for rank in found.ranks:
        idle = found.makespan - found.busy(rank)
        assert found.idle(rank) == close(idle) and found.waiting(rank) <= idle + 1e-9


def test_messages_take_turns_on_a_link() -> None:
    """Forwards of 1 s and messages of 3 s: the link of a rank is the slowest stage."""
    found = forward_only(2, 3).simulate(Costs(1.0, communication=3.0))
    ends = {(e.stage, e.micro_batch): e.end for e in found.events if e.kind == "F"}
    assert [ends[1, k] for k in range(3)] == [5.0, 8.0, 11.0]
    sends = [(e.rank, e.start, e.end) for e in found.events if e.kind == "SEND_F"]
    assert sends == [(0, 1.0, 4.0), (0, 4.0, 7.0), (0, 7.0, 10.0)]
    waits = [(e.rank, e.micro_batch, e.start, e.end) for e in found.events if e.kind == "WAIT_F"]
    assert waits == [(1, 0, 0.0, 4.0), (1, 1, 5.0, 7.0), (1, 2, 8.0, 10.0)]
    assert found.transferring(0) == 9.0 and found.latency == close((5 + 7 + 9) / 3)


def test_whole_backward_of_its_own_cost() -> None:
    costs = Costs(1.0, 1.0, 1.0, backward=1.5)
    assert one_f_one_b(2, 2).simulate(costs).makespan == 7.5
    assert zero_bubble_h1(2, 2).simulate(costs).busy(0) == 6.0


def test_what_cannot_be_simulated() -> None:
    with pytest.raises(ScheduleError, match="rank 0, 0B0: its input never arrives"):
        Schedule.from_csv("0F0,0B0\n,1F0,\n").simulate()
    with pytest.raises(ShapeError, match="forward has 3 numbers, but 2 stages need 2"):
        gpipe(2, 2).simulate(Costs([1.0, 1.0, 1.0]))
    with pytest.raises(ShapeError, match="communication has 2 numbers, but 2 stages need 1"):
        gpipe(2, 2).simulate(Costs(communication=[1.0, 1.0]))
    with pytest.raises(ShapeError, match="activation_weight is 2 in stage 1, activation only 1"):
        gpipe(2, 2).simulate(Costs(activation_weight=[1.0, 2.0]))
    with pytest.raises(ShapeError, match="backward_weight is -1"):
        Costs(1.0, 1.0, [1.0, -1.0])
    with pytest.raises(ShapeError, match="forward has None: use a number"):
        Costs([1.0, None])  # type: ignore[list-item]
    with pytest.raises(ShapeError, match=r"forward has array.*use a number"):
        Costs(np.ones(2))  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="forward is nan"):
        Costs(float("nan"))
