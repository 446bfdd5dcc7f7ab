"""implementation="cuda", interpreted: one product, whose row groups the process group sends.

Values, gradients, bits, refusals, failures; and in which order a GPU is given its work.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.kernels.body import DTYPES
from tests.kernels.test_ops import all_rounded, cases, digests, rounded
from tests.oracle import (
    HALVES,
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
    CollectiveTimeoutError,
    GroupMismatchError,
    ParallelGroup,
    PeerLostError,
    RankError,
    Ranks,
    UnsupportedError,
    all_gather_linear,
    copy_linear,
    dispatch,
    explain,
    linear_all_reduce,
    linear_reduce_scatter,
)
from tp_kernels.comm.process_group import Pending, ProcessGroupTransport
from tp_kernels.comm.row_groups import RowGroups
from tp_kernels.ops import _signalled, all_gather_gemm
from tp_kernels.ops._signalled import Signals

# Of several groups of 16 rows, also for each of three ranks, divided three rows at a time; the last one has
# an odd number of elements.
SEVERAL_GROUPS = (23, 3)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors are full of NaN, so that what nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("size", "provider"), [(2, "none"), (2, "auto"), (3, "none")])
def test_values_and_gradients(interpreted, size, provider):
    given = [replace(case, implementation="cuda") for op in OPERATIONS for case in cases(op, size)]
    dtypes = DTYPES if provider == "none" else DTYPES[::-1]
    given += [several_groups(op, dtypes[index % 3]) for index, op in enumerate(OPERATIONS)]
    by_rank = interpreted(size).run(against_float64, given, provider)
    for case, *results in zip(given, *by_rank, strict=True):
        assert all(one == results[0] for one in results), f"{case}: ranks have different bits"


def several_groups(op: str, dtype: torch.dtype) -> Case:
    n = 2 if op in SEVERAL_WEIGHTS else 1
    return Case(op, SEVERAL_GROUPS, 9, (17, 5)[:n], (True,) * n, dtype, "cuda", gathered="redo")


def against_float64(given: list[Case], provider: str) -> list[dict[str, str]]:
    results = []
    with ParallelGroup(timeout=30, provider=provider) as group, poisoned_memory():
        for case in given:
            group.reset_stats()
            results.append(check(case, compute(case, group), group))
            check_path(case, group)
    return results


def check_path(case: Case, group: ParallelGroup) -> None:
    """What communicated in `case` was "cuda", and nothing but the process group."""
    calls = group.stats()["calls"]
    expected = {case.op: {"local" if case.op == "copy_linear" else "cuda": 1}}
    communicates = {"linear_all_reduce": "", "linear_reduce_scatter": "xwb"}.get(case.op, "x")
    if set(communicates) - set(case.frozen):
        expected[f"{case.op}.backward"] = {"cuda": 1}
    if case.op == "all_gather_linear" and case.gathered == "redo" and "w" not in case.frozen:
        expected["all_gather"] = {"process_group" if group.memory is None else "host": 1}
    assert calls == expected, (case, calls)


@pytest.mark.parametrize("size", [2, 3])
def test_bits_of_the_others(interpreted, size):
    interpreted(size).run(compare_bits)


def compare_bits() -> None:
    """Whole numbers: products are exact in float32 in any order, but not in 16 bits, nor are the sums."""
    with ParallelGroup(timeout=30) as group:
        for op in OPERATIONS:
            for dtype in HALVES:
                case = Case(op, SEVERAL_GROUPS, 23, (17,), dtype=dtype)
                args = shard(case, group.size, group.rank)
                args = Tensors(rounded(args.x), *map(all_rounded, (args.ws, args.bs, args.dys)))
                reference, chunked, cuda = (
                    digests(replace(case, implementation=name), args, group)
                    for name in ("reference", "chunked", "cuda")
                )
                assert reference == chunked == cuda, (case, group.rank)


def test_groups_are_sent_one_by_one(interpreted):
    interpreted(2).run(watch_collectives)


def watch_collectives() -> None:
    """As many collectives as there are groups, each of a group's rows, sums where they belong."""
    real, sent, gathered = ProcessGroupTransport.all_to_all, [], []
    real_gather = ProcessGroupTransport.all_gather

    def all_to_all(self: Any, x: Tensor, *sizes: Any) -> Pending:
        sent.append(list(x.shape))
        return real(self, x, *sizes)

    def all_gather(self: Any, x: Tensor, counts: list[int], out: Tensor | None = None) -> Pending:
        pending = real_gather(self, x, counts, out)
        gathered.append(out is not None and pending.wait().data_ptr() == out.data_ptr())
        return pending

    with (
        ParallelGroup(timeout=30) as group,
        mock.patch.object(ProcessGroupTransport, "all_to_all", all_to_all),
        mock.patch.object(ProcessGroupTransport, "all_gather", all_gather),
    ):
        x, w = torch.ones(35, 3), torch.ones(5, 3)
        linear_all_reduce(x, w, group=group, implementation="cuda")
        assert sent == [[2, 40], [2, 40], [2, 8]]  # elements of 16, 16 and 3 rows of 5
        assert gathered == [True, True, False]  # 15 elements are no two equal parts
        sent.clear()
        linear_reduce_scatter(x, w, group=group, implementation="cuda")
        assert sent == [[32, 5], [3, 5]]  # of 18 and 17 rows
        sent.clear(), gathered.clear()
        mine = x[: 18 - group.rank]
        all_gather_linear(mine, w, rows=35, group=group, implementation="cuda")
        assert not sent and len(gathered) == 2


def test_explanations(interpreted):
    interpreted(2).run(explain_on_cpu)


def text(group: ParallelGroup, **options: Any) -> str:
    given: dict[str, Any] = {"operation": "linear_all_reduce", "rows": 35, "group": group} | options
    return str(explain(in_features=6, out_features=4, **given))


def explain_on_cpu() -> None:
    with (
        ParallelGroup(timeout=30, implementation="cuda") as forcing,
        ParallelGroup(timeout=30) as group,
    ):
        engine = (
            "products by the Triton kernel (CPU tensors); not to peers: CPU tensors have no kernels"
        )
        how = "linear_all_reduce: cuda (asked for; the process group sends 3 groups of 16 rows; "
        assert text(forcing).startswith(how + engine)
        assert text(group, implementation="cuda") == text(forcing)
        assert text(forcing, operation="linear_reduce_scatter").startswith(
            "linear_reduce_scatter: cuda (asked for; the process group sends 2 groups of 16 rows; "
        )
        assert text(forcing, operation="all_gather_linear") == (
            "all_gather_linear: cuda (asked for; the process group gathers 2 groups of 16 rows, "
            "products follow it; not to peers: CPU tensors have no kernels in CUDA C++)"
        )
        assert explain_choice(group).rejected["cuda"] == (
            "CPU tensors run in Triton's interpreter, which is for tests"
        )
        assert explain_choice(group).implementation == "host"
        case = Case("linear_all_reduce", implementation="auto")
        compute(case, forcing)
        assert forcing.stats()["calls"]["linear_all_reduce"] == {"cuda": 1}
        for reason, given in (
            ("not torch.float64", replace(case, dtype=torch.float64)),
            ("use implementation='auto'", replace(case, dtype=torch.float64)),
        ):
            with pytest.raises(UnsupportedError, match=reason):
                compute(given, forcing)


def explain_choice(group: ParallelGroup, **options: Any) -> dispatch.Choice:
    given: dict[str, Any] = {"rows": 4096} | options
    return explain("linear_all_reduce", in_features=64, out_features=512, group=group, **given)


def test_one_rank_does_something_else(interpreted):
    interpreted(3).run(disagree)


def disagree() -> None:
    ops: dict[str, Callable[..., Any]] = {
        "op": lambda group, mine: (linear_all_reduce if mine else linear_reduce_scatter)(
            torch.ones(3, 4), torch.ones(2, 4), group=group, implementation="cuda"
        ),
        "implementation": lambda group, mine: linear_all_reduce(
            torch.ones(3, 4),
            torch.ones(2, 4),
            group=group,
            implementation="chunked" if mine else "cuda",
        ),
        "rows": lambda group, mine: linear_all_reduce(
            torch.ones(3 + mine, 4), torch.ones(2, 4), group=group, implementation="cuda"
        ),
        "rows of each rank": lambda group, mine: linear_reduce_scatter(
            torch.ones((4, 3, 4) if mine else (2, 6, 4)),
            torch.ones(2, 4),
            group=group,
            implementation="cuda",
        ),
    }
    for what, op in ops.items():
        with ParallelGroup(timeout=20, provider="none") as group:
            with pytest.raises(GroupMismatchError, match="different arguments"):
                op(group, group.rank == 1)
            assert not group.workspaces, what


def test_inference_mode_then_training(interpreted):
    interpreted(2).run(infer_then_train)


def infer_then_train() -> None:
    """What the group keeps is made by the first op, here in inference mode."""
    case = Case("linear_reduce_scatter", (35,), 5, (4,), implementation="cuda")
    with ParallelGroup(timeout=30) as group:
        args = shard(case, group.size, group.rank)
        with torch.inference_mode():
            (y,) = call(case, args, group)
        assert digest(compute(case, group)["y0"]) == digest(y)


TIMEOUT = 1.0


def test_a_product_that_does_not_finish():
    """The rank says for which group it waited; the others cannot go on, nor can anybody later.

    Not even with another group: the process group has lost its connections. So these ranks are their own.
    """
    with Ranks(2, env={"TRITON_INTERPRET": "1"}) as ranks:
        (late, late_again), (other, other_again) = ranks.run(miss_a_tile)
    error, message = late
    assert error is CollectiveTimeoutError and message.startswith("copy_linear.backward: rank 0 ")
    assert (
        "linear_all_reduce: rank 0 waited for group 1 of its product, of which 1 of 2 " in message
    )
    assert other[0] in (CollectiveTimeoutError, PeerLostError), other
    assert late_again[0] is CollectiveTimeoutError and "group 1 of its product" in late_again[1]
    assert other_again[0] in (type(None), CollectiveTimeoutError, PeerLostError)


def miss_a_tile() -> list[tuple[type, str]]:
    """On rank 0 a tile of group 1 is never counted."""
    real, outcomes = Signals.start, []

    def start(self: Signals, *args: Any) -> list[int]:
        tiles = real(self, *args)
        tiles[1] += 1
        return tiles

    x, w = torch.ones(20, 4, requires_grad=True), torch.ones(2, 4)
    with ParallelGroup(timeout=TIMEOUT, provider="none") as group:
        y = copy_linear(x, w, group=group, implementation="cuda")
        patch = mock.patch.object(Signals, "start", start)
        for step in (lambda: y.sum().backward(), group.check):
            with patch if group.rank == 0 else nullcontext():
                try:
                    step()
                except Exception as error:
                    outcomes.append((type(error), str(error)))
                else:
                    outcomes.append((type(None), ""))
    return outcomes


def test_a_rank_that_dies_between_groups(interpreted):
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        interpreted(3).run(die_between_groups)
    assert time.monotonic() - begin < TIMEOUT + 10
    for error in caught.value.outcomes[:2]:
        assert isinstance(error, PeerLostError), error
        assert " lost rank 2 (process ended)" in str(error)


def die_between_groups() -> None:
    real, sent = ProcessGroupTransport.all_to_all, []

    def all_to_all(self: Any, *args: Any) -> Pending:
        sent.append(None)
        if len(sent) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *args)

    x, w = torch.ones(50, 4), torch.ones(2, 4)
    with ParallelGroup(timeout=10 * TIMEOUT, provider="none") as group:
        patch = mock.patch.object(ProcessGroupTransport, "all_to_all", all_to_all)
        with patch if dist.get_rank() == 2 else nullcontext():
            linear_all_reduce(x, w, group=group, implementation="cuda")


class Gpu:
    """Streams and launches as a GPU would be given them."""

    def __init__(self) -> None:
        self.given: list[str] = []
        self.current = "first"

    def stream(self, name: str) -> mock.Mock:
        stream = mock.Mock()
        stream.wait_stream = lambda other: self.note(f"{name} after {other.label}")
        stream.label = name
        return stream

    def note(self, what: str) -> None:
        self.given.append(what if " after " in what else f"{what} on {self.current}")

    def on(self, stream: Any) -> Any:
        """As torch.cuda.stream: it can be entered again."""
        context = mock.MagicMock()
        before = self.current
        context.__enter__.side_effect = lambda *_: setattr(self, "current", stream.label)
        context.__exit__.side_effect = lambda *_: setattr(self, "current", before)
        return context

    def signals(self) -> Signals:
        """With two streams of this device, which note what they are given."""
        own = Signals.__new__(Signals)
        own._stream = self.stream("second")
        own._record = mock.Mock()
        own._last_record = mock.MagicMock()
        own._last_record.__getitem__.return_value = 0
        own._last_record.copy_.side_effect = lambda *_, **__: self.note("record")
        return own

    @contextmanager
    def instead(self, own: Signals, groups: RowGroups) -> Iterator[None]:
        with (
            mock.patch.object(torch, "cuda") as cuda,
            mock.patch.object(_signalled, "signals_of", return_value=own),
            mock.patch.object(_signalled, "groups_of", return_value=groups),
            mock.patch.object(all_gather_gemm, "signals_of", return_value=own),
            mock.patch.object(all_gather_gemm, "groups_of", return_value=groups),
        ):
            cuda.current_stream.side_effect = lambda: self.stream("first")
            cuda.stream.side_effect = self.on
            yield


@pytest.mark.parametrize("fails", [False, True])
def test_the_order_of_launches(fails):
    """The product first; beside it waits and what sends; after both, by events, whatever comes next."""
    gpu = Gpu()
    own = gpu.signals()
    own.start = lambda *_: gpu.note("product") or [7, 8]
    own.wait = lambda *args: gpu.note(f"wait for {args[3:]}")
    own.add = mock.Mock()

    def send(rows: Tensor, pieces: Any, add: Any) -> None:
        gpu.note(f"send {len(rows)} rows")
        if fails:
            raise RuntimeError("no network")

    x = torch.ones(20, 3)
    with (
        gpu.instead(own, RowGroups([20], 16)),
        pytest.raises(RuntimeError, match="no network") if fails else nullcontext(),
    ):
        _signalled.send_by_groups(
            mock.Mock(), "linear_all_reduce", [x], [x], [20], send, lambda: gpu.note("between")
        )
    begin = ["second after first", "product on first", "wait for (0, 7) on second"]
    rest = ["wait for (1, 8) on second", "send 4 rows on second", "between on first"]
    end = ["record on second", "first after second"]
    sent = ["send 16 rows on second"]
    assert gpu.given == begin + sent + ([] if fails else rest) + end


def test_the_order_of_launches_of_a_gather():
    """All collectives before the first product; rows are put in their places beside products."""
    gpu = Gpu()
    group = mock.Mock(rank=1)
    ones = torch.ones(40, 3)

    def all_gather(x: Tensor, sizes: list[int]) -> mock.Mock:
        gpu.note(f"gather {len(x)}")
        waited = mock.Mock(side_effect=lambda: gpu.note(f"place {sum(sizes)}") or ones)
        return mock.Mock(wait=waited)

    group.transport.all_gather = all_gather
    into = lambda rows, *_: gpu.note(f"product {len(rows)}")
    with (
        gpu.instead(gpu.signals(), RowGroups([18, 17], 16)),
        mock.patch.object(all_gather_gemm, "_rows_into", into),
    ):
        _, gathered = all_gather_gemm.cuda(group, ones[:17], [ones], [], [18, 17], True)
    assert gathered.shape == (35, 3) and bool((gathered == 1).all())
    assert gpu.given == [
        "second after first",
        *("gather 16 on second", "gather 1 on second", "product 17 on first"),
        *("place 32 on second", "first after second", "product 16 on first"),
        *("place 3 on second", "first after second", "product 2 on first"),
        *("record on second", "first after second"),
    ]


@pytest.mark.parametrize(("cuda", "host_waits"), [(True, False), (True, True), (False, False)])
def test_a_stream_waits_for_a_collective_of_cuda_tensors(cuda, host_waits):
    """With a deadline, NCCL would make this thread wait; gloo does anyway, so it needs one."""
    work, deadline = mock.Mock(), object()
    transport = mock.Mock(deadline=deadline, seconds=0.0, host_waits=host_waits)
    Pending(transport, work, mock.Mock(is_cuda=cuda)).wait()
    work.wait.assert_called_once_with(*([] if cuda and not host_waits else [deadline]))


def test_a_failure_on_a_gpu_is_heard_of_in_a_later_call():
    """A launch there waits for nothing: its record is copied behind it."""
    own = Signals.__new__(Signals)
    own._last_record = torch.zeros(8, dtype=torch.int32)
    own._stream = None
    with mock.patch.object(Signals, "check", side_effect=CollectiveTimeoutError("late")):
        with own.forked():
            own._last_record[0] = 2
        with pytest.raises(CollectiveTimeoutError), own.forked():
            raise AssertionError("work was given to a group that is lost")


def test_the_first_call_cannot_be_captured():
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        pytest.raises(UnsupportedError, match=r"rank 3: .* call it once before"),
    ):
        Signals(mock.Mock(rank=3), mock.Mock(is_cuda=True))


def test_hopper_kernels_where_they_can():
    """Pairs that they take; the tiles are theirs."""
    own = Signals.__new__(Signals)
    own._product = mock.Mock()
    own._product.tiling_of.return_value = mock.Mock(block_m=16, block_n=16)
    hopper = mock.Mock()
    hopper.signalled_tile.return_value = (32, 8)
    groups, x, w = RowGroups([40], 32), torch.ones(40, 3), torch.ones(16, 3)
    for available, pairs, problem, expected in (
        (True, 1, None, [2, 2]),
        (True, 2, None, [2, 2]),
        (True, 1, "strides", [2, 1]),
        (False, 1, None, [2, 1]),
    ):
        hopper.reset_mock()
        own._product.linear_signalled.reset_mock()
        own._hopper = hopper if available else None
        hopper.signalled_obstacle.return_value = problem
        buffer, counters = torch.empty(40, 16), torch.empty(2)
        assert own.start([x] * pairs, [w] * pairs, groups, buffer, counters) == expected
        options = {"reserved": _signalled.RESERVED}
        if expected == [2, 2]:
            hopper.signalled_linear.assert_called_once_with(
                [x] * pairs, [w] * pairs, groups, buffer, counters, **options
            )
            own._product.linear_signalled.assert_not_called()
        else:
            hopper.signalled_linear.assert_not_called()
            own._product.linear_signalled.assert_called_once()
