"""Kernels and ops between processes that share one device, through the package's CUDA region.

Their contexts take turns on the device, so every wait lasts a time slice: few calls, small shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from tests import oracle
from tests.gpu.entry import draw, faults, on_device
from tests.gpu.runner import Check
from tests.gpu.table import DTYPES, KERNELS
from tests.oracle import Case
from tp_kernels import ParallelGroup, Ranks, UnsupportedError, dispatch, explain
from tp_kernels.comm.cuda_region import CudaRegion
from tp_kernels.comm.devices import OVERLAP
from tp_kernels.comm.regions import new_region, region_obstacle
from tp_kernels.comm.symmetric_region import SymmetricRegion
from tp_kernels.kernels import Workspace, WorkspaceShape, all_gather_linear
from tp_kernels.kernels._signals import SIGNAL_BYTES
from tp_kernels.pipeline import PipelineCommunicator

WORLD = 2
DEVICE = "cuda:0"


def _cases() -> list[Case]:
    """Of every op, sizes that 16 divides and that it does not, and the ways that gradients go."""
    large: dict[str, Any] = {
        "leading": (300,),
        "inner": 272,
        "outs": (528,),
        "dtype": torch.bfloat16,
    }
    small: dict[str, Any] = {"leading": (7, 3), "inner": 37, "outs": (19,), "layout": "strided"}
    cases = [
        replace(Case(op, **sizes), implementation="triton", seed=seed)
        for seed, op in enumerate(oracle.OPERATIONS)
        for sizes in (large, small)
    ]
    several: dict[str, Any] = {"outs": (528, 64), "biased": (True, True), "gathered": "redo"}
    cases.append(replace(cases[0], **several))
    half = {"dtype": torch.float16, "layout": "transposed", "frozen": "b"}
    return [*cases, replace(cases[-2], **half)]


CASES = _cases()


def checks() -> Iterator[Check]:
    names = [name for name, kernel in KERNELS.items() if not kernel.repeats]
    yield Check("processes, all kernels", partial(between_processes, names), 150)
    yield Check("processes, rows by the copy engine", copies_between_processes, 100)
    yield Check("processes, ops", ops_between_processes, 150)
    yield Check("processes, messages of a pipeline", messages_between_processes, 100)
    yield Check("processes without leave to share a device", refused, 60)


def between_processes(names: list[str]) -> dict[str, Any]:
    with Ranks(WORLD, timeout=100.0, env={OVERLAP: "1"}) as ranks:
        by_rank = ranks.run(exchange, names, list(DTYPES), DEVICE)
    found = [f"rank {rank}: {line}" for rank, lines in enumerate(by_rank) for line in lines]
    assert not found, "\n".join(found)
    return {"world": WORLD, "kernels": names}


def copies_between_processes() -> dict[str, Any]:
    with Ranks(WORLD, timeout=80.0, env={OVERLAP: "1"}) as ranks:
        by_rank = ranks.run(gather_by_copies, DEVICE)
    found = [f"rank {rank}: {line}" for rank, lines in enumerate(by_rank) for line in lines]
    assert not found, "\n".join(found)
    return {"world": WORLD}


def gather_by_copies(device: str, shapes: int | None = None) -> list[str]:
    """Body of a rank: all_gather_linear with producer="copies", three times in a row; what was wrong."""
    kernel, found, staged = KERNELS["all_gather_linear"], [], 1 << 20
    size = WorkspaceShape(WORLD, 4, kernel.chunk, kernel.depth)
    with ParallelGroup(timeout=60) as group:
        for seed, shape in enumerate(kernel.small[:shapes]):
            region = new_region(group, device, size.nbytes + staged)
            staging = [part[size.nbytes :] for part in region.parts]
            workspace = Workspace(
                size, group.rank, region.local, region.addresses, timeout=30, staging=staging
            )
            operands = draw(kernel, group.size, shape, torch.bfloat16, seed)
            mine = on_device(operands[group.rank], device)
            region.settle()
            for _ in range(3):
                *ys, gathered = call_by_copies(workspace, mine)
            workspace.check()
            found += faults(kernel, {group.rank: (*ys, gathered)}, kernel.answers(operands))
            region.settle()
            region.close()
    return found


def call_by_copies(workspace: Workspace, o: Any) -> tuple[torch.Tensor, ...]:
    ys, gathered = all_gather_linear(
        o.x, o.w, workspace, counts=o.counts, bias=o.bias, activation=o.activation, producer="copies"
    )  # fmt: skip
    return (*ys, gathered)


def ops_between_processes() -> dict[str, Any]:
    """The public ops with implementation="triton", forward and backward, and that "auto" could choose it."""
    with Ranks(WORLD, timeout=100.0, env={OVERLAP: "1"}) as ranks:
        by_rank = ranks.run(call_ops, CASES, DEVICE)
    for case, *digests in zip(CASES, *by_rank, strict=True):
        assert all(one == digests[0] for one in digests), f"{case}: ranks have different bits"
    return {"world": WORLD, "cases": [str(case) for case in CASES]}


def call_ops(cases: Sequence[Case], device: str, way: str = "") -> list[dict[str, str]]:
    """Body of a rank: every case within the bounds of tests/oracle.py; digests of what ranks have alike.

    way: of "cuda": "cuda" straight to the peers, "signals cuda" by the process group.
    """
    digests = []
    if device != "cpu":
        torch.cuda.set_device(device)  # before the group is made
        # Gradients of weights are torch's products; these roundings are not in the bounds.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    with ParallelGroup(timeout=60) as group:
        for case in cases:
            group.reset_stats()
            results = oracle.compute(case, group, poisoned=True, device=device)
            group.check()
            digests.append(oracle.check(case, results, group))
            name = case.op + (".backward" if case.op == "copy_linear" else "")
            assert set(group.stats()["calls"][name]) == {case.implementation}, group.stats()
            assert not way or set(group.workspaces) == {way}, list(group.workspaces)
            if device != "cpu" and case.implementation == "triton":
                with mock.patch.object(dispatch, "TRITON_PROVEN", True):  # as is to be shown here
                    choice = explain(
                        case.op,
                        rows=case.rows,
                        in_features=case.inner,
                        out_features=case.outs,
                        group=group,
                        dtype=case.dtype,
                        device="cuda",
                    )
                assert choice.implementation == "triton", str(choice)
    return digests


def messages_between_processes() -> dict[str, Any]:
    with Ranks(WORLD, timeout=80.0, env={OVERLAP: "1"}) as ranks:
        explained = ranks.run(exchange_messages, DEVICE)
    return {"world": WORLD, "route": explained[0]}


def exchange_messages(device: str, make: Callable[..., Any] | None = None) -> str:
    """Body of a rank: tensors computed on the device, shorter and longer than the ring, there and back."""
    make = make or partial(PipelineCommunicator, device_route="put")
    if device != "cpu":
        torch.cuda.set_device(device)  # before the group is made
    with ParallelGroup(timeout=60) as group, make(group, device_bytes=1 << 20, timeout=30) as comm:
        for mb, elements in enumerate((1, 1000, 1 << 18, 0, 3 << 18, 77)):
            x = torch.arange(elements, device=device).sin()
            expected = (x * 2 + mb).cos()
            if comm.rank == 0:
                comm.send_forward({"x": x, "on host": torch.tensor([mb])}, micro_batch=mb)
                comm.flush()
                x.fill_(float("nan"))
                got = comm.recv_backward(micro_batch=mb)
            else:
                given = comm.recv_forward(micro_batch=mb)
                assert given["x"].device == x.device and given["on host"].tolist() == [mb]
                got = (given["x"] * 2 + mb).cos()
                comm.send_backward(got, micro_batch=mb)
            assert torch.equal(got, expected), f"micro-batch {mb}"
        return str(comm.explain())


def refused() -> dict[str, str]:
    with Ranks(WORLD, env={OVERLAP: "0"}) as ranks:
        messages = ranks.run(refusal)
    assert all(OVERLAP in message for message in messages), messages
    return {"message": messages[0]}


def refusal() -> str:
    """What a rank is told that must not share its device."""
    with ParallelGroup(timeout=60) as group:
        assert OVERLAP in str(region_obstacle(group, "cuda"))
        try:
            CudaRegion(group, 4096, DEVICE)
        except UnsupportedError as error:
            return str(error)
    return "not refused"


def exchange(
    names: list[str], dtypes: list[str], device: str, shapes: int | None = None, channels: int = 4
) -> list[str]:
    """Body of a rank: every kernel in every dtype on its first `shapes` small shapes; what was wrong."""
    found = []
    with ParallelGroup(timeout=60) as group:
        for name in names:
            for dtype in dtypes:
                given = KERNELS[name].small[:shapes]
                for seed, shape in enumerate(given):
                    call = one_call(group, name, shape, dtype, seed, device, channels)
                    found += [f"{name} {dtype} {shape}: {fault}" for fault in call]
    return found


def one_call(
    group: ParallelGroup, name: str, shape: Any, dtype: str, seed: int, device: str, channels: int
) -> list[str]:
    """A kernel three times in a workspace of its own; what was wrong on this rank."""
    kernel = KERNELS[name]
    size = WorkspaceShape(group.size, channels, kernel.chunk, kernel.depth)
    gpu = device != "cpu"
    region = CudaRegion(group, size.nbytes, device) if gpu else SymmetricRegion(group, size.nbytes)
    try:
        region.local.view(channels, size.stride)[:, SIGNAL_BYTES.value :] = 0xFF
        operands = draw(kernel, group.size, shape, DTYPES[dtype], seed)
        mine = on_device(operands[group.rank], device)
        if gpu:  # compile and load before anybody waits: this workspace has failed already
            idle = Workspace(size, group.rank, region.local, region.addresses)
            idle.record.fill_(2)
            kernel.call(idle, mine)
        workspace = Workspace(size, group.rank, region.local, region.addresses, timeout=30)
        region.settle()
        for _ in range(3):
            results = kernel.call(workspace, mine)
        workspace.check()
        found = faults(kernel, {group.rank: results}, kernel.answers(operands))
        region.settle()  # nobody lets go of what a peer's kernel uses
        return found
    finally:
        region.close()
