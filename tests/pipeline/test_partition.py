"""The cut of layers into stages: as good as trying everything, within memory, and readable."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import combinations, permutations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tp_kernels.comm import ShapeError, UnsupportedError
from tp_kernels.pipeline.generators import SCHEDULES
from tp_kernels.pipeline.partition import partition
from tp_kernels.pipeline.plan import LayerCost, Plan, in_flight

COUNTS = st.integers(0, 9)


@st.composite
def problems(draw):
    """A few layers on a few unequal devices, small whole numbers so that ties are common."""
    layers = draw(st.integers(1, 8))
    stages = draw(st.integers(1, min(4, layers)))
    costs = [
        LayerCost(
            f"layer{i}", *(float(draw(COUNTS)) for _ in range(2)), *(draw(COUNTS) for _ in range(3))
        )
        for i in range(layers)
    ]
    some = lambda values: draw(st.lists(values, min_size=stages, max_size=stages))
    options = {
        "speeds": some(st.sampled_from([0.5, 1.0, 2.0, 3.0])),
        "memory": some(st.one_of(st.none(), st.integers(20, 400))),
        "bandwidth": draw(
            st.one_of(
                st.none(),
                st.sampled_from([0.5, 2.0]),
                st.lists(st.sampled_from([0.3, 1.0]), min_size=stages - 1, max_size=stages - 1),
            )
        ),
        "latency": draw(st.sampled_from([0.0, 1.5])),
        "overlap": draw(st.booleans()),
        "schedule": draw(st.sampled_from(["gpipe", "one_f_one_b", "forward_only"])),
        "micro_batches": draw(st.integers(1, 5)),
        "optimizer_factor": draw(st.sampled_from([0.0, 2.0])),
        "checkpoint": draw(st.booleans()),
        "method": draw(st.sampled_from(["profile", "profile", "parameters", "uniform"])),
    }
    return costs, stages, options


def value_of(costs, bounds, order, options):
    """(slowest, sum, sum of squares) of a cut as the documentation defines them; None: it does not fit."""
    stages, slowest, total, squares = len(order), 0.0, 0.0, 0.0
    trains = options["schedule"] != "forward_only"
    for stage, device in enumerate(order):
        own = costs[bounds[stage] : bounds[stage + 1]]
        kept = options["micro_batches"]
        if options["schedule"] == "one_f_one_b":
            kept = min(stages - stage, kept)
        parameters = sum(c.parameter_bytes for c in own)
        kept_bytes = sum(c.activation_bytes for c in own)
        needed = parameters + kept * kept_bytes
        if trains:
            needed = parameters * (2 + options["optimizer_factor"]) + kept * kept_bytes
            if options["checkpoint"]:
                came = costs[bounds[stage] - 1].output_bytes if stage else 0
                needed = parameters * (2 + options["optimizer_factor"]) + kept * came + kept_bytes
        limit = options["memory"][device]
        if limit is not None and needed > limit:
            return None
        time = sum(c.forward for c in own)
        if trains:
            time += sum(c.backward for c in own) + time * options["checkpoint"]
        if options["method"] == "uniform":
            time = len(own)
        if options["method"] == "parameters":
            time = parameters
        time /= options["speeds"][device]
        sends = [transfer(costs, bounds, s, options) for s in (stage, stage - 1)]
        total += time + sends[0] * (2 if trains else 1)
        squares += time**2
        if options["overlap"]:
            slowest = max(slowest, time, sends[0])
        else:
            slowest = max(slowest, time + sends[0] + (sends[1] if trains else 0.0))
    return slowest, total, squares


def transfer(costs, bounds, link, options):
    rate = options["bandwidth"]
    if rate is None or options["method"] != "profile" or not 0 <= link < len(bounds) - 2:
        return 0.0
    rate = rate[link] if isinstance(rate, list) else rate
    return options["latency"] + costs[bounds[link + 1] - 1].output_bytes / rate


def best_of_all(costs, stages, options, orders):
    found = []
    for inner in combinations(range(1, len(costs)), stages - 1):
        for order in orders:
            value = value_of(costs, (0, *inner, len(costs)), order, options)
            if value is not None:
                found.append(value)
    return min(found, default=None)


def agree(costs, stages, options, orders, **more):
    expected = best_of_all(costs, stages, options, orders)
    if expected is None:
        with pytest.raises(UnsupportedError, match="no cut of"):
            partition(costs, stages, **options, **more)
        return False
    plan = partition(costs, stages, **options, **more)
    assert value_of(costs, plan.bounds, plan.devices, options) == pytest.approx(expected)
    assert Plan.from_json(plan.to_json()) == plan
    return True


@settings(max_examples=300)
@given(problems())
def test_as_good_as_trying_every_cut(problem):
    costs, stages, options = problem
    agree(costs, stages, options, [tuple(range(stages))])


@settings(max_examples=40)
@given(problems())
def test_as_good_as_trying_every_order_of_the_devices(problem):
    costs, stages, options = problem
    if isinstance(options["bandwidth"], list):
        options["bandwidth"] = 1.0
    agree(costs, stages, options, list(permutations(range(stages))), reorder=True)


def test_small_spread_is_not_small_maximum():
    """Cuts whose stages differ least may be slower: behind a slow link, on unequal devices, in memory."""
    wide = [LayerCost("a", 4.0, 0, 0, 0, 1), LayerCost("b", 1.0, 0, 0, 0, 90), LayerCost("c", 5.0)]
    link = {"bandwidth": 10.0, "schedule": "forward_only"}
    # evenest computation: 5 | 5, but the link between them takes 9
    assert partition(wide, 2, **link).bounds == (0, 1, 3)
    assert partition(wide, 2, schedule="forward_only").bounds == (0, 2, 3)

    speeds = [1.0, 2.0, 2.0]
    beaten = 0
    for draw in range(300):
        costs = [LayerCost(f"l{i}", float((draw * 7 + i * i * 5 + 3 * i) % 11)) for i in range(7)]
        cuts = [(0, *inner, 7) for inner in combinations(range(1, 7), 2)]
        times = {cut: stage_times(costs, cut, speeds) for cut in cuts}
        even = min(cuts, key=lambda cut: max(times[cut]) - min(times[cut]))
        best = partition(costs, 3, speeds=speeds, schedule="forward_only")
        assert max(best.times) <= max(times[even])
        beaten += max(best.times) < max(times[even])
    assert beaten >= 30


def stage_times(costs, bounds, speeds):
    return [
        sum(c.forward for c in costs[bounds[s] : bounds[s + 1]]) / speed
        for s, speed in enumerate(speeds)
    ]


def test_messages_of_both_directions_break_ties():
    """The last stage is the slowest anyway; 3 s of work before it weigh less than two messages of 2 s."""
    costs = [
        LayerCost("a", 1.0, output_bytes=3),
        LayerCost("b", 6.0, output_bytes=1),
        LayerCost("c", 1.0, output_bytes=1),
        LayerCost("slow", 100.0),
    ]
    options = {"speeds": [1.0, 2.0, 1.0], "bandwidth": 1.0}
    assert partition(costs, 3, **options).bounds == (0, 2, 3, 4)
    assert partition(costs, 3, **options, schedule="forward_only").bounds == (0, 1, 3, 4)


def test_methods():
    costs = [LayerCost(f"l{i}", 1.0 + (i == 6), 0.0, 1 + 9 * (i == 0), 0, 0) for i in range(7)]
    uniform = partition(costs, 3, method="uniform")
    assert sorted(b - a for a, b in zip(uniform.bounds, uniform.bounds[1:], strict=False)) == [
        2,
        2,
        3,
    ]
    assert partition(costs, 2, method="parameters").bounds == (0, 1, 7)
    assert partition(costs, 2, method="profile").bounds == (0, 4, 7)
    fast = partition(costs, 2, method="uniform", speeds=[1.0, 6.0])
    assert fast.bounds == (0, 1, 7)


def test_work_grows_with_stages_times_layers_squared(monkeypatch):
    """A thousand layers: a fixed number of tables of layers^2 per stage, whatever is in them."""
    module = import_module("tp_kernels.pipeline.partition")  # the package exports the function
    made = []
    extend = module._extend
    monkeypatch.setattr(
        module,
        "_extend",
        lambda state, tables, *a: made.append(tables[0].size) or extend(state, tables, *a),
    )
    costs = [LayerCost(f"l{i}", 1.0 + i % 7, 2.0, 1, 1, 1) for i in range(1000)]
    plan = partition(costs, 8, speeds=[1, 2, 1, 1, 1, 2, 1, 3], bandwidth=5.0)
    assert len(plan.bounds) == 9
    assert sum(made) <= 3 * 8 * 1001**2


def test_predicted_step():
    """Times, transfers and the memory of activations reach the simulation."""
    costs = [LayerCost(f"l{i}", 1.0, 2.0, 0, 7, 10) for i in range(4)]
    plan = partition(costs, 2, micro_batches=3, bandwidth=20.0)
    # F0, transfer, F0 and B0 there, transfer, B0, F2, transfer, F2 and B2 there, transfer, B2
    assert plan.timeline.makespan == pytest.approx(2 + 0.5 + 6 + 0.5 + 4 + 2 + 0.5 + 6 + 0.5 + 4)
    assert plan.timeline.peak_memory(0) == 28 and plan.timeline.peak_memory(1) == 14
    alone = partition(costs, 2, micro_batches=1, bandwidth=20.0, overlap=False)
    assert alone.timeline.makespan == pytest.approx(12 + 0.5 + 0.5)
    inference = partition(costs, 2, micro_batches=3, schedule="forward_only")
    assert inference.timeline.makespan == pytest.approx(2 + 3 * 2)


def test_kept_activations():
    """Counted in the schedule's order, for every schedule."""
    assert in_flight("gpipe", 3, 5) == (5, 5, 5)
    assert in_flight("one_f_one_b", 3, 5) == (3, 2, 1)
    assert in_flight("forward_only", 2, 7) == (7, 7)
    assert in_flight("zero_bubble_h2", 3, 8)[0] == 5
    for name in SCHEDULES:
        if SCHEDULES[name](1, 1).stages == 1:
            assert len(in_flight(name, 4, 6)) == 4
        else:
            with pytest.raises(UnsupportedError, match=f"'{name}' puts 2 stages on each rank"):
                partition([LayerCost("l", 1.0)] * 8, 4, schedule=name)
    # Stage 0 keeps 4 micro-batches, and the weights that 4 of them have seen; stage 1 two.
    layers = [LayerCost("l", 1.0, 2.0, 100, 7)] * 4
    plans = [
        partition(layers, 4, schedule=name, micro_batches=6, optimizer_factor=1.0)
        for name in ("one_f_one_b", "pipedream")
    ]
    assert plans[0].memory == tuple(300 + 7 * k for k in (4, 3, 2, 1))
    assert plans[1].memory == tuple(300 + 100 * (k - 1) + 7 * k for k in (4, 3, 2, 1))
    with pytest.raises(UnsupportedError, match="schedule='magic'"):
        partition([LayerCost("l")], 1, schedule="magic")


def test_refusals():
    costs = [LayerCost(f"l{i}", 1.0, 2.0, 1 << 20, 1 << 20, 1 << 10) for i in range(6)]
    with pytest.raises(ShapeError, match="6 layers for 7 stages"):
        partition(costs, 7)
    with pytest.raises(ShapeError, match="speeds has 3 values for 2 stages"):
        partition(costs, 2, speeds=[1, 2, 3])
    with pytest.raises(ShapeError, match="positive"):
        partition(costs, 2, speeds=[1, 0])
    with pytest.raises(UnsupportedError, match="method='magic'"):
        partition(costs, 2, method="magic")
    with pytest.raises(UnsupportedError, match="at most 8"):
        partition([*costs, *costs], 9, reorder=True)
    with pytest.raises(UnsupportedError, match="links of other orders"):
        partition(costs, 3, bandwidth=[1.0, 2.0], reorder=True)
    for text in ("[]", '{"stages": []}', "\xff"):
        with pytest.raises(UnsupportedError, match="not a plan"):
            Plan.from_json(text)


def test_numbers():
    """What is no finite number is refused by name; other types of numbers are as good as Python's."""
    good = [LayerCost(f"l{i}", 1.0, 2.0, 10, 10, 10) for i in range(4)]
    nan, inf = float("nan"), float("inf")
    for field in ("forward", "backward", "parameter_bytes", "activation_bytes", "output_bytes"):
        for value in (nan, inf, -1, None):
            bad = [*good, replace(good[0], name="bad", **{field: value})]
            with pytest.raises(ShapeError, match=f"layer 'bad': {field}"):
                partition(bad, 2)
    for name, values in {
        "speeds": ([nan, 1], [1, inf], [1, -1], [None, 1]),
        "bandwidth": (nan, inf, -1.0, 0),
        "memory": (nan, -1, [inf, 3]),
        "latency": (-5.0, nan),
        "optimizer_factor": (-1, inf),
        "micro_batches": (0, 2.0),
    }.items():
        for value in values:
            with pytest.raises(ShapeError, match=f"{name}="):
                partition(good, 2, **{name: value})
    for stages in (0, 2.0):
        with pytest.raises(ShapeError, match="stages="):
            partition(good, stages)
    plan = partition(good, 2, memory=np.int64(10**9), speeds=np.array([1.0, 3.0]))
    assert plan.bounds == (0, 1, 4) and Plan.from_json(plan.to_json()) == plan
    assert partition([LayerCost("l", 1e300)] * 3, 2).bounds in ((0, 1, 3), (0, 2, 3))
    with pytest.raises(ShapeError, match="no cut takes a finite time"):
        partition([LayerCost("l", 1e300)] * 3, 2, speeds=1e-300)


def test_what_would_fit():
    """Every way out that the message names leads out."""
    mib = 1 << 20
    costs = [LayerCost(f"l{i}", 1.0, 2.0, 4 * mib, 8 * mib, mib) for i in range(6)]
    options = {"memory": [100 * mib, 60 * mib], "schedule": "gpipe", "micro_batches": 4}
    with pytest.raises(UnsupportedError) as refusal:
        partition(costs, 2, **options)
    text = str(refusal.value)
    assert "stage 1 on device 1 (l3 to l5, 4 micro-batches kept) needs 144 MiB of 60 MiB" in text, (
        text
    )
    assert "84 MiB are missing" in text and "checkpoint=True; micro_batches=1" in text, text
    assert partition(costs, 2, **(options | {"micro_batches": 1})).bounds
    plan = partition(costs, 2, **options, checkpoint=True)
    assert all(need <= limit for need, limit in zip(plan.memory, options["memory"], strict=True))
    assert "144 MiB on every device" in text, text
    assert partition(costs, 2, **(options | {"memory": 144 * mib})).memory == (144 * mib,) * 2
    with pytest.raises(UnsupportedError):
        partition(costs, 2, **(options | {"memory": 144 * mib - 1}))


def test_table():
    text = str(
        partition(
            [LayerCost(f"layer{i}", 1e-3, 2e-3, 1 << 20) for i in range(3)], 2, memory=1 << 30
        )
    )
    assert text.splitlines()[1].split()[:4] == ["stage", "device", "layers", "params"]
    # 4 micro-batches of 6 ms in the first stage, which waits 1 ms for its first backward
    assert "one_f_one_b, 4 micro-batches: a step takes 25 ms" in text, text
    assert "bubble 28.0% of the time (38.9% of the work)" in text, text
    assert "layer0..layer1" in text and "1 GiB" in text and "50%" in text, text
