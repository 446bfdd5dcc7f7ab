"""Values between the stages of a pipeline: what arrives, in any order, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from tp_kernels import (
    GroupMismatchError,
    ParallelGroup,
    UnsupportedError,
)
from tp_kernels.comm import barrier
from tp_kernels.pipeline import PipelineCommunicator

from .host_streams import WAYS, OnDevices
from .test_message import same

PROVIDERS = ("host", "none")


@contextmanager
def pipeline(provider: str = "host", timeout: float = 30.0, **options: Any) -> Iterator[Any]:
    """provider: of a group; or a way of tensors on devices (host_streams.py)."""
    ways = {way: partial(OnDevices, way=way) for way in WAYS}
    with (
        ParallelGroup(provider="auto" if provider in ways else provider, timeout=timeout) as group,
        ways.get(provider, PipelineCommunicator)(group, **options) as made,
    ):
        yield made


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("size", [2, 3])
def test_there_and_back(world, size, provider):
    world(size).run(there_and_back, provider)


def there_and_back(provider: str) -> None:
    """Every micro-batch through all stages and back, received in another order than sent."""
    with pipeline(provider) as comm:
        stage, last = comm.rank, comm.stages - 1
        for mb in range(3):
            x = torch.full((mb + 1, 5), 1.0, requires_grad=True)
            if stage == 0:
                comm.send_forward({"x": x, "n": mb, "none": None}, micro_batch=mb)
        for mb in (2, 0, 1):
            if stage > 0:
                got = comm.recv_forward(micro_batch=mb)
                assert got["n"] == mb and got["none"] is None
                assert got["x"].requires_grad and got["x"].is_leaf and got["x"].shape == (mb + 1, 5)
                if stage < last:
                    comm.send_forward({**got, "x": got["x"] + 1}, micro_batch=mb)
                else:
                    assert got["x"].unique().tolist() == [1.0 + stage - 1]
                    comm.send_backward((got["x"].detach(), mb), micro_batch=mb)
        for mb in range(3):
            if stage < last:
                gradient, number = comm.recv_backward(micro_batch=mb)
                assert number == mb and not gradient.requires_grad
                if stage > 0:
                    comm.send_backward((gradient, number), micro_batch=mb)


def payloads() -> list[Any]:
    """Everything that may be sent; descriptions and tensors longer than cells, blocks and rings."""
    random = Random(5)
    x = torch.arange(24.0).view(2, 3, 4)
    found: list[Any] = [
        None, True, -(2**70), 1.5, "text", b"bytes", [], (), {}, {"a": {"b": (None, [1])}},
        x, x.t() if x.dim() < 3 else x.transpose(0, 2), x[:, 1:], x[:, :, ::2], x[0, 0].expand(5, 4),
        torch.tensor(3.0), torch.empty(0, 7), torch.empty(2, 0, requires_grad=True), torch.ones(1, 1),
        torch.zeros(3, dtype=torch.bool), torch.arange(5), torch.ones(3, dtype=torch.float64),
        torch.ones(4, 4, dtype=torch.bfloat16, requires_grad=True), torch.ones(2, dtype=torch.float16),
        torch.ones(3, dtype=torch.complex64), torch.tensor([1j]).conj(), torch.tensor([1j]).conj().imag,
        torch.ones(3).to(torch.float8_e4m3fn), torch.tensor([1, 2], dtype=torch.uint16),
        torch.ones(2, 2, requires_grad=True), torch.ones([1] * 9),
        (x, (x, {"again": x}), torch.empty(0)), "long " * 30_000, {i: torch.tensor(i) for i in range(200)},
        [torch.rand(100, 100), torch.rand(300), "tail"],
    ]  # fmt: skip
    # Shapes that grow and shrink, around the sizes of cells and rings.
    for size in (1, 4095, 8192, 8193, 100, 70_000, 0, 3):
        found.append(torch.rand(size, generator=torch.Generator().manual_seed(size)))
        found.append([torch.full((size,), random.randrange(100)), size])
    return found


@pytest.mark.parametrize("provider", PROVIDERS)
def test_payloads(world, provider):
    world(2).run(send_payloads, provider)


def send_payloads(provider: str) -> None:
    torch.manual_seed(0)
    values = payloads()
    with pipeline(provider, buffer_bytes=64 << 10) as comm:
        for index, value in enumerate(values):
            if comm.rank == 0:
                comm.send_forward(value, micro_batch=index)
                assert same(comm.recv_backward(micro_batch=index), value), index
            else:
                got = comm.recv_forward(micro_batch=index)
                assert same(got, value), index
                if isinstance(got, Tensor):
                    assert got.is_contiguous() and got.is_leaf
                comm.send_backward(got, micro_batch=index)
        if comm.rank == 1:  # the same object is one tensor
            a, (b, c) = comm.recv_from(0, tag="alias")
            assert a is b is c["again"]
        else:
            x = torch.ones(3)
            comm.send_to((x, (x, {"again": x})), 1, tag="alias")


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    ("size", "stage_to_rank"),
    [
        (2, (0, 1)), (2, (0, 1, 0, 1)), (2, (0, 1, 1, 0)), (2, (1, 1, 0)),
        (3, (0, 1, 2)), (3, (0, 1, 2, 0, 1, 2)), (4, (0, 2, 1, 3)),
    ],
)  # fmt: skip
def test_traffic(world, size, stage_to_rank, provider):
    """Random values between all stages at once, with and without a ring, and received in any order."""
    for ring in (False, True):
        world(size).run(random_traffic, provider, stage_to_rank, ring)


def random_traffic(provider: str, stage_to_rank: tuple[int, ...], ring: bool) -> None:
    shared = Random(3)
    stages, micro_batches = len(stage_to_rank), 8

    def value_of(stage: int, direction: str, mb: int) -> Any:
        size = Random(hash((stage, len(direction), mb))).choice((0, 3, 1000, 20_000))
        return (
            [torch.full((size,), float(mb)), stage, direction, mb]
            if mb % 2
            else torch.full((size,), 7.0 * stage)
        )

    with pipeline(provider, stage_to_rank=stage_to_rank, ring=ring, buffer_bytes=32 << 10) as comm:
        own = Random(comm.rank)
        # In every window all stages send first, then receive what was sent to them, in an order of their own.
        for window in range(0, micro_batches, 4):
            mbs = [shared.randrange(1000) * 8 + mb for mb in range(window, window + 4)]
            awaited = []
            for stage in comm.my_stages:
                for mb in mbs:
                    if ring or stage < stages - 1:
                        comm.send_forward(
                            value_of(stage, "forward", mb), micro_batch=mb, stage=stage
                        )
                    if ring or stage > 0:
                        comm.send_backward(
                            value_of(stage, "backward", mb), micro_batch=mb, stage=stage
                        )
                    if ring or stage > 0:
                        awaited.append((stage, "forward", mb))
                    if ring or stage < stages - 1:
                        awaited.append((stage, "backward", mb))
            own.shuffle(awaited)
            for stage, direction, mb in awaited:
                if own.random() < 0.2:
                    comm.progress()
                receive = comm.recv_forward if direction == "forward" else comm.recv_backward
                source = (stage - 1 if direction == "forward" else stage + 1) % stages
                assert same(receive(micro_batch=mb, stage=stage), value_of(source, direction, mb))
        assert all(lane["wait"] >= 0 for lane in comm.statistics.values())


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(("size", "ring"), [(2, False), (2, True), (3, True), (3, False)])
def test_all_send_first(world, size, ring, provider):
    """Messages much longer than the rings, in both directions at once, more of them than credits."""
    world(size).run(send_first, provider, ring)


def send_first(provider: str, ring: bool) -> None:
    count = 6
    with pipeline(provider, ring=ring, buffer_bytes=16 << 10, credits=2) as comm:
        stage, last = comm.rank, comm.stages - 1
        x = torch.full((30_000,), float(stage))
        ahead, behind = ring or stage < last, ring or stage > 0
        for mb in range(count):
            # Two are under way and two are queued: further sends wait, and take in messages meanwhile.
            if mb >= 4 and behind:
                assert comm.recv_forward(micro_batch=mb - 4)[0] == (stage - 1) % comm.stages
            if mb >= 4 and ahead:
                assert comm.recv_backward(micro_batch=mb - 4)[0] == (stage + 1) % comm.stages
            if ahead:
                comm.send_forward(x, micro_batch=mb)
            if behind:
                comm.send_backward(x, micro_batch=mb)
        for mb in range(count - 4, count):
            if behind:
                assert comm.recv_forward(micro_batch=mb)[-1] == (stage - 1) % comm.stages
            if ahead:
                assert comm.recv_backward(micro_batch=mb)[-1] == (stage + 1) % comm.stages


@pytest.mark.parametrize("provider", PROVIDERS)
def test_combined_calls(world, provider):
    world(2).run(combined, provider)


def combined(provider: str) -> None:
    with pipeline(provider, ring=True) as comm:
        x = torch.full((3,), float(comm.rank))
        calls = (
            comm.send_forward_recv_backward,
            comm.send_backward_recv_forward,
            comm.send_forward_recv_forward,
            comm.send_backward_recv_backward,
        )
        for call in calls[2:]:
            got = call(x, send_micro_batch=4 + comm.rank, recv_micro_batch=5 - comm.rank)
            assert got.tolist() == [1.0 - comm.rank] * 3
        first = calls[comm.rank]  # one sends forward where the other receives forward
        assert first(x, send_micro_batch=0, recv_micro_batch=0)[0] == 1 - comm.rank
        comm.post_forward(micro_batch=1)
        comm.post_backward(micro_batch=1)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_credits(world, provider):
    world(2).run(use_credits, provider)


def use_credits(provider: str) -> None:
    """The receiver holds at most `credits` messages, whatever the sender does, unless it asks for one behind
    them."""
    credits = 3
    with pipeline(provider, credits=credits) as comm:
        if comm.rank == 0:
            for mb in range(2 * credits):
                comm.send_forward(torch.tensor(float(mb)), micro_batch=mb)
        barrier(comm.group)
        box, give_up = comm._exchange.mailbox, time.monotonic() + 10
        while (
            comm.rank == 1 and sum(map(len, box.values())) < credits and time.monotonic() < give_up
        ):
            comm.progress()
        barrier(comm.group)
        for _ in range(100):
            comm.progress()
        assert sum(map(len, box.values())) == credits * comm.rank
        barrier(comm.group)
        if comm.rank == 1:
            comm.recv_forward(micro_batch=1)
            assert [comm.recv_forward(micro_batch=mb).item() for mb in (5, 4, 3, 2, 0)] == [
                5,
                4,
                3,
                2,
                0,
            ]
            assert all(comm.recv_forward(micro_batch=mb).item() == mb for mb in range(6, 40))
        else:
            lane = comm._lane(True, 0, 0)
            for mb in range(6, 40):
                comm.send_forward(torch.tensor(float(mb)), micro_batch=mb)
                assert len(lane.waiting) <= credits and lane.in_flight <= credits


@pytest.mark.parametrize("provider", PROVIDERS)
def test_credits_are_given_back_before_a_wait(world, provider):
    """Rank 1 waits for what rank 0 sends when its messages have left; one needs a credit of rank 1."""
    world(2).run(wait_with_credits, provider)


def wait_with_credits(provider: str) -> None:
    with pipeline(provider, credits=4, timeout=10) as comm:
        if comm.rank == 0:
            for mb in range(5):
                comm.send_forward(mb, micro_batch=mb)
            comm.flush()
            comm.send_to("go", 1, tag="go")
        else:
            assert comm.recv_forward(micro_batch=0) == 0
            assert comm.recv_from(0, tag="go") == "go"
            assert [comm.recv_forward(micro_batch=mb) for mb in range(1, 5)] == [1, 2, 3, 4]


def test_long_descriptions_are_not_kept(world):
    assert max(world(2).run(send_long_texts)) < 100_000


def send_long_texts() -> int:
    with pipeline() as comm:
        for mb in range(20):
            if comm.rank == 0:
                comm.send_forward([f"{mb}" * 100_000, torch.zeros(mb)], micro_batch=mb)
            else:
                assert comm.recv_forward(micro_batch=mb)[0] == f"{mb}" * 100_000
        return sum(map(len, comm._exchange._descriptions))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_same_micro_batch_again(world, provider):
    """In the next step micro-batch 0 is another one; both may be under way."""
    world(2).run(repeat, provider)


def repeat(provider: str) -> None:
    with pipeline(provider) as comm:
        if comm.rank == 0:
            for step in range(3):
                comm.send_forward(step, micro_batch=0)
            return
        box, give_up = comm._exchange.mailbox, time.monotonic() + 10
        while sum(map(len, box.values())) < 3 and time.monotonic() < give_up:
            comm.progress()
        assert [comm.recv_forward(micro_batch=0) for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_between_any_ranks(world, provider):
    world(4).run(to_all, provider)


def to_all(provider: str) -> None:
    """Several tags, taken in another order; ranks that are no neighbours; this rank itself."""
    with pipeline(provider) as comm:
        rank, size = comm.rank, comm.group.size
        for to in range(size):
            for number in range(6):
                comm.send_to(
                    {"from": rank, "x": torch.full((9000 * number,), rank)}, to, tag=f"{number}"
                )
        for number in (5, 0, 1, 4, 3, 2):
            for source in range(size):
                got = comm.recv_from(source, tag=f"{number}")
                assert got["from"] == source and got["x"].tolist() == [source] * 9000 * number
        for step in range(40):  # tags that never come again leave nothing behind
            comm.send_to(step, (rank + 1) % size, tag=f"step {step}")
            assert comm.recv_from((rank - 1) % size, tag=f"step {step}") == step
        comm.flush()
        barrier(comm.group)
        comm.progress()
        assert len(comm._exchange._named) <= 4
        barrier(comm.group)


def test_stages_of_one_rank(world):
    world(2).run(hand_over)


def hand_over() -> None:
    """No copy, detached; nobody to wait for."""
    with pipeline(stage_to_rank=(0, 0, 1)) as comm:
        if comm.rank == 1:
            assert comm.recv_forward(micro_batch=0).tolist() == [2, 2]
            return
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        comm.send_forward({"y": y, "n": 1}, micro_batch=0, stage=0)
        got = comm.recv_forward(micro_batch=0, stage=1)
        assert got["y"].data_ptr() == y.data_ptr() and got["y"].is_leaf and got["y"].requires_grad
        comm.send_forward(got["y"].detach(), micro_batch=0, stage=1)
        with pytest.raises(
            UnsupportedError, match=r"stage=None on rank 0, which has stages \[0, 1\]"
        ):
            comm.send_forward(y, micro_batch=1)
        comm.flush()


def test_one_process():
    with ParallelGroup() as group, PipelineCommunicator(group, stage_to_rank=(0, 0)) as comm:
        comm.send_forward(torch.ones(2), micro_batch=0, stage=0)
        comm.send_to(5, 0, tag="t")
        assert comm.recv_forward(micro_batch=0, stage=1).tolist() == [1, 1]
        assert comm.recv_from(0, tag="t") == 5
        comm.flush()
        comm.progress()
        assert "stages [0, 1] of 2 on rank 0 of 1: local" in repr(comm)
        text = (
            r"stage 1 on rank 0 waits for forward .*, which has not sent it and runs on this rank"
        )
        with pytest.raises(GroupMismatchError, match=text):
            comm.recv_forward(micro_batch=1, stage=1)


class Log:
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def record(self, *event: Any) -> None:
        self.events.append(event)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_is_recorded(world, provider):
    sender, receiver = world(2).run(record, provider)
    assert [event[:3] + event[5:] for event in sender] == [
        ("SEND_F", 0, 3, 400), ("WAIT_B", 0, 3), ("RECV_B", 0, 3, 8),
    ]  # fmt: skip
    assert [event[:3] + event[5:] for event in receiver] == [
        ("WAIT_F", 1, 3), ("RECV_F", 1, 3, 400), ("SEND_B", 1, 3, 8),
    ]  # fmt: skip
    assert all(event[3] <= event[4] for event in sender + receiver)


def record(provider: str) -> Any:
    log = Log()
    with pipeline(provider, recorder=log) as comm:
        barrier(comm.group)
        if comm.rank == 0:
            comm.send_forward(torch.ones(100), micro_batch=3)
            comm.recv_backward(micro_batch=3)
            name = "send forward from stage 0 on rank 0 to stage 1 on rank 1"
            assert comm.statistics[name] == {"messages": 1, "bytes": 400, "wait": 0.0}
            assert comm.seconds > 0 and comm.group.stats()["seconds"] >= comm.seconds
        else:
            comm.recv_forward(micro_batch=3)
            comm.send_backward((torch.ones(1, dtype=torch.float64), 1), micro_batch=3)
        how = (
            "process group (gloo), because provider='none'"
            if provider == "none"
            else "host (rings of 4 MiB"
        )
        assert how in comm.explain()
        return log.events


@pytest.mark.parametrize("nested", [False, True])
def test_large_memory_is_used_again(world, nested):
    world(2).run(large_messages, nested)


def large_messages(nested: bool) -> None:
    """Memory of a large tensor that is kept is its own, and one that nobody has any more is used again."""
    count = 100_001  # odd, and above what a C library maps
    with pipeline() as comm:
        if comm.rank == 0:
            for mb in range(12):
                x = torch.full((count, 3), mb % 128, dtype=torch.int8 if nested else torch.float32)
                comm.send_forward([x, mb] if nested else x, micro_batch=mb)
            comm.flush()
            return
        got = [comm.recv_forward(micro_batch=mb) for mb in range(4)]
        got = [value[0] if nested else value for value in got]
        places = {x.data_ptr() for x in got}
        assert len(places) == 4
        rows = got[0][:5]  # a view keeps the memory
        del got[0], got[1]
        seen = set()
        for mb in range(4, 12):
            value = comm.recv_forward(micro_batch=mb)
            x = value[0] if nested else value
            assert x.shape == (count, 3) and x.is_contiguous() and bool((x == mb).all())
            seen.add(x.data_ptr())
            del value, x
        assert rows.data_ptr() not in seen and bool((rows == 0).all())
        assert [int(x[-1, -1]) for x in got] == [1, 3]
        assert seen & places, "memory is used again"
        assert seen.isdisjoint({x.data_ptr() for x in got})
