"""The public ops with implementation="triton", interpreted: values, gradients, bits, refusals, failures."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.kernels.body import DTYPES
from tests.oracle import (
    HALVES,
    LAYOUTS,
    OPERATIONS,
    SEVERAL_WEIGHTS,
    Case,
    Tensors,
    call,
    check,
    compute,
    digest,
    shard,
)
from tp_kernels import (
    Choice,
    CollectiveTimeoutError,
    GroupMismatchError,
    ParallelGroup,
    PeerLostError,
    RankError,
    UnsupportedError,
    all_gather_linear,
    copy_linear,
    explain,
    linear_all_reduce,
    linear_all_reduce_rms_norm,
    linear_reduce_scatter,
)
from tp_kernels.ops import gather_rows, gemm_all_reduce
from tp_kernels.ops._workspace import GroupWorkspace

# Fewer than the ranks, none, some, a tile of the interpreter and its borders, several of them.
LEADING = ((0,), (1,), (2,), (17,), (34,), (4, 3), (2, 1), (1, 5), (5, 0), (1, 2, 3))
WIDTHS = (1, 5, 16, 17)


def cases(op: str, seed: int) -> Iterator[Case]:
    """Leading shapes and dtypes in turn, with other widths, layouts and biases each time."""
    random = Random(f"{op} {seed}")
    for index, leading in enumerate(LEADING if seed > 2 else LEADING[1::2]):
        n = random.choice((1, 2, 3)) if op in SEVERAL_WEIGHTS else 1
        yield Case(
            op,
            leading,
            random.choice(WIDTHS),
            tuple(random.choice(WIDTHS) for _ in range(n)),
            random.choice(((True,) * n, (False,) * n, (False, True, True)[-n:])),
            DTYPES[(seed + index) % len(DTYPES)],
            "triton",
            random.choice(LAYOUTS),
            random.choice(("keep", "redo")),
            random.choice(("", "", "", "x", "w", "b")),
            unused=n > 1 and random.random() < 0.2,
            seed=random.randrange(1 << 30),
        )


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("size", [2, 3])
def test_values_and_gradients(interpreted, size, op):
    given = list(cases(op, size))
    by_rank = interpreted(size).run(against_float64, given)
    for case, *digests in zip(given, *by_rank, strict=True):
        assert all(d == digests[0] for d in digests), f"{case}: ranks have different bits"


def against_float64(given: list[Case]) -> list[dict[str, str]]:
    digests = []
    with ParallelGroup(timeout=30) as group:
        for case in given:
            group.reset_stats()
            digests.append(check(case, compute(case, group, poisoned=True), group))
            check_path(case, group)
    return digests


def check_path(case: Case, group: ParallelGroup) -> None:
    """What communicated in `case` was "triton"."""
    calls = group.stats()["calls"]
    expected = {case.op: {"local" if case.op == "copy_linear" else "triton": 1}}
    communicates = {"linear_all_reduce": "", "linear_reduce_scatter": "xwb"}.get(case.op, "x")
    again = case.op == "all_gather_linear" and case.gathered == "redo" and "w" not in case.frozen
    backward = bool(set(communicates) - set(case.frozen)) + again
    if backward:
        expected[f"{case.op}.backward"] = {"triton": backward}
    calls.pop("barrier", None)  # after making the workspace
    assert calls == expected, (case, calls)


@pytest.mark.parametrize("size", [2, 3])
def test_bits_of_the_reference(interpreted, size):
    interpreted(size).run(compare_bits)


def compare_bits() -> None:
    """Whole numbers: products are exact in float32 in any order, but not in 16 bits, nor are the sums."""
    with ParallelGroup(timeout=30) as group:
        for op in OPERATIONS:
            for dtype in HALVES:
                case = Case(op, (5, 2), 23, (17,), dtype=dtype)
                args = shard(case, group.size, group.rank)
                args = Tensors(rounded(args.x), *map(all_rounded, (args.ws, args.bs, args.dys)))
                plain, triton = (
                    digests(replace(case, implementation=name), args, group)
                    for name in ("reference", "triton")
                )
                assert plain == triton, (case, group.rank)


def rounded(t: Tensor) -> Tensor:
    return (t.float() * 8).round().to(t.dtype)


def all_rounded(ts: list[Tensor]) -> list[Tensor]:
    return [rounded(t) for t in ts]


def digests(case: Case, args: Tensors, group: ParallelGroup) -> list[str]:
    """Of the output and all gradients."""
    args = args.leaves("")
    (y,) = call(case, args, group)
    y.backward(args.dys[0])
    return [digest(t) for t in (y, args.x.grad, args.ws[0].grad, args.bs[0].grad)]


def test_compiled_is_eager_to_the_bit(interpreted):
    for eager, compiled in interpreted(2).run(compile_and_compare):
        assert eager == compiled


def network(x: Tensor, weights: list[Tensor], bias: Tensor, group: ParallelGroup) -> Tensor:
    """All four ops."""
    gate, up, down, opening, closing = weights
    use: dict[str, Any] = {"group": group, "implementation": "triton"}
    a, b = all_gather_linear(x, [gate, up], rows=5, **use)
    h = linear_reduce_scatter(a * b, down, bias, **use)
    h = gather_rows(h, group=group, rows=5, gradient="reduce_scatter")
    return linear_all_reduce(copy_linear(h, opening, activation="silu", **use), closing, **use)


def compile_and_compare() -> list[str]:
    """Digests of the output and all gradients."""
    torch._dynamo.reset()
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    results = []
    with ParallelGroup(timeout=30) as group:
        for function in (network, compiled):
            generator = torch.Generator().manual_seed(group.rank)
            shapes = ((6, 4), (6, 4), (4, 6), (6, 4), (4, 6))
            leaves = [torch.randn(shape, generator=generator) for shape in shapes]
            leaves += [torch.ones(4), torch.randn(3 - group.rank, 4, generator=generator)]
            *weights, bias, x = (leaf.requires_grad_() for leaf in leaves)
            group.reset_stats()
            y = function(x, weights, bias, group)
            y.backward(torch.ones_like(y).cumsum(0))
            results.append(digest(y, *(leaf.grad for leaf in leaves)))
            calls = group.stats()["calls"]
            for op in OPERATIONS:
                assert calls[op] == {"local" if op == "copy_linear" else "triton": 1}
                if op != "linear_all_reduce":
                    assert calls[f"{op}.backward"] == {"triton": 1}
    return results


def test_inference_mode_then_training(interpreted):
    interpreted(2).run(infer_then_train)


def infer_then_train() -> None:
    """The workspace is made by the first op, here in inference mode."""
    case = Case("linear_reduce_scatter", (3,), 5, (4,), implementation="triton")
    with ParallelGroup(timeout=30) as group:
        args = shard(case, group.size, group.rank)
        with torch.inference_mode():
            (y,) = call(case, args, group)
        assert digest(compute(case, group)["y0"]) == digest(y)


def test_one_rank_does_something_else(interpreted):
    interpreted(3).run(disagree)


def disagree() -> None:
    """Kernels would not find out."""
    ops: dict[str, Callable[..., Any]] = {
        "op": lambda group, mine: (linear_all_reduce if mine else linear_reduce_scatter)(
            torch.ones(3, 4), torch.ones(2, 4), group=group, implementation="triton"
        ),
        "implementation": lambda group, mine: linear_all_reduce(
            torch.ones(3, 4),
            torch.ones(2, 4),
            group=group,
            implementation="host" if mine else "triton",
        ),
        "dtype": lambda group, mine: linear_all_reduce(
            *(torch.ones(2, 4, dtype=torch.float16 if mine else torch.float32) for _ in "xw"),
            group=group,
            implementation="triton",
        ),
        "rows": lambda group, mine: linear_all_reduce(
            torch.ones(3 + mine, 4), torch.ones(2, 4), group=group, implementation="triton"
        ),
        "features": lambda group, mine: linear_reduce_scatter(
            torch.ones(3, 4), torch.ones(2 + mine, 4), group=group, implementation="triton"
        ),
        "rows of each rank": lambda group, mine: linear_reduce_scatter(
            torch.ones((4, 3, 4) if mine else (2, 6, 4)),
            torch.ones(2, 4),
            group=group,
            implementation="triton",
        ),
        "hidden size": lambda group, mine: all_gather_linear(
            torch.ones(3, 4 + mine), torch.ones(2, 4 + mine), group=group, implementation="triton"
        ),
    }
    for what, op in ops.items():
        with ParallelGroup(timeout=20) as group:
            with pytest.raises(GroupMismatchError, match="different arguments") as caught:
                op(group, group.rank == 1)
            assert "kernel linear" in str(caught.value) or "kernel all_gather" in str(caught.value)
            assert "triton" not in group.workspaces, what


TIMEOUT = 1.0


@pytest.mark.parametrize("fault", ["raises", "late"])
def test_a_rank_that_does_not_come_to_its_kernel(interpreted, fault):
    """The others raise at the deadline; from then on everybody raises at once."""
    punctual, late = interpreted(2).run(miss_a_kernel, fault)
    error, text, seconds = punctual[0]
    assert error is CollectiveTimeoutError and TIMEOUT < seconds < TIMEOUT + 3
    assert text.startswith("copy_linear.backward: rank 0 of group 'tp_kernels:")
    assert "rank 0 waited for data of rank 1 (slot 'kernels cpu', channel 0, " in text
    if fault == "raises":
        assert late[0][0] is MemoryError
    for error, text, seconds in (punctual[1], late[1]):
        assert error is PeerLostError and seconds < TIMEOUT
        assert (
            text.startswith("linear_all_reduce: rank ") and "failed: copy_linear.backward" in text
        )


def miss_a_kernel(fault: str) -> list[tuple[type, str, float]]:
    def start_late(*args: Any, **options: Any) -> Tensor:
        if fault == "raises":
            raise MemoryError("none left")
        time.sleep(TIMEOUT + 1)
        return launch(*args, **options)

    def backward() -> None:
        patch = mock.patch.object(gemm_all_reduce, "launch", start_late)
        with patch if group.rank == 1 else nullcontext():
            y.sum().backward()

    def forward() -> None:
        linear_all_reduce(x, w, group=group, implementation="triton")

    launch, outcomes = gemm_all_reduce.launch, []
    x, w = torch.ones(3, 4, requires_grad=True), torch.ones(2, 4)
    with ParallelGroup(timeout=TIMEOUT) as group:
        forward()
        y = copy_linear(x, w, group=group, implementation="triton")
        for call in (backward, forward):
            start = time.monotonic()
            try:
                call()
            except Exception as error:
                outcomes.append((type(error), str(error), time.monotonic() - start))
            else:
                outcomes.append((type(None), "", 0.0))
    return outcomes


def test_a_rank_that_dies_in_its_kernel(interpreted):
    with pytest.raises(RankError) as caught:
        interpreted(3).run(die_in_a_kernel)
    for error in caught.value.outcomes[:2]:
        assert isinstance(error, PeerLostError), error
        assert " lost rank 2 (process ended): linear_all_reduce: rank " in str(error)


def die_in_a_kernel() -> None:
    def die(*args: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    x, w = torch.ones(3, 4), torch.ones(2, 4)
    with ParallelGroup(timeout=TIMEOUT) as group:
        linear_all_reduce(x, w, group=group, implementation="triton")
        patch = mock.patch.object(gemm_all_reduce, "launch", die)
        with patch if group.rank == 2 else nullcontext():
            linear_all_reduce(x, w, group=group, implementation="triton")


def test_check_reports_what_no_call_has(interpreted):
    interpreted(2).run(check_a_group)


def check_a_group() -> None:
    x, w = torch.ones(3, 4), torch.ones(2, 4)
    with ParallelGroup(timeout=TIMEOUT) as group:
        group.check()  # nothing has run
        linear_all_reduce(x, w, group=group, implementation="triton")
        group.check()
        workspace = group.workspaces["cpu"].workspace
        record = (2, group.rank, 6, 3, 0, 1 - group.rank, 5, 4)  # see RECORD in kernels/_signals.py
        workspace.record.copy_(torch.tensor(record, dtype=torch.int32))
        with pytest.raises(CollectiveTimeoutError, match=r"^check: rank .* data of rank"):
            group.check()
        with pytest.raises((CollectiveTimeoutError, PeerLostError)):
            linear_all_reduce(x, w, group=group, implementation="triton")


def test_launches_on_two_streams_follow_each_other():
    own = GroupWorkspace.__new__(GroupWorkspace)
    own._stream = None
    first, second = mock.Mock(), mock.Mock()
    with mock.patch.object(torch, "cuda") as cuda:
        for stream, capturing in ((first, False), (first, False), (second, True), (second, False)):
            cuda.current_stream.return_value = stream
            cuda.is_current_stream_capturing.return_value = capturing
            own._follow_stream()
    first.wait_event.assert_not_called()
    second.wait_event.assert_called_once_with(first.record_event.return_value)


def test_a_failure_on_a_gpu_is_heard_of_in_a_later_call():
    """A launch there waits for nothing: its record is copied behind it."""

    class Asynchronous:
        record = torch.zeros(8, dtype=torch.int32)

        def check(self) -> None:
            raise CollectiveTimeoutError("late")

    own = GroupWorkspace.__new__(GroupWorkspace)
    own.workspace, own._last_record = Asynchronous(), torch.zeros(8, dtype=torch.int32)
    own.kernels, own._follow_stream = mock.Mock(), mock.Mock()
    own.launch("linear_all_reduce")
    own.workspace.record[0] = 2
    own.launch("linear_all_reduce")
    with pytest.raises(CollectiveTimeoutError):
        own.launch("linear_all_reduce")
    assert own.kernels.linear_all_reduce.call_count == 2


def test_what_stands_in_the_way(interpreted):
    interpreted(2).run(force_the_impossible)


def force_the_impossible() -> None:
    plain = Case("linear_all_reduce", implementation="triton")
    with (
        ParallelGroup(timeout=30) as group,
        ParallelGroup(timeout=30, provider="none") as apart,
        ParallelGroup(timeout=30, implementation="triton") as forcing,
    ):
        for reason, case, on in (
            ("provider='none' was asked for", plain, apart),
            ("not torch.float64", replace(plain, dtype=torch.float64), group),
        ):
            with pytest.raises(UnsupportedError, match=f"rank {group.rank}: .*{reason}; use impl"):
                compute(case, on)
        assert explain_op(group).implementation == "host"
        assert explain_op(group).rejected["triton"] == (
            "CPU tensors run in Triton's interpreter, which is for tests"
        )
        assert (
            str(explain_op(group, implementation="triton"))
            == "linear_all_reduce: triton (asked for)"
        )
        assert str(explain_op(forcing)) == "linear_all_reduce: triton (asked for)"
        compute(replace(plain, implementation="auto"), forcing)
        x, w, ones = torch.ones(3, 4), torch.ones(2, 4), torch.ones(2)
        for on, more in ((forcing, {}), (group, {"implementation": "triton"})):
            on.reset_stats()
            _, total = linear_all_reduce_rms_norm(x, w, ones, group=on, **more)
            assert torch.equal(total, torch.full((3, 2), 8.0))
            assert on.stats()["calls"]["linear_all_reduce"] == {"triton": 1}


def explain_op(group: ParallelGroup, **options: Any) -> Choice:
    return explain(
        "linear_all_reduce", rows=4, in_features=6, out_features=5, group=group, **options
    )
