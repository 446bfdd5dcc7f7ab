"""The raw module tp_kernels._host: segments, rounds, collectives, and what follows a lost rank.

Ranks are threads where that will do, and forked processes where a process has to die.
"""

from __future__ import annotations

import errno
import gc
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tp_kernels import _host

SHM = Path("/dev/shm")
FLOAT32, BFLOAT16, FLOAT16, UINT8, INT64 = range(5)
TIMEOUT = 30.0


@pytest.fixture
def name() -> Iterator[str]:
    name = f"/tpk-pytest-{secrets.token_hex(6)}"
    yield name
    assert not (SHM / name[1:]).exists(), "a test left its segment behind"


def make_segment(name: str, shape: tuple[int, int, int, int], epoch: int = 0):
    segment = _host.Segment.create(name, _host.layout_bytes(*shape))
    segment.unlink()
    _host.Domain.format(segment, *shape, epoch=epoch)
    return segment


class Ranks:
    """Ranks as threads over one segment whose buffers start as NaN."""

    def __init__(self, name: str, world: int, capacity: int = 4096, buffers: int = 3) -> None:
        shape = (world, 1, capacity, buffers)
        self.segment = _host.Segment.create(name, _host.layout_bytes(*shape))
        self.segment.unlink()
        np.frombuffer(self.segment, np.uint8)[:] = 0xFF
        _host.Domain.format(self.segment, *shape, epoch=2**32 - 3)
        self.domains = [_host.Domain(self.segment, r, *shape, TIMEOUT) for r in range(world)]
        for domain in self.domains:
            domain.join()
        for domain in self.domains:
            domain.open_peers(TIMEOUT)
        self.slots = [_host.Slot(domain, 0) for domain in self.domains]

    def run(self, call: Callable[[int, object], None]) -> None:
        failures: list[BaseException] = []

        def target(rank: int) -> None:
            try:
                call(rank, self.slots[rank])
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=target, args=(r,)) for r in range(len(self.slots))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def view(self, rank: int, index: int, count: int, dtype: type) -> np.ndarray:
        offset = self.slots[0].buffer_address(rank, index) - self.segment.address
        return np.frombuffer(self.segment, dtype, count, offset)


class TestSegment:
    def test_mode_size_and_unlink(self, name: str) -> None:
        old = os.umask(0o277)  # must not matter
        try:
            segment = _host.Segment.create(name, 10_000)
        finally:
            os.umask(old)
        status = (SHM / name[1:]).stat()
        assert status.st_mode & 0o7777 == 0o600
        assert status.st_size == segment.size == 10_000
        assert status.st_blocks * 512 >= 10_000  # reserved, not only promised
        other = _host.Segment.open(name, 10_000)
        segment.unlink()
        assert not (SHM / name[1:]).exists()
        segment.unlink()
        memoryview(segment)[5] = 7
        assert memoryview(other)[5] == 7

    def test_too_large(self, name: str) -> None:
        free = os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize
        asked = free + 2**40
        with pytest.raises(OSError, match=r"/dev/shm") as caught:
            _host.Segment.create(name, asked)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(SHM / name[1:])
        assert str(asked) in str(caught.value) and "bytes are free" in str(caught.value)
        assert not (SHM / name[1:]).exists()

    def test_exists(self, name: str) -> None:
        segment = _host.Segment.create(name, 100)
        with pytest.raises(FileExistsError):
            _host.Segment.create(name, 100)
        assert (SHM / name[1:]).exists()
        segment.unlink()

    def test_open_refuses(self, name: str) -> None:
        with pytest.raises(FileNotFoundError):
            _host.Segment.open(name, 100)
        segment = _host.Segment.create(name, 100)
        with pytest.raises(OSError, match="has 100 bytes, not 101"):
            _host.Segment.open(name, 101)
        (SHM / name[1:]).chmod(0o644)
        with pytest.raises(PermissionError, match="0600"):
            _host.Segment.open(name, 100)
        segment.unlink()

    @pytest.mark.parametrize("bad", ["", "x", "/", "/a/b", "/" + "x" * 300])
    def test_bad_name(self, bad: str) -> None:
        with pytest.raises(ValueError, match="name"):
            _host.Segment.create(bad, 100)

    def test_views_outlive_close(self, name: str) -> None:
        segment = _host.Segment.create(name, 4096)
        segment.unlink()
        view, array = memoryview(segment), np.frombuffer(segment, np.uint8)
        assert not view.readonly and view.nbytes == 4096
        segment.close()
        segment.close()
        with pytest.raises(ValueError, match="closed"):
            _ = segment.address
        del segment
        gc.collect()
        view[0] = 3
        assert array[0] == 3

    def test_collected_without_unlink(self, name: str) -> None:
        segment = _host.Segment.create(name, 100)
        del segment
        gc.collect()
        assert not (SHM / name[1:]).exists()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
class TestCollectives:
    def test_all_reduce(self, name: str, world: int) -> None:
        ranks = Ranks(name, world, capacity=1024)
        for count in (0, 1, 255, 256, 257, 5000):
            inputs = [np.arange(count, dtype=np.float32) * (r + 1) for r in range(world)]
            outputs = [np.full(count, np.nan, np.float32) for _ in range(world)]

            def call(rank, slot, inputs=inputs, outputs=outputs, count=count):
                data, out = inputs[rank].ctypes.data, outputs[rank].ctypes.data
                slot.all_reduce(data, out, count, FLOAT32, 2, TIMEOUT)

            ranks.run(call)
            for output in outputs:
                np.testing.assert_array_equal(output, np.sum(inputs, axis=0, dtype=np.float32))

    def test_reduce_scatter(self, name: str, world: int) -> None:
        ranks = Ranks(name, world, capacity=1024)
        counts = [(0, 700, 1, 33)[r] for r in range(world)]
        inputs = [np.arange(sum(counts), dtype=np.float16) + r for r in range(world)]
        outputs = [np.full(count, np.nan, np.float16) for count in counts]

        def call(rank, slot):
            data, out = inputs[rank].ctypes.data, outputs[rank].ctypes.data
            slot.reduce_scatter(data, out, counts, FLOAT16, 3, TIMEOUT)

        ranks.run(call)
        total = np.sum([x.astype(np.float32) for x in inputs], axis=0).astype(np.float16)
        np.testing.assert_array_equal(np.concatenate(outputs), total)

    @pytest.mark.parametrize("code", [UINT8, INT64, FLOAT32])
    def test_all_gather(self, name: str, world: int, code: int) -> None:
        dtype = {UINT8: np.uint8, INT64: np.int64, FLOAT32: np.float32}[code]
        ranks = Ranks(name, world, capacity=1024)
        counts = [(5000, 0, 1, 1024)[r] for r in range(world)]
        inputs = [np.arange(counts[r]).astype(dtype) + dtype(r) for r in range(world)]
        outputs = [np.full(sum(counts), 255, dtype) for _ in range(world)]

        def call(rank, slot):
            data, out = inputs[rank].ctypes.data, outputs[rank].ctypes.data
            slot.all_gather(data, out, counts, code, 4, TIMEOUT)

        ranks.run(call)
        for output in outputs:
            np.testing.assert_array_equal(output, np.concatenate(inputs))

    def test_rounds(self, name: str, world: int) -> None:
        ranks = Ranks(name, world)
        bias = np.array([0.5, 0.25, 0.125], np.float32)
        outputs = [np.full(12, np.nan, np.float32) for _ in range(world)]
        partial = [np.full(5, np.nan, np.float32) for _ in range(world)]

        def call(rank, slot):
            for _ in range(7):
                index = slot.begin(TIMEOUT)
                ranks.view(rank, index, 12, np.float32)[:] = np.arange(12) * (rank + 1)
                slot.publish(16, FLOAT32, 3, 4, 0)
                for peer in range(world):
                    slot.wait(peer, TIMEOUT)
                assert slot.round_buffer() == index
                out = partial[rank].ctypes.data
                slot.reduce(out, 4, 5, FLOAT32, bias.ctypes.data, 3, TIMEOUT)
                out = outputs[rank].ctypes.data
                slot.reduce_all(out, 12, FLOAT32, bias.ctypes.data, 3, TIMEOUT)
                slot.finish()
            slot.barrier(TIMEOUT)

        ranks.run(call)
        expected = np.arange(12) * (world * (world + 1) / 2) + np.tile(bias, 4)
        for rank in range(world):
            np.testing.assert_array_equal(outputs[rank], expected.astype(np.float32))
            np.testing.assert_array_equal(partial[rank], expected[4:9].astype(np.float32))


class TestArguments:
    def test_refused(self, name: str) -> None:
        (slot,) = Ranks(name, 1, capacity=64).slots
        data = np.zeros(4, np.float32)
        address = data.ctypes.data
        with pytest.raises(ValueError, match="dtype"):
            slot.all_reduce(address, address, 4, INT64, 2, TIMEOUT)
        with pytest.raises(ValueError, match="dtype code 9"):
            slot.all_gather(address, address, [4], 9, 4, TIMEOUT)
        with pytest.raises(ValueError, match="null"):
            slot.all_reduce(0, address, 4, FLOAT32, 2, TIMEOUT)
        with pytest.raises(ValueError, match="2 counts for 1 ranks"):
            slot.all_gather(address, address, [2, 2], UINT8, 4, TIMEOUT)
        with pytest.raises(ValueError, match="timeout"):
            slot.begin(float("nan"))
        with pytest.raises(ValueError, match="no buffer 3 of rank 0"):
            slot.buffer_address(0, 3)
        with pytest.raises(RuntimeError, match="no round is published"):
            slot.finish()
        slot.all_reduce(address, address, 4, FLOAT32, 2, TIMEOUT)  # none of these broke the slot

    def test_domain(self, name: str) -> None:
        shape = (2, 1, 64, 2)
        segment = make_segment(name, shape)
        with pytest.raises(ValueError, match="rank 2"):
            _host.Domain(segment, 2, *shape, TIMEOUT)
        with pytest.raises(ValueError, match="capacity"):
            _host.Domain(segment, 0, 2, 1, 8, 2, TIMEOUT)
        with pytest.raises(ValueError, match="need"):
            _host.Domain(segment, 0, 3, 1, 64, 2, TIMEOUT)
        domain = _host.Domain(segment, 0, *shape, TIMEOUT)
        slot = _host.Slot(domain, 0)
        with pytest.raises(RuntimeError, match="already in use"):
            _host.Slot(domain, 0)
        with pytest.raises(ValueError, match="slot 1"):
            _host.Slot(domain, 1)
        with pytest.raises(RuntimeError, match="not joined"):
            slot.begin(TIMEOUT)
        domain.join()
        with pytest.raises(RuntimeError, match="open_peers"):
            slot.begin(TIMEOUT)
        with pytest.raises(RuntimeError, match="joined this group before"):
            domain.join()
        with pytest.raises(_host.Fault, match="rank 1 did not join") as caught:
            domain.open_peers(0.05)
        assert (caught.value.kind, caught.value.peer) == ("timeout", 1)

    def test_unformatted(self, name: str) -> None:
        shape = (1, 1, 64, 2)
        segment = _host.Segment.create(name, _host.layout_bytes(*shape))
        segment.unlink()
        with pytest.raises(ValueError, match="formatted"):
            _host.Domain(segment, 0, *shape, TIMEOUT)

    @pytest.mark.parametrize("shape", [(0, 1, 64, 1), (2, 1, 1 << 50, 1), (2, 1, 64, 0)])
    def test_layout(self, shape: tuple[int, int, int, int]) -> None:
        with pytest.raises(ValueError, match="not in the supported range"):
            _host.layout_bytes(*shape)

    def test_layout_is_64_bit(self) -> None:
        assert _host.layout_bytes(8, 2, 3 << 30, 3) > 8 * 2 * 3 * (3 << 30)


class TestFaults:
    def test_timeout_then_same_again(self, name: str) -> None:
        ranks = Ranks(name, 2)
        start = time.monotonic()
        with pytest.raises(_host.Fault, match="rank 1 did not publish") as first:
            ranks.slots[0].barrier(0.2)
        assert 0.2 <= time.monotonic() - start < 5
        fault = first.value
        assert isinstance(fault, RuntimeError)
        assert (fault.kind, fault.peer, fault.slot, fault.op) == ("timeout", 1, 0, "barrier")
        assert (fault.expected, fault.seen) == (2**32 - 2, 2**32 - 3)
        with pytest.raises(_host.Fault) as again:
            ranks.slots[0].begin(TIMEOUT)
        assert str(again.value) == str(fault)

    def test_mismatch(self, name: str) -> None:
        ranks = Ranks(name, 2)
        faults = {}

        def call(rank, slot):
            data = np.zeros(8, np.float32)
            try:
                slot.all_reduce(data.ctypes.data, data.ctypes.data, 8 - rank, FLOAT32, 2, TIMEOUT)
            except _host.Fault as fault:
                faults[rank] = fault

        ranks.run(call)
        assert [faults[r].kind for r in (0, 1)] == ["mismatch"] * 2
        assert [faults[r].peer for r in (0, 1)] == [1, 0]
        assert "op 2 dtype 0 d (8, 0, 0)" in faults[1].detail
        assert "op 2 dtype 0 d (7, 0, 0)" in faults[1].detail

    def test_failed_peer(self, name: str) -> None:
        ranks = Ranks(name, 2)
        ranks.domains[1].fail("x" * 500)
        ranks.domains[1].close()  # the first word counts
        with pytest.raises(_host.Fault, match=r"rank 1 failed: x{191}$") as caught:
            ranks.slots[0].barrier(TIMEOUT)
        assert (caught.value.kind, caught.value.peer) == ("peer_lost", 1)
        with pytest.raises(_host.Fault, match="this rank has failed") as caught:
            ranks.slots[1].barrier(TIMEOUT)
        assert caught.value.kind == "closed"

    def test_closed_peer(self, name: str) -> None:
        ranks = Ranks(name, 2)
        ranks.domains[1].close()
        ranks.domains[1].close()
        with pytest.raises(_host.Fault, match="rank 1 closed the group") as caught:
            ranks.slots[0].barrier(TIMEOUT)
        assert (caught.value.kind, caught.value.peer) == ("peer_lost", 1)
        with pytest.raises(_host.Fault, match="this rank has closed the group"):
            ranks.slots[1].barrier(TIMEOUT)

    def test_two_threads_on_one_slot(self, name: str) -> None:
        zero, one, two = Ranks(name, 3).slots
        waiter = threading.Thread(target=lambda: zero.barrier(TIMEOUT))
        waiter.start()
        one.begin(TIMEOUT)
        one.publish(1, 0)  # what a barrier publishes
        one.wait(0, TIMEOUT)  # the first thread is inside, and stays until rank 2 arrives
        with pytest.raises(RuntimeError, match="another thread is using this slot"):
            zero.begin(TIMEOUT)
        two.barrier(TIMEOUT)
        waiter.join()
        zero.begin(TIMEOUT)


def fork(call: Callable[[], int | None]) -> int:
    """Run `call` in a forked child, which exits with its result or 99 for an exception."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = call() or 0
        finally:
            os._exit(code)
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Pair:
    """Rank 0 in this process and a forked rank 1, which runs `call(slot)`."""

    SHAPE = (2, 1, 4096, 3)

    def __init__(self, name: str, call: Callable[[object], int | None]) -> None:
        self.segment = make_segment(name, self.SHAPE)
        self.pid = fork(lambda: call(self._slot(1)))
        self.slot = self._slot(0)

    def _slot(self, rank: int):
        self.domain = _host.Domain(self.segment, rank, *self.SHAPE, TIMEOUT)
        self.domain.join()
        self.domain.open_peers(TIMEOUT)
        return _host.Slot(self.domain, 0)


class TestProcesses:
    def test_all_reduce(self, name: str) -> None:
        def add(slot, value: float) -> np.ndarray:
            data = np.full(3000, value, np.float32)
            for _ in range(20):
                slot.all_reduce(data.ctypes.data, data.ctypes.data, 3000, FLOAT32, 2, TIMEOUT)
            return data

        def child(slot) -> int:
            return 0 if (add(slot, 2.0) == 3.0 * 2**19).all() else 1

        pair = Pair(name, child)
        assert (add(pair.slot, 1.0) == 3.0 * 2**19).all()
        assert exit_code(pair.pid) == 0

    def test_killed(self, name: str) -> None:
        pair = Pair(name, lambda slot: time.sleep(60))
        threading.Timer(0.1, os.kill, (pair.pid, signal.SIGKILL)).start()
        start = time.monotonic()
        with pytest.raises(_host.Fault, match=f"process {pair.pid} has ended") as caught:
            pair.slot.barrier(TIMEOUT)
        assert time.monotonic() - start < 5
        assert (caught.value.kind, caught.value.peer) == ("peer_lost", 1)
        assert exit_code(pair.pid) == -signal.SIGKILL

    def test_stopped(self, name: str) -> None:
        pair = Pair(name, lambda slot: time.sleep(60))
        os.kill(pair.pid, signal.SIGSTOP)
        with pytest.raises(_host.Fault, match=f"process {pair.pid} is stopped") as caught:
            pair.slot.barrier(0.3)
        assert (caught.value.kind, caught.value.peer) == ("timeout", 1)
        os.kill(pair.pid, signal.SIGKILL)
        exit_code(pair.pid)

    def test_exit_without_close(self, name: str) -> None:
        pair = Pair(name, lambda slot: 0)
        with pytest.raises(_host.Fault, match="has ended"):
            pair.slot.barrier(TIMEOUT)
        assert exit_code(pair.pid) == 0

    def test_interrupt(self, name: str) -> None:
        ready, started = os.pipe()

        def child(slot) -> int:
            os.write(started, b"x")
            try:
                slot.barrier(TIMEOUT)
            except KeyboardInterrupt:
                return 42
            return 1

        pair = Pair(name, child)
        os.read(ready, 1)
        time.sleep(0.1)
        os.kill(pair.pid, signal.SIGINT)
        assert exit_code(pair.pid) == 42
        pair.slot.barrier(TIMEOUT)  # the peer had published this round before it was interrupted
        with pytest.raises(_host.Fault, match="rank 1 failed: interrupted in barrier"):
            pair.slot.barrier(TIMEOUT)
        os.close(ready)
        os.close(started)

    def test_forked_child_is_refused(self, name: str) -> None:
        (slot,) = (ranks := Ranks(name, 1)).slots
        domain = ranks.domains[0]

        def child() -> int:
            for call in (lambda: slot.begin(1.0), lambda: domain.fail("x"), domain.join):
                try:
                    call()
                except RuntimeError as error:
                    if "forked" not in str(error):
                        return 2
                else:
                    return 1
            domain.close()  # has nothing to leave
            return 0

        assert exit_code(fork(child)) == 0
        slot.barrier(TIMEOUT)  # the parent is as it was


class TestBuild:
    def run(self, isa: str) -> subprocess.CompletedProcess[str]:
        # Loaded by path: importing the package would take seconds and more than this module.
        code = (
            "import importlib.util as util\n"
            f"spec = util.spec_from_file_location('tp_kernels._host', {_host.__file__!r})\n"
            "module = util.module_from_spec(spec)\n"
            "spec.loader.exec_module(module)\n"
            "print(module.isa())"
        )
        environment = {**os.environ, "TP_KERNELS_ISA": isa}
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )

    def test_isa(self) -> None:
        assert _host.available_isas()[0] == "scalar"
        for isa in _host.available_isas():
            assert self.run(isa).stdout.strip() == isa
        refused = self.run("abacus")
        assert refused.returncode != 0
        assert "TP_KERNELS_ISA=abacus" in refused.stderr and "scalar" in refused.stderr

    def test_build_info(self) -> None:
        info = _host.build_info()
        assert info["version"] and info["compiler"] and "-O3" in info["flags"]
