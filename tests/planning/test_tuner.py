"""The tuner with given times and faults, in real ranks: all of them agree, on the slowest rank's times."""

from __future__ import annotations

import pytest

from tests.planning import body
from tests.planning.body import CHOICES, STEADY, fake_tune
from tp_kernels import RankError, UnsupportedError
from tp_kernels.planning import Limits, Timing


def both(world, *args, **options):
    """What both ranks found, which is the same."""
    first, second = world(2).run(fake_tune, *args, **options)
    assert first.get("tuned") == second.get("tuned") and first.get("error") == second.get("error")
    return first, second


def test_slowest_rank_counts(world):
    # The fastest of rank 0 is 1, that of rank 1 is 3, of their mean 1.
    times = [[5.0, 0.5, 2.0, 4.0], [5.0, 3.0, 2.0, 0.1]]
    first, second = both(world, times)
    assert first["tuned"] == (2, {0: 5.0, 1: 3.0, 2: 2.0, 3: 4.0}, {})
    assert first["log"] == second["log"]


def test_slowest_rank_of_each_call_counts(world):
    # A call of candidate 1 is slow on one rank or the other; the median of each rank alone is 2.
    slow = [1.0, 3.0], [3.0, 1.0]
    times = [[9.0, slow[rank], 2.5, 9.0] for rank in range(2)]
    first, _ = both(world, times, limits=Limits(rounds=1, turn=12.1))  # four calls
    assert first["tuned"][:2] == (2, {0: 9.0, 1: 3.0, 2: 2.5, 3: 9.0})


def test_ties_go_to_the_first(world):
    times = [[9.0, 1.0, 2.0, 2.0], [9.0, 2.0, 1.0, 2.0]]
    assert both(world, times)[0]["tuned"][0] == 1


@pytest.mark.parametrize(("built_in", "winner"), [([2.0, 4.0, 3.0], 0), ([2.5, 4.0, 3.0], 1)])
def test_built_in_choice_stays_within_its_spread(world, built_in, winner):
    # Median 3; its tenth percentile is 2.2 or 2.6.
    times = [[[9.0, *built_in], 2.4, 9.0, 9.0]] * 2
    assert both(world, times)[0]["tuned"][0] == winner


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["prepare", "digest", "seconds"])
def test_failure_on_one_rank_drops_on_all(world, what, rank):
    first, second = both(world, STEADY, ((what, rank, 3),))
    winner, medians, dropped = first["tuned"]
    assert winner == 2 and 3 not in medians
    assert f"rank {rank}: RuntimeError: " in dropped[3] and list(dropped) == [3]
    # Others may have waited in vain, except for a rank that could not compile.
    for one in (first, second):
        assert ("recover", 3) in one["log"] or what == "prepare"
    if what == "prepare":
        assert not any(one == ("digest", 3) for one in first["log"] + second["log"])


def test_rank_that_is_not_ready(world):
    """At the first call of candidate 3."""
    assert list(both(world, STEADY, (("ready", 1, 6),))[0]["tuned"][2]) == [3]


def test_failure_in_the_middle_of_a_turn(world):
    """Whoever failed meets the others as often as they expect, so that they stay together."""
    faults = (("fourth", 1, 3), ("fourth", 0, 2))
    first, second = both(world, STEADY, faults, limits=Limits(rounds=2, turn=10.0))
    assert first["tuned"][0] == 1
    assert first["tuned"][2] == {
        3: "rank 1: RuntimeError: no fourth call",
        2: "rank 0: RuntimeError: no fourth call",
    }
    # Only who failed stopped calling.
    assert [one["log"].count(("seconds", 3)) for one in (first, second)] == [12, 4]


def test_rank_that_leaves(world):
    """The others do not wait for it."""
    with pytest.raises(RankError) as caught:
        world(2).run(fake_tune, STEADY, (("leaves", 1, 2),))
    first, second = caught.value.outcomes
    assert isinstance(second, body.Leaves)
    assert first["error"] == "PeerLostError" and first["log"][-1] == ("seconds", 2)


def test_limits():
    with pytest.raises(UnsupportedError, match="rounds=0"):
        Limits(rounds=0)


def test_other_bits_on_one_rank_drop_on_all(world):
    first, _ = both(world, STEADY, (("bits", 1, 3),))
    assert first["tuned"][0] == 2
    assert first["tuned"][2] == {3: "other bits than the built-in choice on rank 1"}
    assert ("seconds", 3) not in first["log"]


@pytest.mark.parametrize("what", ["prepare", "digest"])
def test_nothing_to_compare_with(world, what):
    first, second = both(world, STEADY, ((what, 1, 0),))
    assert first["error"] == "UnsupportedError"
    assert f"does not work: rank 1: RuntimeError: no {what} of 0" in second["message"]


def test_nothing_runs_to_the_end(world):
    faults = tuple(("seconds", index % 2, index) for index in range(4))
    assert "no candidate ran to the end" in both(world, STEADY, faults)[0]["message"]


def test_built_in_choice_that_fails_late(world):
    first, _ = both(world, STEADY, (("seconds", 0, 0),))
    assert first["tuned"][0] == 3 and list(first["tuned"][2]) == [0]


def test_ranks_with_other_candidates(world):
    first, second = both(world, STEADY, choices=[CHOICES, CHOICES[:3]])
    assert first["error"] == "GroupMismatchError" and first["log"] == second["log"] == []


def test_calls_of_a_turn_are_agreed(world):
    # Ten calls of 0.1 s on the slower rank, a hundred on the other.
    times = [[0.01] * 4, [0.1] * 4]
    first, second = both(world, times, limits=Limits(rounds=1, turn=1.05))
    assert first["log"] == second["log"]
    assert first["log"].count(("seconds", 0)) == 1 + 1 + 10  # a trial and a warm one
    assert first["calls"] == second["calls"] == {10}


def test_rounds_start_with_different_candidates(world):
    first, _ = both(world, STEADY)
    timed = [index for what, index in first["log"] if what == "seconds"]
    assert timed == [0, 0, 1, 1, 2, 2, 3, 3, 1, 2, 3, 0, 2, 3, 0, 1]


def test_ranks_meet_before_every_call(world):
    for punctual in world(2).run(body.meetings):
        assert len(punctual) == 16 and all(punctual)


def test_time_is_up_on_one_rank(world):
    """Rank 1 is out of time during the second candidate; rank 0 never is."""
    first, second = both(
        world, STEADY, limits=Limits(rounds=100, turn=1e-9, seconds=0.035), clock=body.fast_clock
    )
    winner, medians, dropped = first["tuned"]
    assert winner == 1 and set(medians) == {0, 1}
    assert dropped == dict.fromkeys((2, 3), "no time left after 0.035 s")
    assert first["log"] == second["log"]
    assert first["log"].count(("seconds", 0)) == 2  # the trial and one round


def test_progress(world):
    steps = both(world, STEADY)[0]["steps"]
    assert [done for _, done, _ in steps] == list(range(16)) and {n for *_, n in steps} == {16}


def test_timing():
    assert Timing.of([3.0]) == Timing(3.0, 3.0, 3.0, 1)
    assert Timing.of([float(n) for n in range(11)]) == Timing(5.0, 1.0, 9.0, 11)
