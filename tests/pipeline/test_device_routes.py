"""Tensors whose elements go from device to device beside the messages, on devices made of threads."""

from __future__ import annotations

import time
from functools import partial
from unittest import mock

import pytest
import torch

from tests.gpu.processes import exchange_messages
from tp_kernels import (
    CollectiveTimeoutError,
    GroupMismatchError,
    ParallelGroup,
    PeerLostError,
    UnsupportedError,
)
from tp_kernels.comm import barrier
from tp_kernels.pipeline import PipelineCommunicator, PipelineRunner
from tp_kernels.pipeline import device_routes as routes
from tp_kernels.pipeline import process_group as process_group_routes
from tp_kernels.pipeline.device_process_group import DeviceProcessGroup, backend_for

from . import test_communicator as bodies
from .host_streams import WAYS, OnDevices, signed
from .stages import (
    check_gradients,
    make_batch,
    make_stages,
    mean_loss,
    mine,
    one_process,
    schedule_of,
)


@pytest.mark.parametrize("way", WAYS)
def test_what_messages_do(world, way):
    """Everything that holds for tensors in messages, with the elements of all of them beside these."""
    world(2).run(bodies.there_and_back, way)
    world(3).run(bodies.there_and_back, way)
    world(2).run(bodies.send_payloads, way)
    world(2).run(bodies.combined, way)
    world(2).run(bodies.repeat, way)
    world(2).run(bodies.use_credits, way)
    world(2).run(bodies.wait_with_credits, way)
    world(4).run(bodies.to_all, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
    ("size", "stage_to_rank"), [(2, (0, 1, 1, 0)), (3, (0, 1, 2, 0, 1, 2)), (4, (0, 2, 1, 3))]
)
def test_traffic(world, size, stage_to_rank, ring, way):
    world(size).run(bodies.random_traffic, way, stage_to_rank, ring)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("size", "ring"), [(2, True), (3, True), (3, False)])
def test_all_send_first(world, size, ring, way):
    world(size).run(bodies.send_first, way, ring)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved_one_f_one_b", "zero_bubble_v"])
def test_runner(world, name, way):
    world(2).run(train, name, way)


def train(name: str, way: str) -> None:
    """The same bits as one process, in messages of which some tensors are beside and some within."""
    placement = schedule_of(name, 2, 4).stage_to_rank
    stages = make_stages(len(placement))
    with (
        ParallelGroup(timeout=30) as group,
        OnDevices(group, way, torch.float64, stage_to_rank=placement, buffer_bytes=4096) as channel,
    ):
        own = mine(stages, channel)
        runner = PipelineRunner(own, name, channel, mean_loss, micro_batches=4)
        for step in range(3):
            batch, target = make_batch(9, step)
            expected = one_process(stages, batch, target, 4)
            assert runner.step(*batch, target=target).each == tuple(expected)
        for index, stage in zip(channel.my_stages, own, strict=True):
            check_gradients(stage, stages[index])


def test_the_host_does_not_wait(world):
    world(2).run(run_ahead)


def run_ahead() -> None:
    """A send returns at once while its device does nothing; a receive waits for its own part only."""
    with ParallelGroup(timeout=30) as group, OnDevices(group, "put", buffer_bytes=1 << 16) as comm:
        if comm.rank == 0:
            held = comm._devices._ways[1].sending = comm.streams.new()
            held.held.clear()
            xs = [torch.full((1000,), float(mb)) for mb in range(3)]
            for mb, x in enumerate(xs):
                comm.send_forward(x, micro_batch=mb)
            barrier(group)
            assert not comm._devices.idle()
            held.held.set()
            comm.flush()
            for x in xs:
                x.fill_(-1.0)
        else:
            barrier(group)
            for mb in (1, 0, 2):
                assert (comm.recv_forward(micro_batch=mb) == mb).all()


def test_more_than_there_is_room_for(world):
    world(2).run(fill_the_ring)


def fill_the_ring() -> None:
    """Both send more than their rings hold before they receive; what fits into none goes in its message."""
    with ParallelGroup(timeout=30) as group, OnDevices(group, "put", buffer_bytes=1 << 14) as comm:
        send, receive = (
            (comm.send_forward, comm.recv_backward)
            if comm.rank == 0
            else (comm.send_backward, comm.recv_forward)
        )
        sizes = [3000, 4096, 1, 0, 2000, 5000, 77, 4000]  # floats, of a ring of 4096
        for step in range(0, len(sizes), 4):
            for mb in range(step, step + 4):
                send(torch.full((sizes[mb],), float(mb)), micro_batch=mb)
            comm.progress()
            way = comm._devices._ways[1 - comm.rank]
            assert sum(end - start for _, start, end in way.in_ring) <= 1 << 14
            for mb in (step + 3, step, step + 2, step + 1):
                got = receive(micro_batch=mb)
                assert got.shape == (sizes[mb],) and (got == mb).all()


@pytest.mark.parametrize("way", WAYS)
def test_changed_in_place(world, way):
    world(2).run(change, way)


def change(way: str) -> None:
    """What a device may still have to read is as little to be changed as what a ring has not taken."""
    with ParallelGroup(timeout=30) as group:
        comm = OnDevices(group, way)
        if comm.rank == 0:
            x = torch.ones(10)
            comm.send_forward(x, micro_batch=0)
            x.fill_(2.0)
            with pytest.raises(UnsupportedError, match=r"micro-batch 0 .* was changed in place"):
                comm.flush()
        comm.leave()


@pytest.mark.parametrize("way", WAYS)
def test_queued_in_another_stream(world, way):
    world(2).run(queue_in_streams, way)


def queue_in_streams(way: str) -> None:
    """A message waits for what had been given to the stream that it was sent in, whenever it leaves."""
    with ParallelGroup(timeout=30) as group, OnDevices(group, way, credits=1) as comm:
        if comm.rank == 0:
            x = torch.full((100,), -1.0)
            program = comm.streams.new()
            program.held.clear()
            comm.send_forward(0, micro_batch=0)  # takes the credit
            with comm.streams.on(program):
                comm.streams.copy(x, torch.full((100,), 5.0))
                comm.send_forward(x, micro_batch=1)
            barrier(group)
            peer = comm._exchange._peers[1]
            while not peer.on_device:
                comm.progress()  # in another stream than that of the send
            program.held.set()
            comm.flush()
        else:
            barrier(group)
            assert comm.recv_forward(micro_batch=0) == 0
            assert (comm.recv_forward(micro_batch=1) == 5.0).all()


@pytest.mark.parametrize("way", WAYS)
def test_both_flush_first(world, way):
    world(2).run(flush_first, way)


def flush_first(way: str) -> None:
    """Both send, flush and receive, all in streams of their programs: no stream waits for its own peer."""
    with ParallelGroup(timeout=30) as group, OnDevices(group, way) as comm:
        program, other = comm.streams.new(), 1 - comm.rank
        with comm.streams.on(program):
            for step in range(3):
                x = torch.full((1000,), float(comm.rank + step))
                comm.send_to(x, other, tag="x")
                comm.flush()
                got = torch.empty(1000)
                comm.streams.copy(got, comm.recv_from(other, tag="x"))
                done = comm.streams.record()
                assert done.wait(10), "ranks wait for each other"
                assert (got == other + step).all()


def test_a_flush_that_finds_no_peer(world):
    world(2).run(flush_alone)


def flush_alone() -> None:
    """NCCL's sends end with their receives; a peer that makes no call is named in time."""
    with ParallelGroup(timeout=30) as group:
        comm = OnDevices(group, "in order", timeout=2)
        if comm.rank == 0:
            comm.send_forward(torch.ones(10), micro_batch=3)
            late = r"flush: stage 1 on rank 1 does not take forward of micro-batch 3 .* within 2 s"
            with pytest.raises(CollectiveTimeoutError, match=late):
                comm.flush()
        else:
            time.sleep(2.5)
        comm.leave()


def test_a_send_that_fails(world):
    world(2).run(fail_halfway)


def fail_halfway() -> None:
    """Nobody takes the elements of one message for those of another."""
    with ParallelGroup(timeout=5) as group:
        comm = OnDevices(group, "put")
        if comm.rank == 0:
            x = torch.ones(10)
            with (
                mock.patch.object(
                    comm.streams, "write_flag", side_effect=RuntimeError("no launch")
                ),
                pytest.raises(RuntimeError, match="no launch"),
            ):
                comm.send_forward(x, micro_batch=0)
            with pytest.raises(PeerLostError, match="broken since: RuntimeError: no launch"):
                comm.send_forward(x, micro_batch=0)
        else:
            with pytest.raises(PeerLostError, match="no launch"):
                comm.recv_forward(micro_batch=0)
        comm.leave()


def test_counters_wrap(world):
    world(2).run(wrap)


def wrap() -> None:
    with ParallelGroup(timeout=30) as group, OnDevices(group, "put", buffer_bytes=4096) as comm:
        start = 2**32 - 3 if comm.rank == 0 else 2**32 - 5
        for way in comm._devices._ways.values():
            barrier(group)
            way.sent.count, way.received.count = start, 2 * 2**32 - 8 - start
            for flag, count in ((way.arrived, way.received.count), (way.arrived_there, start)):
                flag.fill_(signed(count))
            way.read_there.fill_(signed(way.received.count))
            barrier(group)
        for mb in range(8):
            if comm.rank == 0:
                comm.send_forward(torch.full((900,), float(mb)), micro_batch=mb)
                assert (comm.recv_backward(micro_batch=mb) == -mb).all()
            else:
                assert (comm.recv_forward(micro_batch=mb) == mb).all()
                comm.send_backward(torch.full((900,), -float(mb)), micro_batch=mb)


@pytest.mark.parametrize("way", WAYS)
def test_streams_of_a_program(world, way):
    world(2).run(compute_in_streams, way)


def compute_in_streams(way: str) -> None:
    """What is sent is computed later, in a stream of the program, and so is what is made of it."""
    with ParallelGroup(timeout=30) as group, OnDevices(group, way, buffer_bytes=4096) as comm:
        streams, count = comm.streams, 40
        program = streams.new()
        program.delay = 2e-3
        with streams.on(program):
            if comm.rank == 0:
                x = torch.full((500,), -1.0)
                for mb in range(count):
                    streams.copy(x, torch.full((500,), float(mb)))
                    comm.send_forward(x, micro_batch=mb)
                    comm.flush()  # before it is written again
            else:
                out = torch.empty(count, 500)
                for mb in range(count):
                    streams.copy(out[mb], comm.recv_forward(micro_batch=mb))
            done = streams.record()
        streams.wait(done)
        if comm.rank == 1:
            assert torch.equal(out, torch.arange(float(count))[:, None].expand(count, 500))


@pytest.mark.parametrize("way", WAYS)
def test_elements_are_beside_messages(world, way):
    """In both directions; between ranks without stages next to each other they are not."""
    for found in world(3).run(bytes_in_messages, way):
        assert found == {"next": 0, "other": 4000}


def bytes_in_messages(way: str) -> dict[str, int]:
    x = torch.ones(1000)
    with ParallelGroup(timeout=30) as group, OnDevices(group, way) as comm:
        send, sent = comm._transport.send, []

        def record(peer: int, tag: int, head: bytes, spans: list[tuple[int, int]]) -> bool:
            sent.append((peer, sum(size for _, size in spans)))
            return send(peer, tag, head, spans)

        comm._transport.send = record
        others = [rank for rank in range(3) if rank != comm.rank]
        for rank in others:
            comm.send_to(x, rank, tag="x")
        for rank in others:
            assert torch.equal(comm.recv_from(rank, tag="x"), x)
        comm.flush()
        apart = [size for peer, size in sent if {peer, comm.rank} == {0, 2}]
        beside = [size for peer, size in sent if {peer, comm.rank} != {0, 2}]
        # Rank 1 is next to both others.
        return {"next": max(beside), "other": max(apart, default=4000)}


def test_what_a_gpu_is_to_show(world):
    """The check of tests/gpu, which needs a GPU, with one made of threads."""
    for explained in world(2).run(exchange_messages, "cpu", partial(OnDevices, way="put")):
        assert "CUDA tensors by copies from GPU to GPU with flags, between ranks" in explained


@pytest.mark.parametrize("way", WAYS)
def test_closing_waits_for_devices(world, way):
    world(2).run(close_early, way)


def close_early(way: str) -> None:
    """What was sent arrives, however early its sender closes; a process may end then."""
    with ParallelGroup(timeout=30) as group:
        comm = OnDevices(group, way)
        x = torch.ones(100_000)
        if comm.rank == 0:
            with comm.streams.on(comm.streams.new()):  # a flush holds that stream and not the host
                comm.streams.streams[-1].delay = 0.1
                comm.send_forward(x, micro_batch=0)
                comm.close()
            assert comm._devices.idle()
        else:
            time.sleep(0.3)
            with comm.streams.on(comm.streams.new()):  # what is received holds that stream
                got = comm.recv_forward(micro_batch=0)
                comm.close()
            assert comm._devices.idle()
            assert torch.equal(got, x)


def test_a_late_device(world):
    """A stream gives up in time, and the next call, whatever it is, says what was waited for."""
    world(2).run(be_late)


def be_late() -> None:
    with ParallelGroup(timeout=30) as group:
        comm = OnDevices(group, "put", timeout=0.3)
        if comm.rank == 0:  # its description arrives, its elements do not
            held = comm._devices._ways[1].sending = comm.streams.new()
            held.held.clear()
            comm.send_forward(torch.ones(10), micro_batch=0)
            barrier(group)
        else:
            barrier(group)
            comm.progress()
            give_up = time.monotonic() + 20
            while not comm._devices.failed():
                assert time.monotonic() < give_up
                time.sleep(0.01)
            late = r"0\.3 s for a tensor from rank 0 \(message 1, seen 0\)"
            with pytest.raises(CollectiveTimeoutError, match=late):
                comm.send_backward(0.0, micro_batch=0)  # no garbage leaves this rank
        comm.leave()


def test_choice(world):
    world(2).run(choose)


def choose() -> None:
    with ParallelGroup() as group:
        with PipelineCommunicator(group) as comm:
            assert comm._devices is None
            assert "CUDA tensors through host memory (put: " in comm.explain()
            assert "nccl: the backend of this process group for CUDA tensors is" in comm.explain()
        with PipelineCommunicator(group, device_route="host") as comm:
            assert "device_route='host' was asked for" in comm.explain()
        for choice in ("put", "nccl"):
            with pytest.raises(UnsupportedError, match=f"device_route='{choice}' is impossible"):
                PipelineCommunicator(group, device_route=choice)
        with pytest.raises(UnsupportedError, match="use one of auto, put, nccl, host"):
            PipelineCommunicator(group, device_route="nvlink")
        with pytest.raises(GroupMismatchError, match=r"device_route=(auto and host|host and auto)"):
            PipelineCommunicator(group, device_route=("auto", "host")[group.rank])


def test_communicators_that_cannot_be_made(world):
    world(2).run(without_communicators)


def without_communicators() -> None:
    """As where two ranks share a GPU: NCCL refuses on one rank, and all go through host memory."""

    class Refuses:
        def send(self, *_: object) -> None:
            raise RuntimeError("Duplicate GPU detected\nand more")

        recv = send

    with (
        ParallelGroup() as group,
        mock.patch.object(routes, "backend_for") as found,
        mock.patch("torch.zeros"),
        mock.patch("torch.cuda.current_device", return_value=0),
        mock.patch.object(routes, "CudaStreams"),
    ):
        found.return_value.name.return_value = "nccl"
        make = partial(DeviceProcessGroup, make=lambda *_: Refuses())
        with (
            mock.patch.object(routes, "DeviceProcessGroup", make),
            PipelineCommunicator(group) as comm,
        ):
            assert "through host memory (put: " in comm.explain()
            assert (
                "no communicators of nccl: rank 0: Duplicate GPU detected; rank 1" in comm.explain()
            )


def test_a_process_group_for_devices_only(world):
    """As of init_process_group("nccl"): what describes tensors goes through a gloo group of its own."""
    world(2).run(bodies_without_gloo)


def bodies_without_gloo() -> None:
    with mock.patch.object(process_group_routes, "backend_for", return_value=None):
        bodies.there_and_back("none")
        with bodies.pipeline("none") as comm:
            assert comm._transport._backend is not backend_for(comm.group.process_group, "cpu")


def test_a_region_that_cannot_be_made(world):
    world(2).run(without_a_region)


def without_a_region() -> None:
    """As where a GPU has no memory left: the next best way, unless puts were asked for."""
    refused = UnsupportedError("CUDA region of 8 bytes on rank 0: rank 1: out of memory")
    with (
        ParallelGroup() as group,
        mock.patch.object(routes, "region_obstacle", return_value=None),
        mock.patch.object(routes, "native_obstacle", return_value=None),
        mock.patch.object(routes, "new_region", side_effect=refused),
    ):
        with PipelineCommunicator(group) as comm:
            assert "put: CUDA region of 8 bytes on rank 0: rank 1: out of memory" in comm.explain()
        with pytest.raises(UnsupportedError, match="out of memory"):
            PipelineCommunicator(group, device_route="put")
