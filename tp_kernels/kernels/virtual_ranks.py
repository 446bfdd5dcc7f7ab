"""Several ranks on one GPU in one process: what a machine with one GPU can run of the kernels.

A virtual rank has a region, a workspace and a stream. Its kernels are those of any rank, but peers are as
near as the own memory: times tell nothing about links.

Kernels of all ranks have to run at the same time, or one waits for another that never starts. That takes:

- every program of every rank finds room: `channels`, which no launch exceeds, times the ranks are at most
  the multiprocessors;
- nothing waits for a kernel that waits: loading a module and allocating may both wait for the device, so
  everything is called once before, by `rehearse`;
- no stream waits behind another: there are more hardware queues than ranks (CUDA_DEVICE_MAX_CONNECTIONS, 8 if
  unset), or every function launches one kernel with signals, and that last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from tp_kernels.comm.errors import ShapeError, UnsupportedError

from ._device import INTERPRETED
from .workspace import Workspace, WorkspaceShape

T = TypeVar("T")


def resident_channels(world: int, multiprocessors: int, asked: int | None = None) -> int:
    """Channels of every rank's workspace: `asked`, or as many as can be resident at once.

    Kernels may take all registers or shared memory of a multiprocessor, so each has one program on it.

    Raises:
        ShapeError: programs of `world` kernels would not all be resident.
    """
    if not 1 <= world <= multiprocessors:
        raise ShapeError(
            f"{world} virtual ranks need {world} multiprocessors, the device has {multiprocessors}"
        )
    most = multiprocessors // world
    if asked is not None and asked > most:
        raise ShapeError(
            f"channels={asked}: {world} virtual ranks on {multiprocessors} multiprocessors can have "
            f"{most} each, or a kernel would wait for one that cannot start"
        )
    return most if asked is None else asked


def workspaces_of_one_process(
    shape: WorkspaceShape, device: torch.device, **options: Any
) -> list[Workspace]:
    """The workspaces of all ranks of `shape`, in memory of `device`; `options` as of `Workspace`."""
    regions = [
        torch.zeros(shape.nbytes, dtype=torch.uint8, device=device) for _ in range(shape.world)
    ]
    addresses = [region.data_ptr() for region in regions]
    return [
        Workspace(shape, rank, region, addresses, name=f"virtual rank {rank}", **options)
        for rank, region in enumerate(regions)
    ]


class VirtualRanks:
    """`world` ranks on the streams of one device.

        ranks = VirtualRanks(4)
        xs = [torch.randn(1000, device="cuda") for _ in range(4)]
        sums = ranks.run(lambda rank, workspace: all_reduce(xs[rank], workspace))

    Args:
        world: ranks, 2 to 32.
        device: a CUDA device.
        channels, chunk, depth: as of `WorkspaceShape`; channels: as many as can be resident by default.
        timeout, epoch: as of `Workspace`.

    Raises:
        ShapeError: so many programs cannot be resident at once.
        UnsupportedError: `device` is no CUDA device, or kernels are interpreted.
    """

    def __init__(
        self,
        world: int,
        device: torch.device | str = "cuda",
        *,
        channels: int | None = None,
        chunk: int = 1 << 16,
        depth: int = 2,
        timeout: float = 5.0,
        epoch: int = 0,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda" or INTERPRETED:
            raise UnsupportedError(
                f"virtual ranks on {self.device}{', interpreted' * INTERPRETED}: their kernels have to run "
                "at the same time, on streams of a GPU; interpreted, a kernel ends before the next one "
                "starts: use processes (tp_kernels.Ranks with TRITON_INTERPRET=1)"
            )
        self.device = torch.empty(0, device=self.device).device  # with its index
        available = torch.cuda.get_device_properties(self.device).multi_processor_count
        channels = resident_channels(world, available, channels)
        self.shape = WorkspaceShape(world, channels, chunk, depth)
        self.workspaces = workspaces_of_one_process(
            self.shape, self.device, timeout=timeout, programs=channels, epoch=epoch
        )
        self.streams = [torch.cuda.Stream(self.device) for _ in range(world)]
        torch.cuda.synchronize(self.device)  # regions are zero before any stream uses them

    def launch(self, function: Callable[[int, Workspace], T]) -> list[T]:
        """Call function(rank, workspace) for each rank, on its stream; returns results, waits for nothing.

        Streams do not wait for what the caller has launched before either.
        """
        results = []
        for workspace, stream in zip(self.workspaces, self.streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(function(workspace.rank, workspace))
        return results

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Kernels launched meanwhile, also by graphs, send nothing, wait for nobody and write no results.

        Raises:
            CollectiveTimeoutError: as `check`, before.
        """
        self.check()
        self._set_records(2)  # as after a failed wait, see _signals.py
        try:
            yield
        finally:
            self._set_records(0)

    def rehearse(self, function: Callable[[int, Workspace], T]) -> list[T]:
        """Compile, load and allocate what `function` needs, without an effect.

        Returns its results, whose values are undefined: memory for as many is at hand once they are gone.
        """
        with self.muted():
            return self.launch(function)

    def run(self, function: Callable[[int, Workspace], T]) -> list[T]:
        """Rehearse and launch; returns the results by rank when all kernels have ended.

        Raises:
            CollectiveTimeoutError: a kernel gave up a wait.
        """
        self.rehearse(function)
        results = self.launch(function)
        self.check()
        return results

    def check(self) -> None:
        """Wait for the device and raise if a kernel has given up a wait.

        Raises:
            CollectiveTimeoutError: of the lowest rank that has.
        """
        torch.cuda.synchronize(self.device)
        for workspace in self.workspaces:
            workspace.check()

    def _set_records(self, state: int) -> None:
        torch.cuda.synchronize(self.device)
        for workspace in self.workspaces:
            workspace.record.fill_(state)
        torch.cuda.synchronize(self.device)
