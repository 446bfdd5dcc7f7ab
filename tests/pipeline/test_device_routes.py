"""Tensors whose elements go from device to device beside the messages, on devices made of threads."""

from __future__ import annotations

import time
from functools import partial
from unittest import mock

import pytest
import torch

from tests.gpu.processes import exchange_messages
from tp_kernels import CollectiveTimeoutError, GroupMismatchError, ParallelGroup, UnsupportedError
from tp_kernels.comm import barrier
from tp_kernels.pipeline import PipelineCommunicator, PipelineRunner
from tp_kernels.pipeline import device_routes as routes
from tp_kernels.pipeline import process_group as process_group_routes
from tp_kernels.pipeline.device_process_group import DeviceProcessGroup, backend_for
from tp_kernels.pipeline.put import CELLS, cell_bytes

from . import test_communicator as bodies
from .host_streams import WAYS, OnDevices
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
    """Puts of several rings return at once; what the program reads and changes waits for its part only."""
    size = cell_bytes(4096) // 4 * CELLS * 3  # elements, of three rings
    with ParallelGroup(timeout=30) as group, OnDevices(group, "put", buffer_bytes=4096) as comm:
        if comm.rank == 0:
            held = comm.streams.new()
            held.held.clear()
            comm._devices._ways[1].sending = held
            xs = [torch.full((size,), float(mb)) for mb in range(3)]
            for mb, x in enumerate(xs):
                comm.send_forward(x, micro_batch=mb)
            barrier(group)
            assert not comm._devices.sent()
            held.held.set()
            comm.flush()
            assert comm._devices.sent()
            for x in xs:
                x.fill_(-1.0)
        else:
            barrier(group)
            for mb in (1, 0, 2):
                assert (comm.recv_forward(micro_batch=mb) == mb).all()


def test_streams_of_a_program(world):
    world(2).run(compute_in_streams)


def compute_in_streams() -> None:
    """What is sent is computed later, in a stream of the program, and so is what is made of it."""
    with ParallelGroup(timeout=30) as group, OnDevices(group, "put", buffer_bytes=4096) as comm:
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
    """In both directions; of ranks without stages next to each other through process groups they are not."""
    for found in world(3).run(bytes_in_messages, way):
        assert found == {"next": 0, "other": 0 if way == "put" else 4000}


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
        return {"next": max(beside), "other": max(apart, default=0 if way == "put" else 4000)}


def test_what_a_gpu_is_to_show(world):
    """The check of tests/gpu, which needs a GPU, with one made of threads."""
    for explained in world(2).run(exchange_messages, "cpu", partial(OnDevices, way="put")):
        assert "CUDA tensors by copies from GPU to GPU with flags (rings of 1 MiB" in explained


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
            assert comm._devices.sent()
        else:
            time.sleep(0.3)
            assert torch.equal(comm.recv_forward(micro_batch=0), x)
            comm.close()


@pytest.mark.parametrize("late", ["sender", "receiver"])
def test_a_late_device(world, late):
    """Streams give up in time, and the next calls say what was waited for, of which rank."""
    world(2).run(be_late, late)


def be_late(late: str) -> None:
    with ParallelGroup(timeout=30) as group:
        comm = OnDevices(group, "put", buffer_bytes=4096, timeout=0.3)
        x = torch.ones(cell_bytes(4096) // 4 * (CELLS + 1 if late == "receiver" else 1))
        give_up = time.monotonic() + 20
        if late == "sender":  # its description has arrived, its elements do not
            if comm.rank == 0:
                held = comm._devices._ways[1].sending = comm.streams.new()
                held.held.clear()
                comm.send_forward(x, micro_batch=0)
                barrier(group)
            else:
                barrier(group)
                comm.progress()
                while not comm._devices.failed():
                    assert time.monotonic() < give_up
                    time.sleep(0.01)
                with pytest.raises(
                    CollectiveTimeoutError, match=r"0\.3 s for a tensor from rank 0"
                ):
                    comm.recv_forward(micro_batch=0)
        elif comm.rank == 0:
            comm.send_forward(x, micro_batch=0)
            while not comm._devices.failed():
                assert time.monotonic() < give_up
                time.sleep(0.01)
            with pytest.raises(CollectiveTimeoutError, match=r"0\.3 s for room .* on rank 1"):
                comm.send_forward(x, micro_batch=1)
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
