"""Messages between two ranks: what arrives, in which order, and what is refused."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.oracle import digest, lay_out
from tp_kernels import (
    GroupMismatchError,
    P2PChannel,
    ParallelGroup,
    PeerLostError,
    ShapeError,
    TpKernelsError,
    UnsupportedError,
)
from tp_kernels.comm import Message, barrier

PROVIDERS = ("host", "none")
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.uint16),
    *(torch.bool, torch.complex64, torch.float8_e4m3fn),
)
SHAPES = ((), (1,), (7,), (3, 5), (0, 4), (40, 1), (2, 3, 50))
LAYOUTS = ("plain", "transposed", "offset", "strided")


@contextmanager
def channel(provider: str = "host", timeout: float = 30.0, **sizes: int) -> Iterator[P2PChannel]:
    with (
        ParallelGroup(provider=provider, timeout=timeout) as group,
        P2PChannel(group, **sizes) as made,
    ):
        assert made.provider == (provider if group.size > 1 else "none")
        yield made


def draw(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_tensors(world, size, provider):
    world(size).run(send_round, provider)


def send_round(provider: str) -> None:
    """Every rank to every other, sends before receives, in cells much smaller than most messages."""
    random = Random(7)
    with channel(provider, cells=3, cell_bytes=100) as p2p:
        rank, size = p2p.group.rank, p2p.group.size
        for index, (shape, dtype) in enumerate((s, d) for s in SHAPES for d in DTYPES):
            layouts = random.choice(LAYOUTS), random.choice(LAYOUTS)
            layouts = layouts if shape and dtype.is_floating_point else ("plain", "plain")
            for step in range(1, size):
                to, source = (rank + step) % size, (rank - step) % size
                x = lay_out(draw(rank * 10 + to, shape, dtype), layouts[0])
                sender = threading.Thread(target=p2p.send, args=(x, to, index))
                sender.start()
                expected = draw(source * 10 + rank, shape, dtype)
                out = lay_out(torch.full_like(expected, 1), layouts[1])
                assert p2p.recv(source, out, tag=index) is out
                plain = out.clone(memory_format=torch.contiguous_format)
                assert digest(plain) == digest(expected), (shape, dtype, layouts)
                sender.join()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_messages_of_several_tensors(world, provider):
    world(2).run(send_lists, provider)


def send_lists(provider: str) -> None:
    tensors = [draw(i, shape, DTYPES[i]) for i, shape in enumerate(SHAPES)]
    transposed = draw(9, (30, 20), torch.float32).t()
    description = b"what follows"
    with channel(provider, cells=2, cell_bytes=64) as p2p:
        if p2p.group.rank == 0:
            p2p.send(tensors, 1, tag=2**64 - 1)
            p2p.send([], 1)
            p2p.send(b"", 1)
            p2p.send([description, transposed, bytearray(b"ab"), memoryview(b"xcdx")[1:3]], 1)
            p2p.send(torch.tensor([1 + 2j, 3j]).conj(), 1)
            p2p.send(torch.ones(3, requires_grad=True), 1)
            return
        assert p2p.peek(0) == Message(2**64 - 1, sum(t.nbytes for t in tensors))
        received = p2p.recv(0, [torch.empty_like(t) for t in tensors], tag=2**64 - 1)
        assert list(map(digest, received)) == list(map(digest, tensors))
        assert p2p.recv(0).shape == (0,)
        assert p2p.recv(0, []) == []
        start = p2p.recv_part(0, torch.empty(len(description), dtype=torch.uint8))
        assert bytes(start.tolist()) == description
        assert p2p.peek(0).nbytes == transposed.nbytes + 4
        out = [torch.empty(20, 20), torch.empty(10, 20).t()]
        assert p2p.recv_part(0, out) is out  # of other shapes: the same bytes
        assert digest(torch.cat([t.reshape(-1) for t in out])) == digest(transposed.reshape(-1))
        assert bytes(p2p.recv(0).tolist()) == b"abcd"
        assert p2p.recv(0, torch.empty(2, dtype=torch.complex64)).tolist() == [1 - 2j, -3j]
        assert p2p.recv(0, torch.empty(3)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_large_messages_both_ways(world, provider):
    world(2).run(send_large, provider)


def send_large(provider: str) -> None:
    with channel(provider) as p2p:
        rank, peer = p2p.group.rank, 1 - p2p.group.rank
        for nbytes in (32 << 10, (512 << 10) - 1, 512 << 10, (512 << 10) + 1, 5_000_001):
            mine = draw(rank, (nbytes,), torch.uint8)

            def send(mine: Tensor = mine) -> None:
                p2p.send(mine, peer)
                mine.zero_()  # it is free again

            sender = threading.Thread(target=send)
            sender.start()
            assert digest(p2p.recv(peer)) == digest(draw(peer, (nbytes,), torch.uint8))
            sender.join()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_small_messages_are_sent_without_the_receiver(world, provider):
    """Both ranks send as much as their rings hold before either receives; memory may be reused."""
    world(2).run(send_first, provider)


def send_first(provider: str) -> None:
    with channel(provider, cells=4, cell_bytes=64) as p2p:
        peer, x = 1 - p2p.group.rank, torch.empty(20, dtype=torch.int16)
        for repeat in range(50):
            for message in range(4):
                p2p.send(x.fill_(4 * repeat + message), peer, tag=message)
            x.fill_(-1)
            for message in range(4):
                assert set(p2p.recv(peer, x, tag=message).tolist()) == {4 * repeat + message}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_back_to_back(world, provider):
    world(3).run(stream, provider)


def stream(provider: str) -> None:
    """Random sizes and pauses, whole or in parts, polled or waited for; two channels of one group."""
    own = Random()
    with (
        ParallelGroup(provider=provider, timeout=30) as group,
        P2PChannel(group, cells=3, cell_bytes=256) as a,
        P2PChannel(group) as b,
    ):
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size

        def messages(of: int) -> Iterator[tuple[P2PChannel, Tensor, int]]:
            shared = Random(of)
            for index in range(120):
                size = shared.choice((0, 1, 255, 256, 257, 768, 769, 5000))
                yield (
                    shared.choice((a, b)),
                    draw(index, (size,), torch.uint8),
                    shared.getrandbits(64),
                )

        def send() -> None:
            for p2p, data, tag in messages(group.rank):
                if own.random() < 0.1:
                    time.sleep(0.003 * own.random())
                p2p.send(data, right, tag)

        sender = threading.Thread(target=send)
        sender.start()
        for p2p, data, tag in messages(left):
            while own.random() < 0.5 and not p2p.poll(left):
                time.sleep(0)
            if own.random() < 0.5:
                assert p2p.peek(left, tag=tag) == (tag, data.numel())
            parts = []
            for _ in range(own.randrange(3) if data.numel() else 0):
                already = sum(map(len, parts))
                size = own.randrange(data.numel() - already)
                parts.append(p2p.recv_part(left, torch.empty(size, dtype=torch.uint8), tag=tag))
            parts.append(p2p.recv(left, tag=tag))
            assert digest(torch.cat(parts)) == digest(data)
        sender.join()
        barrier(group)
        assert not a.poll(left) and not b.poll(left)
        barrier(group)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_poll(world, provider):
    world(2).run(watch, provider)


def watch(provider: str) -> None:
    with channel(provider) as p2p:
        peer = 1 - p2p.group.rank
        start = time.monotonic()
        assert not p2p.poll(peer)
        assert time.monotonic() - start < 1.0, "poll waited"
        barrier(p2p.group)
        p2p.send(b"abc", peer)
        p2p.send(b"", peer)
        assert p2p.peek(peer).nbytes == 3 and p2p.poll(peer)
        for expected in (3, 0):
            deadline = time.monotonic() + 10
            while not p2p.poll(peer):
                assert time.monotonic() < deadline
            assert p2p.poll(peer) and p2p.recv(peer).numel() == expected
        assert not p2p.poll(peer)
        barrier(p2p.group)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_is_refused(world, provider):
    world(2).run(refuse, provider)


def refuse(provider: str) -> None:
    """Nothing is sent or lost by it, and the channel goes on."""
    tensor = torch.ones(4)
    with channel(provider) as p2p:
        rank, peer = p2p.group.rank, 1 - p2p.group.rank
        refused: dict[str, Callable[[], Any]] = {
            f"rank {rank} is not a peer of rank {rank} in a group of 2": lambda: p2p.send(
                b"", rank
            ),
            "rank 2 is not a peer": lambda: p2p.recv(2),
            "rank -1 is not a peer": lambda: p2p.poll(-1),
            "tag=-1": lambda: p2p.send(b"", peer, -1),
            "tag=18446744073709551616": lambda: p2p.send(b"", peer, 2**64),
            "send: a torch.strided tensor .* on meta": lambda: p2p.send(tensor.to("meta"), peer),
            "send: a torch.sparse_coo tensor": lambda: p2p.send(tensor.to_sparse(), peer),
            "send: str": lambda: p2p.send(["text"], peer),  # type: ignore[list-item]
            "recv: a torch.strided tensor .* on meta": lambda: p2p.recv(peer, tensor.to("meta")),
            "recv: bytes: receive into tensors": lambda: p2p.recv(peer, [b"x"]),  # type: ignore
        }
        for text, call in refused.items():
            with pytest.raises(UnsupportedError, match=text):
                call()
        with pytest.raises(ShapeError, match="share memory"):
            p2p.recv(peer, torch.ones(1).expand(4))
        barrier(p2p.group)
        assert not p2p.poll(peer)
        barrier(p2p.group)
        p2p.send([tensor, b"xy"], peer, tag=5)
        for wrong in ([tensor], [tensor, tensor], []):
            with pytest.raises(
                ShapeError, match=f"has 18 bytes left to read, not {16 * len(wrong)}"
            ):
                p2p.recv(peer, wrong)
        with pytest.raises(ShapeError, match=r"not 20 as asked for with \[\(5,\) torch.float32\]"):
            p2p.recv_part(peer, torch.ones(5))
        p2p.recv_part(peer, torch.ones(4))
        with pytest.raises(ShapeError, match="has 2 bytes left to read, not 4"):
            p2p.recv(peer, torch.ones(1))
        assert bytes(p2p.recv(peer, tag=5).tolist()) == b"xy"
        barrier(p2p.group)
        p2p.close()
        p2p.close()
        with pytest.raises(UnsupportedError, match="is closed"):
            p2p.send(b"", peer)
    for cells, cell_bytes in ((0, 64), (4, 0), (70_000, 64), (1, 1 << 41)):
        with ParallelGroup(timeout=30) as group, pytest.raises(UnsupportedError, match="use 1 to"):
            P2PChannel(group, cells=cells, cell_bytes=cell_bytes)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_tags(world, provider):
    _, error = world(2).run(mistake_tag, provider)
    text = "recv: rank 1 of group .*: rank 0 sent a message with tag 7 where tag 8 was expected"
    assert re.match(text, error)


def mistake_tag(provider: str) -> str:
    with channel(provider) as p2p:
        if p2p.group.rank == 0:
            p2p.send(b"x", 1, tag=7)
            time.sleep(0.3)  # it must not leave before the peer has looked
            p2p.leave()  # nobody receives this message, for which close() would wait in gloo
            return ""
        with pytest.raises(GroupMismatchError) as caught:
            p2p.recv(0, tag=8)
        with pytest.raises(PeerLostError, match=r"broken since GroupMismatchError: .*tag 7"):
            p2p.recv(0, tag=7)
        return str(caught.value)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_threads(world, provider):
    world(2).run(use_threads, provider)


def use_threads(provider: str) -> None:
    """One may receive while another sends, but not two receive or two send; nothing breaks by it."""
    with channel(provider, cells=1, cell_bytes=64) as p2p:
        peer, x = 1 - p2p.group.rank, torch.ones(300)
        received: list[Tensor] = []
        receiver = threading.Thread(target=lambda: received.append(p2p.recv(peer)))
        receiver.start()
        while not p2p._receiving[peer].locked():
            time.sleep(0.001)
        for call in (p2p.recv, p2p.poll, p2p.peek):
            with pytest.raises(RuntimeError, match="another thread") as caught:
                call(peer)
            assert not isinstance(caught.value, TpKernelsError)
        barrier(p2p.group)
        p2p.send(b"abc", peer)
        receiver.join()
        assert bytes(received[0].tolist()) == b"abc"
        barrier(p2p.group)
        sender = threading.Thread(target=p2p.send, args=(x, peer))
        sender.start()
        while not p2p._sending[peer].locked():
            time.sleep(0.001)
        if p2p.provider == "host":  # through gloo it may have been sent already
            with pytest.raises(RuntimeError, match="send: another thread"):
                p2p.send(b"abc", peer)
        barrier(p2p.group)
        assert p2p.recv(peer, torch.empty(300)).tolist() == [1.0] * 300
        sender.join()


def test_providers_and_counts(world):
    for host, none, full in world(2).run(describe):
        assert re.search(r"rank \d of 2, provider=host: all 2 ranks share this host", host)
        assert re.search(r"provider=none: provider='none' was asked for", none)
        assert re.search(r"provider=none: no shared segment: rank 0: .*does not fit", full)


def describe() -> list[str]:
    texts = []
    for provider, cells in (("host", 8), ("none", 8), ("host", 65536)):
        with ParallelGroup(provider=provider, timeout=30) as group:
            size = 64 << 10 if cells == 8 else 1 << 40
            p2p = P2PChannel(group, cells=cells, cell_bytes=size)
            texts.append(repr(p2p))
            peer = 1 - group.rank
            p2p.send(b"x", peer)
            assert p2p.recv(peer, torch.empty(1, dtype=torch.uint8)).item() == ord("x")
            implementation = "host" if p2p.provider == "host" else "process_group"
            calls = {name: group.stats()["calls"][name] for name in ("send", "recv")}
            assert calls == {"send": {implementation: 1}, "recv": {implementation: 1}}
            assert 0 < p2p.seconds <= group.stats()["seconds"]
            group.reset_stats()
            assert group.stats() == {"calls": {}, "seconds": 0.0}
            p2p.close()
    return texts


@pytest.mark.parametrize("provider", PROVIDERS)
def test_channels_do_not_meet(world, provider):
    """What is sent through one is not received through another, whatever the order."""
    world(2).run(cross, provider)


def cross(provider: str) -> None:
    with channel(provider) as a, P2PChannel(a.group) as b, channel(provider) as c:
        peer = 1 - a.group.rank
        for index, p2p in enumerate((a, b, c)):
            p2p.send(bytes([index]), peer)
        for index, p2p in ((2, c), (0, a), (1, b)):
            assert p2p.recv(peer).tolist() == [index]


def test_channels_that_differ(world):
    assert world(2).run(make_different) == [
        f"rank {rank} asks for a channel with {cells} cells of 64 bytes, rank {1 - rank} for "
        f"{9 - cells} cells of 64 bytes; every rank of the group must make the same channel"
        for rank, cells in ((0, 4), (1, 5))
    ]


def make_different() -> str:
    with ParallelGroup(timeout=30) as group:
        with pytest.raises(GroupMismatchError) as caught:
            P2PChannel(group, cells=4 + group.rank, cell_bytes=64)
        return str(caught.value)


def test_one_rank():
    text = "not a peer of rank 0 in a group of 1"
    with ParallelGroup() as group, P2PChannel(group) as p2p:
        assert p2p.provider_reason == "one rank without torch.distributed"
        for call in (p2p.recv, p2p.poll, lambda peer: p2p.send(b"x", peer)):
            with pytest.raises(UnsupportedError, match=text):
                call(0)


def test_subgroups(world):
    """Peers are numbered as in the group."""
    world(3).run(use_subgroup)


def use_subgroup() -> None:
    pair = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    for provider in PROVIDERS:
        with ParallelGroup(pair, provider=provider, timeout=30) as group, P2PChannel(group) as p2p:
            p2p.send(bytes([group.rank]), 1 - group.rank)
            assert p2p.recv(1 - group.rank).tolist() == [1 - group.rank]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_was_sent_before_a_close_is_received(world, provider):
    assert world(2).run(send_and_leave, provider) == [0, 300]


def send_and_leave(provider: str) -> int:
    with ParallelGroup(provider=provider, timeout=20) as group:
        with P2PChannel(group) as p2p:
            if group.rank == 0:
                p2p.send(torch.ones(200), 1)
                p2p.send(torch.ones(100), 1)
            else:
                time.sleep(0.3)
                total = p2p.recv(0, torch.empty(200)).sum() + p2p.recv(0, torch.empty(100)).sum()
        if provider == "none":
            assert not group.transport.abandoned, "the channel did not wait"
        return 0 if group.rank == 0 else int(total)
