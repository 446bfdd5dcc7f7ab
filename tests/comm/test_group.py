"""How a group is made, what it is made of, and why it cannot be made."""

from __future__ import annotations

import copy
import gc
import pickle
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tp_kernels import (
    CollectiveTimeoutError,
    ParallelGroup,
    UnsupportedError,
    linear_all_reduce,
)
from tp_kernels.comm import all_gather_object, all_reduce, as_group
from tp_kernels.comm.topology import HostIdentity

SHARED_MEMORY = Path("/dev/shm")


def works(group: ParallelGroup) -> bool:
    return all_reduce(torch.ones(3), group).tolist() == [group.size] * 3


def test_one_process_without_torch_distributed():
    with ParallelGroup() as group:
        assert (group.rank, group.size, group.ranks) == (0, 1, [0])
        assert group.provider == "none"
        assert group.provider_reason == "one rank without torch.distributed"
        assert ParallelGroup.by_name(group.name) is group
        assert works(group)
        assert as_group(group) is group
        assert as_group(None).size == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"provider": "cuda"}, "use 'auto', 'host' or 'none'"),
        ({"timeout": 0}, "use a positive number of seconds"),
        ({"timeout": -1.0}, "use a positive number of seconds"),
        ({"timeout": float("nan")}, "use a positive number of seconds"),
        ({"window": 0}, "window=0"),
        ({"window": -1}, "window=-1: use 64 bytes or more"),
        ({"group": "tp"}, "of type str: pass a ParallelGroup, a ProcessGroup"),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(UnsupportedError, match=text):
        ParallelGroup(**options)


def test_providers(world):
    for rank, (host, none, one) in enumerate(world(2).run(describe)):
        start = f"ParallelGroup(rank {rank} of 2, provider="
        assert host == start + "host: all 2 ranks share this host)"
        assert none == start + "none: provider='none' was asked for)"
        assert one == "ParallelGroup(rank 0 of 1, provider=none: one rank)"


def describe() -> list[str]:
    texts = []
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for group, provider in ((None, "auto"), (None, "none"), (alone, "host")):
        with ParallelGroup(group, provider=provider, timeout=30) as made:
            assert works(made)
            texts.append(repr(made))
    return texts


def test_subgroups_and_meshes(world):
    world(3).run(make_from_everything)


def make_from_everything() -> None:
    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    if rank == 0:
        with pytest.raises(UnsupportedError, match="not a member of the group"):
            ParallelGroup(pair)
    else:
        with ParallelGroup(pair, timeout=30) as group:
            assert (group.rank, group.ranks, group.provider) == (rank - 1, [1, 2], "host")
            assert works(group)
    line = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    plane = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))
    with pytest.raises(UnsupportedError, match=r"one mesh dimension.*mesh\[\"tp\"\]"):
        ParallelGroup(plane)
    for mesh, size in ((line, 3), (plane["tp"], 3), (plane["dp"], 1)):
        with ParallelGroup(mesh, timeout=30) as group:
            assert (group.size, group.rank) == (size, rank % size)
            assert works(group)


def test_groups_do_not_meet(world):
    world(2).run(hold_several)


def hold_several() -> None:
    groups = [ParallelGroup(timeout=30) for _ in range(5)]
    assert len({group.name for group in groups}) == 5
    assert not list(SHARED_MEMORY.glob("tpk-*")), "a segment has no name while it is in use"
    for group in reversed(groups):
        assert ParallelGroup.by_name(group.name) is group
        assert works(group)
    groups[2].close()
    for group in groups[:2] + groups[3:]:
        assert works(group)
        group.close()


def test_layers_share_the_group_of_a_process_group(world):
    world(2).run(share)


def share() -> None:
    group = as_group(None)
    assert as_group(None) is as_group(dist.group.WORLD) is group and works(group)
    group.close()
    assert as_group(None) is not group and works(as_group(None))
    as_group(None).close()


def test_the_end_of_a_group(world):
    world(2).run(end)


def end() -> None:
    with ParallelGroup(timeout=30) as group:
        assert works(group)
        pickled = pickle.dumps([group])
        assert pickle.loads(pickled)[0] is group
        assert copy.deepcopy([group])[0] is group
        of_peer = all_gather_object(pickled, group)[1 - group.rank]
        with pytest.raises(
            UnsupportedError, match=f"this is rank {group.rank} of 2 in this process"
        ):
            pickle.loads(of_peer)
    group.close()
    with pytest.raises(UnsupportedError, match="there is none in this process"):
        pickle.loads(pickled)
    with pytest.raises(UnsupportedError, match="is closed"):
        works(group)
    with pytest.raises(UnsupportedError, match="keep a reference"):
        ParallelGroup.by_name(group.name)
    gc.collect()  # what tests before this one have left to it
    before = mappings()
    dropped = ParallelGroup(timeout=30)
    assert works(dropped) and mappings() == before + 1
    name = dropped.name
    dist.barrier()  # a rank that drops its group leaves it
    del dropped
    gc.collect()
    assert mappings() == before
    with pytest.raises(UnsupportedError, match="alive"):
        ParallelGroup.by_name(name)


def mappings() -> int:
    return sum("/dev/shm/tpk-" in line for line in Path("/proc/self/maps").open())


def test_a_rank_that_does_not_construct_is_named(world):
    outcomes = world(3).run(leave_one_out)
    assert outcomes[1] is None
    for text, seconds in (outcomes[0], outcomes[2]):
        assert "rank 1 did not reach" in text and seconds < 4


def leave_one_out() -> tuple[str, float] | None:
    own = dist.new_group([0, 1, 2])  # the ranks are out of step with each other afterwards
    if dist.get_rank() == 1:
        return None
    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as caught:
        ParallelGroup(own, timeout=1)
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("boot_id", "different hosts (boot id)"),
        ("mount_namespace", "different mount namespaces (containers)"),
        ("pid_namespace", "different PID namespaces (containers)"),
        ("shm_device", "no common /dev/shm"),
        ("uid", "different users"),
    ],
)
def test_ranks_that_cannot_share_memory(world, field, reason):
    for group, error in world(3).run(pretend_to_be_elsewhere, field):
        assert group == f"none: ranks 0 and 2: {reason}"
        assert f"provider='host' is not possible: ranks 0 and 2: {reason}" in error
        assert "provider='auto'" in error


def pretend_to_be_elsewhere(field: str) -> tuple[str, str]:
    current = HostIdentity.current
    if dist.get_rank() == 2:
        elsewhere = replace(current(), **{field: -7 if field in ("uid", "shm_device") else "x"})
        HostIdentity.current = classmethod(lambda cls: elsewhere)
    try:
        with ParallelGroup(timeout=30) as group:
            assert works(group)
            text = f"{group.provider}: {group.provider_reason}"
        with pytest.raises(UnsupportedError) as caught:
            ParallelGroup(provider="host", timeout=30)
        return text, str(caught.value)
    finally:
        HostIdentity.current = current


def test_memory_that_does_not_fit(world):
    """Reserved when the group is made: an error on all ranks, not a bus error later."""
    world(2).run(ask_for_too_much)


def ask_for_too_much() -> None:
    with ParallelGroup(window=1 << 44, timeout=30) as group:
        assert group.provider == "none" and works(group)
        assert "no shared segment: rank 0" in group.provider_reason
    with pytest.raises(
        UnsupportedError, match="provider='host' is not possible: no shared segment"
    ):
        ParallelGroup(provider="host", window=1 << 44, timeout=30)


def test_ranks_that_ask_for_different_windows(world):
    for provider, reason in world(2).run(ask_differently):
        assert provider == "none"
        assert "rank 0 asked for Shape(world=2, slots=1, capacity=4096, " in reason


def ask_differently() -> tuple[str, str]:
    with ParallelGroup(window=4096 << dist.get_rank(), timeout=30) as group:
        assert works(group)
        return group.provider, group.provider_reason


def test_the_smallest_windows(world):
    world(3).run(move_through_small_windows)


def move_through_small_windows() -> None:
    """Also those that are no multiple of an element or a row."""
    for window in (64, 65, 100, 4097):
        with ParallelGroup(window=window, timeout=30) as group:
            assert group.provider == "host"
            assert all_reduce(torch.arange(999.0), group).equal(torch.arange(999.0) * 3)
            y = linear_all_reduce(torch.ones(99, 3), torch.ones(5, 3), group=group)
            assert y.eq(9).all()
