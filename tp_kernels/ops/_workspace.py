"""The workspace in which a group's kernels exchange data: made at the first op, closed with the group.

Kernels are imported here, at that moment: Triton is optional, and what it reads from the environment on
import must be what the ranks have told each other.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tp_kernels.comm.errors import UnsupportedError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.regions import new_region
from tp_kernels.dispatch import STAGED_BYTES
from tp_kernels.native._products import LARGE

from ._op import device_type

# Programs of a launch in the interpreter, which runs them one after the other: more would only take memory.
INTERPRETED_CHANNELS = 4
LEAST_CHUNK = LARGE.block_m * LARGE.block_n * 2  # of a GPU: a tile of the products in CUDA C++
DEPTH = 4  # as linear_all_reduce needs for two shots


class GroupWorkspace:
    """A workspace on one kind of device, with the memory that it is in. Construction is collective.

    Attributes:
        kernels: the module that has them.
        workspace: what they take.

    Raises:
        UnsupportedError: on all ranks, if one of them cannot import the kernels, or there is no memory.
    """

    def __init__(self, group: ParallelGroup, like: Tensor) -> None:
        device = device_type(like)
        interpreted = device == "cpu"
        if not interpreted and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"rank {group.rank}: the first op that addresses its peers ('triton' or 'cuda') makes "
                "memory, which a graph cannot capture; call it once before"
            )
        self.kernels = kernels = import_together(group, interpreted, "'triton' or 'cuda'")
        shape = kernels.WorkspaceShape(group.size, *_sizes(like), DEPTH)
        staged = 0 if interpreted else STAGED_BYTES
        region = self._region = new_region(group, device, shape.nbytes + staged)
        self.workspace = kernels.Workspace(
            shape,
            group.rank,
            region.local[: shape.nbytes],
            region.addresses,
            timeout=group.timeout,
            name=f"kernels {device}",
            multicast=region.multicast,
            staging=[part[shape.nbytes :] for part in region.parts] if staged else (),
        )
        self._stream: torch.cuda.Stream | None = None  # of the last launch
        # Of a GPU: copied after every launch, so that looking at it waits for nothing.
        self._last_record = None if interpreted else self.workspace.record.cpu().pin_memory()
        region.settle()

    def launch(
        self, kernel: str, *args: Any, module: ModuleType | None = None, **options: Any
    ) -> Any:
        """Call `kernel` of `module` (tp_kernels.kernels if None) in this workspace.

        Raises:
            CollectiveTimeoutError: it or an earlier one gave up a wait, as far as this rank has heard: an
                interpreted kernel has ended by now, one on a GPU may be heard of in the next call.
        """
        record = self._last_record
        function = getattr(module or self.kernels, kernel)
        if record is None:
            return function(*args, self.workspace, **options)
        if record[0]:
            self.workspace.check()
        self._follow_stream()
        result = function(*args, self.workspace, **options)
        record.copy_(self.workspace.record, non_blocking=True)
        return result

    def _follow_stream(self) -> None:
        """Let a launch on another stream than the last one wait for that: two at a time cannot share buffers.

        A graph is captured on a stream of its own, for which torch waits; its replays are for the caller
        to order.
        """
        if torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream()
        if self._stream is not None and stream != self._stream:
            stream.wait_event(self._stream.record_event())
        self._stream = stream

    def check(self) -> None:
        """Raise CollectiveTimeoutError if a kernel has given up a wait; waits for the current stream."""
        self.workspace.check()

    def close(self) -> None:
        """Leave the memory in order; waits for nobody."""
        self._region.close()


def launch(group: ParallelGroup, like: Tensor, kernel: str, *args: Any, **options: Any) -> Any:
    """As GroupWorkspace.launch, in the group's workspace for the device of `like`. Collective."""
    device = device_type(like)
    with torch.cuda.device_of(like):
        own = group.workspaces.get(device)
        if own is None:
            with torch.inference_mode(False):  # or training could not write to what inference made
                own = group.workspaces[device] = GroupWorkspace(group, like)
        return own.launch(kernel, *args, **options)


def agree(
    group: ParallelGroup, operation: str, x: Tensor, width: int, counts: Sequence[int]
) -> None:
    """Refuse on all ranks what differs between them, which kernels do not look at.

    counts: rows of each rank, or the rows of all. Host memory always compares; CUDA tensors are compared
    where the group was made with check=True, which costs a collective.
    """
    rows, layout = sum(counts), layout_of(counts)
    name = f"kernel {operation}"
    if not x.is_cpu:
        group.transport.agree(name, x, rows, width, layout)
        return
    slot = group.slot
    slot.begin()
    slot.publish(name, x.dtype, rows, width, layout)
    waiting = [peer for peer in range(group.size) if peer != group.rank]
    while waiting:
        waiting.pop(slot.wait_any(waiting)[0])
    slot.finish()


def layout_of(counts: Sequence[int]) -> int:
    """A number that says, with the sum of the rows, what every rank has: see comm/layout.py."""
    most = max(counts)
    return most * (len(counts) + 1) + list(counts).count(most)


def _kernels() -> ModuleType:
    return importlib.import_module("tp_kernels.kernels")


def import_together(group: ParallelGroup, interpreted: bool, asked: str) -> ModuleType:
    """The kernels, imported on all ranks; if that fails on one, all of them raise."""
    problem = ""
    try:
        kernels = _kernels()
        if interpreted != kernels._device.INTERPRETED:
            problem = "TRITON_INTERPRET has changed since tp_kernels.kernels was imported"
    except Exception as error:  # whatever it is, the peers wait for an answer
        problem = f"tp_kernels.kernels cannot be imported: {type(error).__name__}: {error}"
    assert group.rendezvous is not None  # more than one rank
    answers = group.rendezvous.corner("kernels").exchange("import", problem)
    for rank, answer in enumerate(answers):
        if answer:
            raise UnsupportedError(f"implementation={asked}: rank {rank}: {answer}")
    return kernels


def _sizes(like: Tensor) -> tuple[int, int]:
    """(channels, bytes of a chunk) that serve every product on the device of `like`."""
    from tp_kernels.kernels import _gemm
    from tp_kernels.kernels.workspace import DTYPES

    tilings = [
        (_gemm.choose(like.new_empty(0, dtype=dtype), rows), dtype)
        for dtype in DTYPES
        for rows in (1, _gemm.FEW_ROWS + 1)
    ]
    chunk = max(tiling.chunk(dtype) for tiling, dtype in tilings)
    if like.is_cpu:
        return INTERPRETED_CHANNELS, chunk
    # A block may take a multiprocessor: more of them would run one after the other.
    resident = torch.cuda.get_device_properties(like.device).multi_processor_count
    return min(resident, max(tiling.programs for tiling, _ in tilings)), max(chunk, LEAST_CHUNK)
