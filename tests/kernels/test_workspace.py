"""What is refused before anything is sent, and what a launch passes on. One process, nothing runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tp_kernels import CollectiveTimeoutError, ShapeError, UnsupportedError
from tp_kernels.kernels import (
    Workspace,
    WorkspaceShape,
    all_gather,
    all_reduce,
    all_reduce_rms_norm,
    reduce_scatter,
)
from tp_kernels.kernels._signals import CREDIT, EPOCH, RECORD


def make(rank: int = 0, world: int = 2, **options: Any) -> Workspace:
    shape = WorkspaceShape(world, **{"channels": 4, "chunk": 64, "depth": 2} | options)
    parts = [torch.zeros(shape.nbytes, dtype=torch.uint8) for _ in range(world)]
    return Workspace(shape, rank, parts[rank], [part.data_ptr() for part in parts], name="mine")


class Recorder:
    """Stands where a kernel is and keeps what it was launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **constants: self.launches.append((grid, args, constants))


def test_launches_differ_in_nothing_but_the_arguments(monkeypatch):
    """Or a captured graph, which repeats a launch, would not be the next call."""
    monkeypatch.setattr("tp_kernels.kernels.workspace.INTERPRETED", True)
    workspace, kernel, x = make(), Recorder(), torch.ones(3)
    for _ in range(2):
        workspace.launch(kernel, "all_gather", 3, x, warps=4, BLOCK=8)
    first, second = kernel.launches
    assert first[0] == second[0] == (3,) and first[2] == second[2]
    assert all(a is b or a == b for a, b in zip(first[1], second[1], strict=True))


@pytest.mark.parametrize(
    ("elements", "itemsize", "block", "expected"),
    [
        (1, 4, 8, (8, 1)),  # a tile
        (17, 4, 8, (8, 3)),
        (33, 4, 8, (16, 3)),  # all channels would have more than a tile
        (1000, 4, 8, (16, 4)),  # full chunks, several rounds
        (5, 48, 1, (1, 4)),  # rows of which a chunk holds one
    ],
)
def test_divide(elements, itemsize, block, expected):
    assert make().divide(elements, itemsize, block) == expected


def test_epoch_is_in_every_channel():
    """And in no other word: what programs of one launch tell each other starts at zero."""
    shape = WorkspaceShape(2, channels=2, chunk=64)
    local = torch.zeros(shape.nbytes, dtype=torch.uint8)
    Workspace(shape, 0, local, [local.data_ptr()] * 2, epoch=-3)
    words = local.view(2, shape.stride).view(torch.int32)
    flags = words[:, : EPOCH.value // 4 + 1]
    assert torch.equal(flags[:, [0, 1, 32, 33, 64]], torch.full((2, 5), -3, dtype=torch.int32))
    assert not words[:, EPOCH.value // 4 + 1 :].any()


def test_failure_is_reported_in_words():
    workspace = make(rank=1)
    workspace.check()
    assert RECORD[1:4] == ("rank", "operation", "channel") and RECORD[5:] == (
        "peer",
        "expected",
        "seen",
    )
    workspace.record.copy_(torch.tensor([2, 1, 2, 3, CREDIT.value, 0, 7, 5]))
    for _ in range(2):
        with pytest.raises(CollectiveTimeoutError) as caught:
            workspace.check()
        assert str(caught.value).startswith(
            "reduce_scatter: rank 1 waited for credit of rank 0 (slot 'mine', channel 3, expected epoch 7, "
            "seen 5)"
        )


@pytest.mark.parametrize(
    "wrong",
    [{"world": 33}, {"world": 0}, {"channels": 0}, {"chunk": 24}, {"chunk": 0}, {"depth": 3}],
)
def test_shapes_that_do_not_exist(wrong):
    with pytest.raises(ShapeError, match=next(iter(wrong))):
        WorkspaceShape(**{"world": 2} | wrong)


def test_regions_that_do_not_fit():
    shape = WorkspaceShape(2, channels=1, chunk=64)
    local = torch.zeros(shape.nbytes + 16, dtype=torch.uint8)
    with pytest.raises(ShapeError, match="needs"):
        Workspace(shape, 0, local[: shape.nbytes - 1], [local.data_ptr()] * 2)
    for addresses in ([local.data_ptr()], [local.data_ptr(), local.data_ptr() + 8]):
        with pytest.raises(ShapeError, match="2 regions"):
            Workspace(shape, 0, local, addresses)


def test_arguments_that_are_refused():
    workspace, x = make(), torch.ones(4, 8)
    for function in (all_reduce, reduce_scatter):
        with pytest.raises(UnsupportedError, match="float64"):
            function(x.double(), workspace)
        with pytest.raises(ShapeError, match="out is"):
            function(x, workspace, out=torch.ones(5, 8))
        with pytest.raises(UnsupportedError, match="meta"):
            function(x.to("meta"), workspace)
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET=1"):  # not in this process
        all_reduce(x, workspace)
    with pytest.raises(ShapeError, match="strides"):
        all_reduce(x.t(), workspace, out=torch.ones(4, 8).t())
    square = torch.ones(3, 3).t()
    with pytest.raises(ShapeError, match="in place"):
        all_reduce(square, workspace, out=square)
    with pytest.raises(UnsupportedError, match="shots=3"):
        all_reduce(x, workspace, shots=3)
    with pytest.raises(UnsupportedError, match="depth 2"):
        all_reduce(x, make(depth=1), shots=2)
    for function in (reduce_scatter, all_gather):
        with pytest.raises(ShapeError, match="scalar"):
            function(torch.tensor(1.0), workspace)
    with pytest.raises(ShapeError, match="holds 4 rows, but its share of rows=9 is 5"):
        all_gather(x, workspace, rows=9)
    with pytest.raises(ShapeError, match="weight is"):
        all_reduce_rms_norm(x, torch.ones(7), workspace)
    with pytest.raises(ShapeError, match="residual is"):
        all_reduce_rms_norm(x, torch.ones(8), workspace, residual=torch.ones(8))
    with pytest.raises(UnsupportedError, match="chunk"):
        all_reduce_rms_norm(torch.ones(2, 17), torch.ones(17), workspace)
    with pytest.raises(UnsupportedError, match="depth 2"):
        all_reduce_rms_norm(x, torch.ones(8), make(depth=1), shots=2)
