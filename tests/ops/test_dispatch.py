"""What runs is what was asked for or explained, and what cannot run says why."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.oracle import OPERATIONS, Case, call, shard
from tp_kernels import Choice, ParallelGroup, UnsupportedError, dispatch, explain
from tp_kernels.comm.cuda_support import CudaSupport
from tp_kernels.comm.devices import DeviceIdentity
from tp_kernels.comm.triton_support import TritonSupport
from tp_kernels.dispatch import CHUNKED_MIN_ROWS, choose

FEATURES = {"in_features": 24, "out_features": 12}


def calls_of(case: Case, group: ParallelGroup) -> dict[str, dict[str, int]]:
    """What the group counted in a forward and backward of `case`."""
    group.reset_stats()
    args = shard(case, group.size, group.rank).leaves("")
    (y,) = call(case, args, group)
    y.sum().backward()
    return group.stats()["calls"]


def ran(case: Case, group: ParallelGroup) -> str:
    """The implementation that communicated in the forward, or for copy_linear in the backward."""
    name = case.op + (".backward" if case.op == "copy_linear" else "")
    ((implementation, count),) = calls_of(case, group)[name].items()
    assert count == 1
    return implementation


def test_what_was_explained_is_what_runs(world):
    outcomes = world(3).run(explain_and_run)
    assert all(outcome == outcomes[0] for outcome in outcomes)  # no rank decides for itself
    assert {name for name, _ in outcomes[0]} == {"reference", "chunked", "host"}


def explain_and_run() -> list[tuple[str, str]]:
    random, seen = Random(3), []
    providers = {"provider": "none"}, {"window": 512}, {}
    for options in providers:
        with ParallelGroup(timeout=30, **options) as group:
            for _ in range(20):
                case = Case(
                    random.choice(OPERATIONS),
                    (random.choice((1, 30, CHUNKED_MIN_ROWS - 1, CHUNKED_MIN_ROWS)),),
                    random.choice((5, 200)),
                    (random.choice((5, 200)),),
                    dtype=random.choice((torch.float32, torch.float64, torch.float16)),
                    implementation="auto",
                )
                choice = explain(
                    case.op,
                    rows=case.rows,
                    in_features=case.inner,
                    out_features=case.outs[0],
                    group=group,
                    dtype=case.dtype,
                )
                assert ran(case, group) == choice.implementation, case
                seen.append((choice.implementation, str(choice)))
    return seen


def test_forcing(world):
    world(2).run(force)


def force() -> None:
    """A call can force an implementation, and override what its group forces."""
    with (
        ParallelGroup(timeout=30) as group,
        ParallelGroup(timeout=30, implementation="chunked") as forcing,
    ):
        for op in OPERATIONS:
            for name in ("reference", "chunked", "host"):
                case = Case(op, implementation=name)
                assert ran(case, group) == ran(case, forcing) == name
            assert ran(Case(op, implementation="auto"), group) == "host"
            assert ran(Case(op, implementation="auto"), forcing) == "chunked"


def test_what_cannot_run_says_why(world):
    world(2).run(force_the_impossible)


def force_the_impossible() -> None:
    reasons = {
        "provider='none' was asked for": ({"provider": "none"}, {}),
        "not torch.float64": ({}, {"dtype": torch.float64}),
        r"ParallelGroup\(window=2400\)": ({"window": 1024}, {"inner": 300, "outs": (300,)}),
    }
    for reason, (options, sizes) in reasons.items():
        with ParallelGroup(timeout=30, **options) as group:
            for op in OPERATIONS:
                with pytest.raises(UnsupportedError, match=reason) as caught:
                    calls_of(Case(op, implementation="host", **sizes), group)
                assert f"rank {group.rank}" in str(caught.value)
                assert "implementation='auto'" in str(caught.value)
                assert ran(Case(op, implementation="auto", **sizes), group) == "reference"
    with ParallelGroup(window=2400, timeout=30) as group:  # the window that the message asked for
        assert ran(Case(OPERATIONS[0], inner=300, implementation="host"), group) == "host"


@pytest.mark.parametrize("size", [1, 2])
def test_an_unknown_implementation_is_refused(world, size):
    world(size).run(misspell)


def misspell() -> None:
    with ParallelGroup(timeout=30) as group:
        for op in OPERATIONS:
            with pytest.raises(
                UnsupportedError, match="known are reference, chunked, host, triton, cuda"
            ):
                call(Case(op, implementation="hots"), shard(Case(op), group.size, 0), group)
        assert not group.stats()["calls"]
        with pytest.raises(UnsupportedError, match="known are"):
            explain(OPERATIONS[0], rows=4, group=group, implementation="hots", **FEATURES)
    with pytest.raises(UnsupportedError, match="implementation='hots'"):
        ParallelGroup(implementation="hots")


def test_explain_texts(world):
    world(2).run(read_explanations)


def read_explanations() -> None:
    def text(group: ParallelGroup | None, rows: int = 4, **options: object) -> str:
        return str(explain("linear_all_reduce", rows=rows, group=group, **FEATURES, **options))

    with ParallelGroup(provider="none", timeout=30) as group:
        assert group.provider == "none"
        assert group.provider_reason == "provider='none' was asked for"
        assert "provider=none: provider='none' was asked for" in repr(group)
        assert text(group) == (
            "linear_all_reduce: reference (too small to overlap)\n"
            "  not triton: CPU tensors run in Triton's interpreter, which is for tests\n"
            "  not cuda: CPU tensors run in Triton's interpreter, which is for tests\n"
            "  not host: provider='none' was asked for\n"
            f"  not chunked: 4 rows < {CHUNKED_MIN_ROWS}: one collective is faster"
        )
        assert text(group, 1000).startswith("linear_all_reduce: chunked (1000 rows are worth")
        assert text(group, implementation="chunked") == "linear_all_reduce: chunked (asked for)"
    with ParallelGroup(timeout=30) as group:
        shared = "linear_all_reduce: host (all 2 ranks share this host; sums are taken "
        how = "on a thread during" if group.communication_thread else "after"
        assert text(group).startswith(f"{shared}{how} the product: ")
        assert "not cuda" in text(group, device="cuda")
        assert text(group, device="cuda:1") == text(group, device="cuda")
        assert text(group, device=torch.device("cpu")) == text(group)
    with ParallelGroup(provider="none", timeout=30, communication_thread=True) as group:
        assert not group.communication_thread
        assert group.overlap_reason == "provider='none' was asked for"
    with ParallelGroup(timeout=30, communication_thread=True) as group:
        assert text(group).startswith(f"{shared}on a thread during the product: communication_")
    with ParallelGroup(timeout=30, communication_thread=False) as group:
        assert text(group).startswith(f"{shared}after the product: communication_thread was given")
    with pytest.raises(UnsupportedError, match=r"communication_thread: \[False, True\]"):
        ParallelGroup(timeout=30, communication_thread=dist.get_rank() == 1)
    assert text(None).startswith(shared)


def test_explain_on_one_rank():
    choice = explain("copy_linear", rows=4, **FEATURES)
    assert choice.implementation == "reference"
    assert set(choice.rejected.values()) == {"one rank: nothing to communicate"}
    with pytest.raises(UnsupportedError, match="known ops are all_gather_linear"):
        explain("linear", rows=4, **FEATURES)


def test_decisions_do_not_pile_up():
    with ParallelGroup() as group:
        for rows in range(10_000):
            choose(OPERATIONS[0], group, rows=rows, width=1, dtype=torch.float32, device="cpu")
        assert len(group.decisions) <= 5000


def test_seconds_are_counted_and_reset(world):
    world(2).run(count_seconds)


def count_seconds() -> None:
    for provider in ("host", "none"):
        with ParallelGroup(provider=provider, timeout=30) as group:
            calls_of(Case(OPERATIONS[0], (100,), implementation="auto"), group)
            assert group.stats()["seconds"] > 0
            group.reset_stats()
            assert group.stats() == {"calls": {}, "seconds": 0.0}


def explain_linear(group: ParallelGroup, **options: Any) -> Choice:
    return explain("linear_all_reduce", rows=4, group=group, **FEATURES, **options)


def test_ranks_with_different_environments_refuse_together(world):
    """One rank alone must not decide that it can, or cannot: the others would wait for it."""
    reasons = world(2).run(differ, ["1", None])
    assert reasons[0] == reasons[1]
    assert "rank 1: CPU tensors need Triton's interpreter: set TRITON_INTERPRET=1" in reasons[0]


def differ(values: list[str | None]) -> str:
    with mock.patch.dict(os.environ):
        os.environ.pop("TRITON_INTERPRET", None)
        value = values[dist.get_rank()]
        if value is not None:
            os.environ["TRITON_INTERPRET"] = value
        group = ParallelGroup(timeout=30)
    with group:
        with pytest.raises(UnsupportedError) as caught:
            explain_linear(group, implementation="triton")
        return str(caught.value).replace(f"on rank {group.rank}", "")


def test_an_environment_that_changed_after_the_import(world):
    for error in world(2).run(change_environment):
        assert "rank 1: TRITON_INTERPRET has changed since tp_kernels.kernels was imported" in error


def change_environment() -> str:
    """Kernels of rank 1 are for GPUs by now; both ranks refuse."""
    if dist.get_rank() == 1:
        importlib.import_module("tp_kernels.kernels")
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"), ParallelGroup(timeout=30) as group:
        with pytest.raises(UnsupportedError) as caught:
            calls_of(Case("linear_all_reduce", implementation="triton"), group)
        return str(caught.value)


def test_cuda_tensors_go_to_kernels_first(world):
    world(2).run(choose_for_cuda)


def choose_for_cuda() -> None:
    """Where the ranks' devices and memory allow it, which is pretended here, as are GPUs that ran them."""
    with ParallelGroup(timeout=30) as group, mock.patch.object(dispatch, "TRITON_PROVEN", True):
        here = explain_linear(group, device="cuda")
        assert here.implementation == "reference" and "no CUDA device" in here.rejected["triton"]
        group.decisions.clear()
        group.triton_support = [TritonSupport(None, False, 90)] * 2
        assert explain_linear(group, device="cuda").rejected["triton"] == "rank 0: no CUDA device"
        for reachable, found in (
            ((), "ranks 0 and 1: no peer access from device b to a"),
            ("ab", None),
        ):
            group.decisions.clear()
            group.devices = [
                DeviceIdentity(index, uuid, tuple(reachable)) for index, uuid in enumerate("ab")
            ]
            choice = explain_linear(group, device="cuda")
            assert choice.rejected.get("triton") == found
        assert choice.implementation == "triton"
        assert set(choice.rejected) == {"host", "cuda", "chunked", "reference"}
        group.decisions.clear()
        with mock.patch.object(dispatch, "TRITON_PROVEN", False):
            choice = explain_linear(group, device="cuda")
            assert "never run on a GPU so far" in choice.rejected["triton"]
            asked = explain_linear(group, device="cuda", implementation="triton")
            assert (choice.implementation, asked.implementation) == ("reference", "triton")
        group.decisions.clear()
        wide = explain_linear(group, device="cuda", dtype=torch.float64)
        assert wide.implementation == "reference" and "float64" in wide.rejected["triton"]
        group.decisions.clear()
        with mock.patch.object(group, "size", 33):
            assert "33 ranks" in explain_linear(group, device="cuda").rejected["triton"]
        group.decisions.clear()
        group.triton_support[1] = TritonSupport(None, False, 80)
        with pytest.raises(UnsupportedError, match="one architecture; use implementation='auto'"):
            explain_linear(group, device="cuda", implementation="triton")


HOPPER = CudaSupport(None, 13000, ("sm_90a",), ("sm_90a",), 13000, 90)


def test_cuda_tensors_go_through_the_process_group_by_groups(world):
    world(2).run(choose_cuda)


def choose_cuda() -> None:
    """Where ranks do not reach each other's memory, once it is proven; GPUs are pretended here."""

    def explained(rows: int = 4096, device: str = "cuda", **options: Any) -> Choice:
        group.decisions.clear()
        given: dict[str, Any] = {"in_features": 64, "out_features": 512} | options
        return explain("linear_all_reduce", rows=rows, group=group, device=device, **given)

    with ParallelGroup(timeout=30, provider="none") as group:
        with pytest.raises(UnsupportedError, match="rank 0: CPU tensors need Triton's interpreter"):
            explained(device="cpu", implementation="cuda")
        group.triton_support = [TritonSupport(None, False, one) for one in (90, 80)]
        group.cuda_support = [CudaSupport("not built")] * 2
        choice = explained()
        assert choice.implementation == "chunked"
        assert "never run on a GPU so far: ask for it with implementation='cuda'" in str(choice)
        with (
            mock.patch.object(dispatch, "CUDA_PROVEN", True),
            mock.patch.object(dispatch, "TRITON_PROVEN", True),
        ):
            choice = explained()
            assert choice.implementation == "cuda"
            assert choice.reason.startswith("the process group sends ")
            assert (
                "rows; products by the Triton kernel (rank 0: _cuda is not built)" in choice.reason
            )
            assert choice.rejected["triton"].startswith("ranks 0 and 1: compute capabilities")
            assert set(choice.rejected) == {"triton", "host", "reference", "chunked"}
            few = explained(255)
            assert few.implementation == "reference"
            assert few.rejected["cuda"] == "255 rows < 256: one collective is faster"
            group.cuda_support = [HOPPER, replace(HOPPER, capability=100)]
            assert "(rank 1: compute capability 10.0; " in explained().reason
            group.cuda_support = [HOPPER] * 2
            assert (
                "rows; products by the Hopper kernels of _cuda, where they can; not to peers: "
                in explained().reason
            )
            wide = explained(dtype=torch.float64)
            assert wide.implementation == "chunked" and "float64" in wide.rejected["cuda"]


def test_what_does_not_go_straight_to_peers(world):
    world(2).run(explain_each)


def explain_each() -> None:
    """GPUs are pretended; `explain` says how "cuda" runs, and why not straight to the peers."""

    def reason(operation: str, **options: Any) -> str:
        group.decisions.clear()
        given: dict[str, Any] = {
            "rows": 4096,
            "in_features": 64,
            "out_features": 64,
            "dtype": torch.bfloat16,
        }
        given |= options
        return explain(operation, group=group, device="cuda", implementation="cuda", **given).reason

    straight = "kernels of _cuda write straight to the memory of the peers"
    with (
        ParallelGroup(timeout=30) as group,
        mock.patch.object(dispatch, "first_obstacle", return_value=None),
        mock.patch.object(dispatch, "rows_of_group", return_value=128),
    ):
        assert "not to peers: rank 0: _cuda is " in reason("linear_reduce_scatter") or (
            "not to peers: rank 0: no CUDA device" in reason("linear_reduce_scatter")
        )
        with mock.patch.object(dispatch, "_native_obstacle", return_value=None):
            for operation in dispatch.OPERATIONS:
                gathers = operation in dispatch.GATHERS
                assert ("copy engine brings" if gathers else straight) in reason(operation)
            assert "more than 1048576, is worth" in reason("linear_all_reduce", out_features=256)
            assert "not torch.float32" in reason("linear_reduce_scatter", dtype=torch.float32)
            assert straight in reason("linear_all_reduce", dtype=torch.float32)
            odd = reason("all_gather_linear", in_features=63)
            assert "63 elements do not all begin on 16 bytes" in odd
            assert "of staging memory" in reason("all_gather_linear", rows=1 << 20)
            with mock.patch.object(group, "size", 33):
                assert "33 ranks" in reason("linear_reduce_scatter")


def test_hopper_goes_first_where_it_can(world):
    world(2).run(choose_for_hopper)


def choose_for_hopper() -> None:
    """What runs unasked once all kernels are proven, of ranks that reach each other's memory."""
    proven = {"CUDA_PROVEN": True, "TRITON_PROVEN": True}
    with ParallelGroup(timeout=30) as group, mock.patch.multiple(dispatch, **proven):
        group.triton_support = [TritonSupport(None, False, 90)] * 2
        group.devices = [DeviceIdentity(index, uuid, ("a", "b")) for index, uuid in enumerate("ab")]
        for support, dtype, found in (
            (HOPPER, torch.bfloat16, "cuda"),
            (HOPPER, torch.float32, "triton"),
            (replace(HOPPER, capability=100), torch.bfloat16, "triton"),
        ):
            group.cuda_support = [support] * 2
            group.decisions.clear()
            choice = explain(
                "linear_reduce_scatter",
                rows=64,
                in_features=64,
                out_features=512,
                group=group,
                device="cuda",
                dtype=dtype,
            )
            assert choice.implementation == found, choice
            assert {"triton", "cuda", "host", "chunked", "reference"} - {found} == set(
                choice.rejected
            )
