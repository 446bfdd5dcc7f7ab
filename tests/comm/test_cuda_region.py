"""Who may have a CUDA region and why not, and how one is made: torch's part is played by host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from tp_kernels import ParallelGroup, Ranks, ShapeError, UnsupportedError
from tp_kernels.comm import devices
from tp_kernels.comm.cuda_region import CudaRegion, exchange_devices
from tp_kernels.comm.devices import DeviceIdentity, cuda_obstacle
from tp_kernels.comm.regions import new_region, region_obstacle
from tp_kernels.comm.topology import HostIdentity
from tp_kernels.ops import _workspace

HOST = HostIdentity("boot", "mount", "pids", 7, 0, 1)
DEVICES = [
    DeviceIdentity(0, "GPU-a", ("GPU-b", "GPU-c")),
    DeviceIdentity(1, "GPU-b", ("GPU-a", "GPU-c")),
    DeviceIdentity(2, "GPU-c", ("GPU-a", "GPU-b")),
]


def obstacle(*devices: DeviceIdentity, hosts: list[HostIdentity] | None = None) -> str | None:
    return cuda_obstacle(hosts or [HOST] * len(devices), devices)


def test_devices_that_reach_each_other():
    assert obstacle(*DEVICES) is None


def test_hosts_and_numbers():
    other = replace(HOST, boot_id="another")
    assert obstacle(*DEVICES[:2], hosts=[HOST, other]) == "ranks 0 and 1: different hosts (boot id)"
    many = [replace(DEVICES[0], index=index, uuid=f"GPU-{index}") for index in range(33)]
    assert obstacle(*many) == "33 ranks; kernels have flags for 32"


def test_no_peer_access():
    for left_out, first, second in ((0, "GPU-a", "GPU-b"), (1, "GPU-b", "GPU-a")):
        devices = list(DEVICES)
        devices[left_out] = replace(devices[left_out], reachable=("GPU-c",))
        assert (
            obstacle(*devices) == f"ranks 0 and 1: no peer access from device {first} to {second}"
        )


def test_one_device_for_two_ranks():
    both = [DEVICES[0], DEVICES[0]]
    assert "ranks 0 and 1: both on cuda:0, which torch refuses" in str(obstacle(*both))
    leave = [replace(device, overlap=True) for device in both]
    assert obstacle(*leave) is None
    assert "OVERLAPPING_DEVICES=1" in str(obstacle(leave[0], both[1]))
    # Masked processes call different devices by the same index, and do not see each other's.
    masked = [replace(device, index=0, overlap=True, reachable=()) for device in DEVICES[:2]]
    assert obstacle(*masked) == "ranks 0 and 1: no peer access from device GPU-b to GPU-a"


def test_as_many_ranks_as_kernels_have_flags_for():
    from tp_kernels.kernels._signals import MOST_RANKS

    assert devices.MOST_RANKS == MOST_RANKS


def test_identities_travel():
    for identity in (*DEVICES, DeviceIdentity(missing="none")):
        assert DeviceIdentity.from_json(identity.to_json()) == identity


def test_identity_without_a_device(monkeypatch):
    assert DeviceIdentity.current(torch.device("cpu")).missing == "cpu is no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert DeviceIdentity.current(torch.device("cuda")).missing == "no CUDA device"


def test_identity_of_a_device(monkeypatch):
    uuids = ["a", "b", "c"]
    properties = [SimpleNamespace(uuid=uuid) for uuid in uuids]
    backend = symmetric_memory._SymmetricMemory
    with (
        mock.patch.multiple(
            torch.cuda,
            is_available=lambda: True,
            device_count=lambda: 3,
            current_device=lambda: 1,
            can_device_access_peer=lambda device, peer: peer == 2,
            get_device_properties=properties.__getitem__,
        ),
        mock.patch("torch._C._distributed_c10d._SymmetricMemory") as torchs,
    ):
        torchs.get_backend = lambda device: "CUDA"
        for overlap in ("1", "0"):
            monkeypatch.setenv(devices.OVERLAP, overlap)
            expected = DeviceIdentity(1, "b", ("c",), overlap == "1")
            assert DeviceIdentity.current(torch.device("cuda")) == expected
        torchs.get_backend = lambda device: None
        missing = DeviceIdentity.current(torch.device("cuda")).missing
    assert missing == f"torch {torch.__version__} has no symmetric memory for CUDA"
    assert backend.get_backend(torch.device("cuda")) in (None, "CUDA", "NVSHMEM", "NCCL")


def refusals() -> list[str]:
    messages = []
    with ParallelGroup(timeout=30) as group:
        assert [d.missing for d in exchange_devices(group, torch.device("cpu"))] == [
            "cpu is no CUDA device"
        ] * 2
        with pytest.raises(UnsupportedError) as caught:
            CudaRegion(group, 4096, "cpu")
        messages.append(str(caught.value))
    return messages


def test_refused_on_all_ranks(world):
    for rank, (message,) in enumerate(world(2).run(refusals)):
        assert message == f"CUDA region on rank {rank} of 2: rank 0: cpu is no CUDA device"


@contextmanager
def stand_in(rank: int, offset: int = 0, fault: str = "") -> Iterator[dict[str, Any]]:
    """As if this process had device `rank` and torch symmetric memory on it; `fault` is what breaks here."""
    seen: dict[str, Any] = {}

    def empty(size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert (stride, dtype, device) == ((1,), torch.uint8, torch.device("cuda", rank))
        if fault == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory\nlong story")
        seen["base"] = torch.full((size[0] + offset,), 7, dtype=dtype)
        return seen["base"][offset:]

    def rendezvous(local: torch.Tensor, name: str) -> Any:
        assert bool((local == 0).all()), "not zero before a peer has the address"
        if fault == "rendezvous":
            raise RuntimeError("CUDA driver error: not permitted")
        pointers = [4096, 8192]
        pointers[rank] = 0 if fault == "address" else seen["base"].data_ptr()
        return SimpleNamespace(buffer_ptrs=pointers, multicast_ptr=4711, get_buffer=get_buffer)

    def get_buffer(owner: int, sizes: Any, dtype: torch.dtype, offset: int) -> torch.Tensor:
        assert dtype == torch.uint8
        seen.setdefault("parts", []).append((owner, tuple(sizes), offset))
        return torch.empty(sizes, dtype=dtype)

    with (
        mock.patch.object(DeviceIdentity, "current", return_value=DEVICES[rank]),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(
            symmetric_memory, "_SymmetricMemory", SimpleNamespace(empty_strided_p2p=empty)
        ),
        mock.patch.object(symmetric_memory, "rendezvous", rendezvous),
    ):
        yield seen


def made() -> None:
    with ParallelGroup(timeout=30) as group, stand_in(group.rank, offset=64) as seen:
        region = CudaRegion(group, 1024, "cuda")
        assert seen["parts"] == [(0, (1024,), 64), (1, (1024,), 64)]
        assert [len(part) for part in region.parts] == [1024, 1024]
        assert region.local.shape == (1024,) and not region.local.any()
        assert region.addresses[group.rank] == region.local.data_ptr()
        assert region.addresses[1 - group.rank] == [4096, 8192][1 - group.rank] + 64
        assert region.multicast == 4711 and region.device == torch.device("cuda", group.rank)
        region.settle()
        region.close()
        assert region.addresses == region.parts == [] and region.multicast == 0


def test_made(world):
    world(2).run(made)


def wired() -> None:
    """A group made where every rank has a device gives regions and workspaces on it."""
    with (
        stand_in(dist.get_rank()),
        ParallelGroup(timeout=30) as group,
        ParallelGroup(timeout=30, provider="none") as apart,
    ):
        assert group.devices == DEVICES[:2] and region_obstacle(group, "cuda") is None
        region = new_region(group, "cuda", 1024)
        assert isinstance(region, CudaRegion) and region.device.index == group.rank
        assert region_obstacle(apart, "cuda") == "rank 0: provider='none' was asked for"
        with pytest.raises(UnsupportedError, match=f"rank {group.rank}: rank 0: provider='none'"):
            new_region(apart, "cuda", 1024)
        with (
            mock.patch.object(_workspace, "device_type", return_value="cuda"),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
            mock.patch.object(torch.Tensor, "pin_memory", torch.Tensor.clone),
        ):
            own = _workspace.GroupWorkspace(group, torch.empty(1))
        assert own.workspace.local.numel() == own.workspace.shape.nbytes
        table = own.workspace.table.tolist()
        assert table[group.rank] == own.workspace.local.data_ptr()
        assert table[1 - group.rank] == [4096, 8192][1 - group.rank]
        own.close()


def test_wired_to_groups_and_workspaces():
    # Ranks of its own: once imported, kernels are compiled or interpreted for good.
    with Ranks(2) as ranks:
        ranks.run(wired)


def without(lacking: int) -> list[str | None]:
    """Rank `lacking` has no device."""
    rank = dist.get_rank()
    identity = DeviceIdentity(missing="no CUDA device") if rank == lacking else DEVICES[rank]
    with (
        mock.patch.object(DeviceIdentity, "current", return_value=identity),
        ParallelGroup(timeout=30) as group,
    ):
        return [region_obstacle(group, device) for device in ("cuda", "cpu", "xpu")]


def test_a_rank_without_a_device(world):
    for answers in world(2).run(without, 1):
        assert answers == [
            "rank 1: no CUDA device",
            None,
            "no memory of xpu devices that all ranks address",
        ]


def breaks(fault: str) -> str:
    with ParallelGroup(timeout=30) as group:
        with stand_in(group.rank, fault=fault if group.rank == 1 else ""):
            nbytes = 1024 + 16 * (fault == "size") * group.rank
            with pytest.raises((UnsupportedError, ShapeError)) as caught:
                CudaRegion(group, nbytes, "cuda")
        return str(caught.value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("memory", "rank 1: CUDA out of memory"),
        ("rendezvous", "rank 1: CUDA driver error: not permitted"),
        ("address", "rank 1: the device of rank 1 cannot be addressed"),
        ("size", "the ranks ask for ['1024', '1040']"),
    ],
)
def test_what_breaks_on_one_rank_is_raised_on_all(world, fault, message):
    for text in world(2).run(breaks, fault):
        assert text.endswith(message), text


def test_one_rank(monkeypatch):
    """Memory of its own, without torch's part."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, device, **kwargs: zeros(*args, **kwargs))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with ParallelGroup() as group:
        region = CudaRegion(group, 100, "cuda")
        assert region.addresses == [region.local.data_ptr()] and region.multicast == 0
        region.settle()
        region.close()
