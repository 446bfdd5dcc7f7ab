"""Statistics of times, turns of contestants, and what happens to those that fail."""

from __future__ import annotations

import math
import statistics

import pytest

from tp_kernels.bench.timing import (
    LEAST_CALLS,
    MOST_CALLS,
    Budget,
    ContestantLost,
    Measurement,
    RankSlice,
    Sample,
    WrongResultError,
    calls_for,
    percentile,
    slowest,
)


def test_percentiles_interpolate():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert percentile(values, 0.5) == statistics.median(values) == 3.0
    assert percentile(values, 0.1) == pytest.approx(1.4)
    assert percentile(values, 0.9) == pytest.approx(4.6)
    assert percentile(values, 1.0) == 5.0
    assert percentile([7.0], 0.1) == 7.0


def test_a_call_takes_as_long_as_on_its_slowest_rank():
    assert slowest([RankSlice([1.0, 5.0, 2.0]), RankSlice([3.0, 4.0, 2.5])]) == [3.0, 5.0, 2.5]
    with pytest.raises(ValueError):
        slowest([RankSlice([1.0]), RankSlice([1.0, 2.0])])


@pytest.mark.parametrize(
    ("seconds", "calls"),
    [(1e-9, MOST_CALLS), (0.001, 40), (0.03, LEAST_CALLS), (0.04, 1), (7.0, 1)],
)
def test_calls_of_a_slice_follow_from_the_budget(seconds, calls):
    assert calls_for(seconds, 0.04) == calls


def test_a_sample_is_written_in_microseconds():
    found = Sample([i * 1e-6 for i in range(1, 12)], error=0.25).to_json()
    assert found["median_us"] == pytest.approx(6.0)
    assert (found["p10_us"], found["p90_us"]) == pytest.approx((2.0, 10.0))
    assert (found["calls"], found["correct"], found["error"]) == (11, True, 0.25)


class Fake:
    """Takes `seconds` a call; `errors` are what the checks find, one check after the other."""

    def __init__(self, name, log, seconds=0.004, errors=(), ours=False, why_not=None, lose=None):
        self.name, self.ours = name, ours
        self.log, self.seconds, self.errors = log, seconds, list(errors)
        self.why_not, self.lose, self.slices = why_not, lose, 0

    def prepare(self, case):
        self.log.append((self.name, "prepare"))
        return self.why_not

    def slice(self, calls, warm, check):
        self.slices += 1
        if self.slices == self.lose:
            raise ContestantLost("it is gone")
        self.log.append((self.name, calls, check))
        error = (self.errors.pop(0) if self.errors else 0.5) if check else None
        return [RankSlice([self.seconds] * calls, 0.0 if check else None)] * 2 + [
            RankSlice([self.seconds * 2] * calls, error)
        ]

    def finish(self):
        self.log.append((self.name, "finish"))


def measure(*contestants, rounds=3, lost=None):
    lost = {} if lost is None else lost
    return Measurement({"op": "x"}, Budget(rounds, 0.04), lost).run(contestants)


def test_contestants_take_turns_and_nobody_is_always_first():
    log = []
    done = measure(Fake("a", log), Fake("b", log), Fake("c", log))
    turns = [entry[0] for entry in log if entry[1:] in ((5, False), (5, True))]
    assert turns == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert [entry[0] for entry in log[-3:]] == ["a", "b", "c"] and log[-1][1] == "finish"
    for sample in done.samples.values():
        assert sample.seconds == [0.008] * 15  # the slowest of three ranks, five calls a turn
        assert sample.error == 0.5
    # Checked before the first and in the last turn.
    checks = [entry[2] for entry in log if entry[0] == "a" and len(entry) == 3]
    assert checks == [True, False, False, False, True]


def test_long_calls_run_once_a_turn():
    log = []
    done = measure(Fake("a", log, seconds=0.5))
    assert [entry[1] for entry in log if len(entry) == 3] == [1, 1, 1, 1]
    assert len(done.samples["a"].seconds) == 3


@pytest.mark.parametrize("error", [1.5, math.inf, math.nan, None])
@pytest.mark.parametrize("when", [0, 1])
def test_a_wrong_result_of_ours_ends_the_run(error, when):
    errors = [0.1, 0.1]
    errors[when] = error
    with pytest.raises(WrongResultError, match="host: wrong result on rank 2 at op=x"):
        measure(Fake("host", [], errors=errors, ours=True))


def test_a_peer_that_is_wrong_is_no_row_and_stays_out():
    log, lost = [], {}
    wrong, good = Fake("wrong", log, errors=[0.1, 2.0]), Fake("good", log)
    done = measure(wrong, good, lost=lost)
    assert list(done.samples) == ["good"]
    assert "wrong result on rank 2" in done.absent["wrong"] == lost["wrong"]
    log.clear()
    done = measure(wrong, good, lost=lost)
    assert list(done.samples) == ["good"] and {entry[0] for entry in log} == {"good"}


@pytest.mark.parametrize("when", [1, 2, 3, 5])
def test_a_contestant_that_is_lost_does_not_stop_the_others(when):
    lost = {}
    done = measure(Fake("a", [], lose=when), Fake("b", []), lost=lost)
    assert list(done.samples) == ["b"] and len(done.samples["b"].seconds) == 15
    assert lost == {"a": "it is gone (op=x)"} == done.absent


def test_one_that_does_not_run_a_case_may_run_the_next():
    lost = {}
    done = measure(Fake("a", [], why_not="no bfloat16"), Fake("b", []), lost=lost)
    assert done.absent == {"a": "no bfloat16"} and not lost
    assert list(done.samples) == ["b"]
