"""Case after case, for every world size: contestants start and end with it, and who is lost is noted."""

from __future__ import annotations

import pytest

from tests.bench.test_timing import Fake
from tp_kernels import ShapeError
from tp_kernels.bench.measure import Settings, measure
from tp_kernels.bench.peers import Peers
from tp_kernels.bench.timing import Budget


def test_every_world_has_contestants_of_its_own():
    log, steps, ended = [], [], []

    def start(stack, world):
        stack.callback(ended.append, world)
        contestants = [
            Fake("host", log, seconds=0.001 * world),
            Fake("peer", log, lose=4 if world == 2 else None),
            Fake("other", log, why_not="too long" if world == 3 else None),
        ]
        return contestants, lambda case, medians: {"ended": len(ended), **medians}

    cases = [{"op": op, "world": world} for world in (2, 3) for op in ("a", "b")]
    peers = Peers()
    rows = measure(
        cases,
        start,
        Settings(worlds=(2, 3), budget=Budget(2, 0.04)),
        peers,
        lambda *step: steps.append(step),
    )
    assert [row["case"] for row in rows] == cases and ended == [2, 3]
    assert steps == [
        ("starting 2 ranks", 0, 4),
        ("op=a world=2", 0, 4),
        ("op=b world=2", 1, 4),
        ("starting 3 ranks", 2, 4),
        ("op=a world=3", 2, 4),
        ("op=b world=3", 3, 4),
    ]
    # The slowest rank of a fake takes twice its seconds.
    assert rows[1]["derived"] == pytest.approx({"ended": 0, "host": 0.004, "other": 0.008})
    assert rows[3]["derived"] == pytest.approx({"ended": 1, "host": 0.006, "peer": 0.008})
    assert rows[3]["contestants"]["host"]["median_us"] == pytest.approx(6000)
    assert rows[3]["contestants"]["host"]["calls"] == 2 * 6
    lost = {"peer": "it is gone (op=a world=2)"}
    assert [row["absent"] for row in rows] == [lost, {}, *[{"other": "too long"}] * 2]
    assert peers.not_run == [{"contestant": "peer", "world": 2, "why": lost["peer"]}]


def test_one_rank_has_nobody_to_exchange_with():
    with pytest.raises(ShapeError, match="measure 2 ranks or more"):
        measure([], lambda *_: pytest.fail("started"), Settings(worlds=(2, 1)), Peers(), print)
