"""Products that signal by groups of rows: right, in graphs, really while the product goes on, and how fast.

NCCL refuses ranks that share a device, so ops go through gloo here: what is left to see on several GPUs is
NCCL itself beside the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.gpu import times
from tests.gpu.processes import CASES, WORLD, call_ops
from tests.gpu.runner import Check
from tests.gpu.table import DTYPES
from tests.kernels.body import values, whole_numbers
from tests.oracle import copy_to, digest
from tp_kernels import Ranks, split_sizes
from tp_kernels.comm.process_group import ordered_sum
from tp_kernels.comm.row_groups import RowGroups
from tp_kernels.kernels import linear_signalled, sum_parts, wait_for_group
from tp_kernels.kernels.linear_signalled import reference, tiling_of
from tp_kernels.kernels.wait_for_group import check, new_record

DEVICE = "cuda"
# Rows, destinations, size of a group, width, inner.
SHAPES = (
    (37, 3, 5, 19, 23),
    (7, 8, 16, 40, 8),
    (1000, 2, 128, 528, 272),
    (4099, 8, 256, 1024, 512),
)
OVERLAPPED = [replace(case, implementation="cuda") for case in CASES]


def checks(device: str = DEVICE) -> Iterator[Check]:
    for name, function in FUNCTIONS.items():
        run = partial(function, device)
        yield Check(f"local {name}", run, 90, prepare=run)
    yield Check("groups that are there before the product ends", in_turn, 60)
    yield Check("processes, ops over gloo", ops_over_gloo, 150)
    yield Check("time linear_signalled 8192x8192x28672", time_signalled, 90)


def products(device: str) -> None:
    """Bits and counters, also of replays of a graph with waits on a second stream."""
    for seed, (rows, world, size, width, inner) in enumerate(SHAPES):
        groups = RowGroups(split_sizes(rows, world), size)
        for dtype in DTYPES.values():
            x, w, _ = whole_numbers((rows, width, inner), dtype, 0, seed)
            w = w.t().contiguous().t() if seed % 2 else w
            expected = reference([x], [w], groups)
            given = Call(copy_to(x, device), copy_to(w, device), groups)
            run = given.run if device == "cpu" else captured(given.run)
            for _ in range(2):
                given.out.fill_(torch.nan)
                run()
                check(given.record, 20.0)
                assert digest(given.out.cpu()) == digest(expected), (rows, world, size, dtype)
                assert given.counters.tolist() == given.targets, (rows, world, size, dtype)


class Call:
    """One product in memory of its own."""

    def __init__(self, x: Tensor, w: Tensor, groups: RowGroups) -> None:
        self.x, self.w, self.groups = x, w, groups
        self.out = x.new_empty(groups.total, w.shape[0])
        self.counters = x.new_zeros(len(groups), dtype=torch.int32)
        self.record = new_record(x.device)
        self.beside = torch.cuda.Stream(priority=-1) if x.is_cuda else None
        tiling = tiling_of(x, groups)
        self.targets = [
            groups.tiles(group, tiling.block_m, tiling.block_n, w.shape[0])
            for group in range(len(groups))
        ]

    def run(self, reserved: int = 16, arrived: list[torch.cuda.Event] | None = None) -> None:
        """The product and all waits; what comes next follows both."""
        self.counters.zero_()
        if self.beside is not None:
            self.beside.wait_stream(torch.cuda.current_stream())
        linear_signalled(self.x, self.w, self.groups, self.out, self.counters, reserved=reserved)
        if self.beside is None:
            self.wait()
            return
        with torch.cuda.stream(self.beside):
            self.wait(arrived)
        torch.cuda.current_stream().wait_stream(self.beside)

    def wait(self, arrived: list[torch.cuda.Event] | None = None) -> None:
        for group, tiles in enumerate(self.targets):
            rows = self.out[self.groups.start(group) : self.groups.start(group + 1)]
            wait_for_group(
                "linear_all_reduce", self.counters, rows, self.record,
                group=group, tiles=tiles, rank=0, timeout=20.0,
            )  # fmt: skip
            if arrived is not None:
                arrived[group].record()


def captured(function: Any) -> Any:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def sums(device: str) -> None:
    """The bits of torch's sums on the CPU."""
    for index, (world, count, width) in enumerate(((2, 15, 5), (3, 2500, 11), (8, 1 << 14, 4096))):
        for dtype in DTYPES.values():
            parts, bias = values((world, count), dtype, 0, index), values((width,), dtype, 1, index)
            for used in (None, bias):
                given = [None if t is None else copy_to(t, device) for t in (parts, used)]
                out = sum_parts(*given, given[0].new_empty(count), 3)  # type: ignore[union-attr]
                added = None if used is None else bias[(torch.arange(count) + 3) % width]
                expected = ordered_sum(parts, added, torch.empty(count, dtype=dtype))
                assert digest(out.cpu()) == digest(expected), (world, count, dtype, used is None)


def in_turn() -> dict[str, Any]:
    """The first of eight groups is there in the first half of the product, the last one at its end."""
    x, w = times.operands(8192, 8192, 4096)
    call = Call(x, w, RowGroups([8192], 1024))
    call.run()
    torch.cuda.synchronize()
    arrived = [torch.cuda.Event(enable_timing=True) for _ in call.targets]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call.run(arrived=arrived)
    end.record()
    torch.cuda.synchronize()
    check(call.record, 20.0)
    whole = begin.elapsed_time(end)
    parts = [begin.elapsed_time(event) / whole for event in arrived]
    assert parts == sorted(parts) and parts[0] < 0.5, parts
    return {"milliseconds": whole, "arrived": parts}


def ops_over_gloo() -> dict[str, Any]:
    """The public ops with implementation="cuda", forward and backward."""
    with Ranks(WORLD, timeout=100.0) as ranks:
        by_rank = ranks.run(call_ops, OVERLAPPED, "cuda:0", "signals cuda")
    for case, *digests in zip(OVERLAPPED, *by_rank, strict=True):
        assert all(one == digests[0] for one in digests), f"{case}: ranks have different bits"
    return {"world": WORLD, "cases": [str(case) for case in OVERLAPPED]}


def time_signalled() -> dict[str, Any]:
    """With all multiprocessors, beside torch.matmul: what groups and counters cost."""
    product = times.Product(linear_signalled, 8192, 8192, 3584)
    x, w = times.operands(product.rows, product.width, product.inner)
    call = Call(x, w, RowGroups([product.rows], 1024))

    def fused() -> None:
        call.counters.zero_()
        linear_signalled(x, w, call.groups, call.out, call.counters)

    fused()
    times.check_product(call.out, x, w)
    samples = times.interleaved({"fused": fused, "matmul": lambda: torch.matmul(x, w.t())})
    return times.product_report("linear_signalled 8192x8192x28672", samples, product)


FUNCTIONS = {"products by groups": products, "sums of parts": sums}
