"""Virtual ranks as far as a machine without a GPU shows them: sizes, addresses, refusals. One process."""

from __future__ import annotations

import pytest
import torch

from tp_kernels import ShapeError, UnsupportedError
from tp_kernels.kernels import WorkspaceShape
from tp_kernels.kernels._signals import READY
from tp_kernels.kernels.virtual_ranks import (
    VirtualRanks,
    resident_channels,
    workspaces_of_one_process,
)


@pytest.mark.parametrize(
    ("world", "multiprocessors", "asked", "expected"),
    [(2, 132, None, 66), (8, 132, None, 16), (8, 132, 16, 16), (4, 132, 1, 1), (8, 8, None, 1)],
)
def test_channels_that_are_resident(world, multiprocessors, asked, expected):
    assert resident_channels(world, multiprocessors, asked) == expected


def test_channels_that_are_not():
    with pytest.raises(ShapeError, match="channels=17: 8 virtual ranks on 132 multiprocessors can"):
        resident_channels(8, 132, 17)
    with pytest.raises(
        ShapeError, match="9 virtual ranks need 9 multiprocessors, the device has 8"
    ):
        resident_channels(9, 8)


def test_workspaces_have_the_addresses_of_all():
    shape = WorkspaceShape(3, channels=2, chunk=64)
    workspaces = workspaces_of_one_process(shape, torch.device("cpu"), timeout=3.0, epoch=5)
    addresses = [workspace.local.data_ptr() for workspace in workspaces]
    assert len(set(addresses)) == 3
    for rank, workspace in enumerate(workspaces):
        assert workspace.rank == rank and workspace.timeout == 3.0
        assert workspace.table.tolist() == addresses
        words = workspace.local.view(2, shape.stride)[:, READY.value : READY.value + 12]
        assert words.contiguous().view(torch.int32).tolist() == [[5, 5, 5]] * 2


def test_no_virtual_ranks_without_streams():
    with pytest.raises(UnsupportedError, match=r"virtual ranks on cpu: .*use processes"):
        VirtualRanks(2, "cpu")
