"""Products on Hopper in CUDA C++: right, also when rows come late, between ranks, and how fast.

Skipped, counted, where module _cuda is not built or the device has another compute capability than 9.0.
Sizes are those that the kernels take: others are copied or refused before, which needs no GPU to be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.gpu import times
from tests.gpu.processes import CASES, DEVICE, WORLD, call_ops
from tests.gpu.runner import Check, Skipped
from tests.kernels.body import whole_numbers
from tests.oracle import HALVES, digest
from tp_kernels import Ranks, split_sizes
from tp_kernels.comm.cuda_support import CudaSupport
from tp_kernels.comm.devices import OVERLAP
from tp_kernels.comm.layout import Division
from tp_kernels.comm.row_groups import RowGroups
from tp_kernels.kernels import Workspace, _copies, linear_reduce_scatter
from tp_kernels.kernels.linear_reduce_scatter import reference as scattered
from tp_kernels.kernels.linear_signalled import reference as grouped
from tp_kernels.kernels.virtual_ranks import VirtualRanks
from tp_kernels.native import gemm

# Rows, destinations, size of a group, width, inner.
GROUPS = (
    (37, 3, 5, 19, 24),
    (7, 8, 16, 40, 8),
    (1000, 2, 128, 528, 272),
    (4099, 8, 256, 1024, 512),
)
# Rows, width, inner sizes of the pairs.
SUMS = ((37, 130, (72,)), (300, 520, (136, 64)), (2100, 272, (256,)))
# Rows, widths of the products, inner.
GATHERS = ((37, (130,), 72), (300, (520, 64), 136), (2100, (272,), 256))
CHUNK = 1 << 16  # a tile of 128 x 256 elements in 16 bits
LATE = 2_000_000  # clocks
CALLS = 4
STRAIGHT = [
    replace(case, implementation="cuda")
    for case in CASES
    if case.dtype in HALVES and case.inner % 8 == 0
]


def usable() -> None:
    """Skip the check where there are no such kernels."""
    if why := CudaSupport.current().obstacle("gemm"):
        raise Skipped(why)


def checks() -> Iterator[Check]:
    for name, function in FUNCTIONS.items():
        yield Check(f"hopper {name}", partial(run, function), 120)
    yield Check("processes, hopper ops", ops_between_processes, 150)
    for name, product in PRODUCTS.items():
        yield Check(f"time hopper {name}", partial(run, partial(product, name)), 120)


def run(function: Callable[[], Any]) -> Any:
    usable()
    return function()


def laid_out(w: Tensor, seed: int) -> Tensor:
    """`w` as it is, or with its rows contiguous."""
    return w.t().contiguous().t() if seed % 2 else w


def products_by_groups() -> None:
    """Bits and counters."""
    for seed, (rows, world, size, width, inner) in enumerate(GROUPS):
        groups = RowGroups(split_sizes(rows, world), size)
        for dtype in HALVES:
            x, w, _ = whole_numbers((rows, width, inner), dtype, 0, seed)
            x, w = x.to("cuda"), w.to("cuda")
            w = laid_out(w[: width // 8 * 8], seed) if seed % 2 else w
            out = torch.full((rows, w.shape[0]), torch.nan, dtype=dtype, device="cuda")
            counters = torch.zeros(len(groups), dtype=torch.int32, device="cuda")
            gemm.signalled_linear([x], [w], groups, out, counters, reserved=seed)
            block_m, block_n = gemm.signalled_tile([x], [w])
            tiles = [groups.tiles(g, block_m, block_n, w.shape[0]) for g in range(len(groups))]
            assert counters.tolist() == tiles, (rows, world, dtype)
            expected = grouped([x.cpu()], [w.cpu()], groups)
            assert digest(out.cpu()) == digest(expected), (rows, world, dtype)


def tiles_to_owners() -> None:
    """Bits of linear_reduce_scatter between virtual ranks, back to back, another one late each time."""
    for world in (2, 3):
        ranks = VirtualRanks(world, chunk=CHUNK)
        for seed, (rows, width, inners) in enumerate(SUMS):
            dtype = HALVES[seed % 2]
            drawn = [
                [whole_numbers((rows, width, k), dtype, rank, seed) for k in inners]
                for rank in range(world)
            ]
            bias = drawn[0][0][2] if seed % 2 else None
            moved = [
                ([x.cuda() for x, _, _ in pairs], [laid_out(w.cuda(), seed) for _, w, _ in pairs])
                for pairs in drawn
            ]
            added = None if bias is None else bias.cuda()

            def call(
                late: int, rank: int, workspace: Workspace, moved=moved, added=added
            ) -> Tensor:
                if rank == late:
                    torch.cuda._sleep(LATE)
                xs, ws = moved[rank]
                return gemm.linear_reduce_scatter(xs, ws, workspace, bias=added)

            # With memory for all results: none is to be asked for while a kernel waits for another.
            ranks.rehearse(lambda rank, ws, call=call: [call(-1, rank, ws) for _ in range(CALLS)])
            results = [ranks.launch(partial(call, late % world)) for late in range(CALLS)]
            ranks.check()
            xs = [torch.cat([x for x, _, _ in pairs], 1) for pairs in drawn]
            ws = [torch.cat([w for _, w, _ in pairs], 1) for pairs in drawn]
            for by_rank in results:
                for rank, out in enumerate(by_rank):
                    expected = scattered(xs, ws, bias, rank)
                    assert digest(out.cpu()) == digest(expected), (world, rows, dtype, rank)


def rows_that_come_late() -> None:
    """Bits of all_gather_linear and its weight gradient, of rows that come while the product runs."""
    world = 3
    for seed, (rows, widths, inner) in enumerate(GATHERS):
        counts, dtype = split_sizes(rows, world), HALVES[seed % 2]
        whole = whole_numbers((rows, 8, inner), dtype, 0, seed)[0].cuda()
        ws = [
            laid_out(whole_numbers((1, width // 8 * 8, inner), dtype, 0, seed + i)[1].cuda(), seed)
            for i, width in enumerate(widths)
        ]
        dy = whole_numbers((rows, 8, 64), dtype, 0, seed + 7)[0].cuda()
        for rank in range(world):
            workspaces = times.preset_workspaces(
                world
            )  # all are kept: kernels have their addresses
            workspace = workspaces[rank]
            workspace.staging = (
                torch.empty(whole.nbytes, dtype=torch.uint8, device="cuda"),
            ) * world
            start = sum(counts[:rank])
            x = whole[start : start + counts[rank]]
            with arriving(whole):
                ys, gathered = gemm.awaited_linear(x, ws, workspace, counts=counts)
                dw, again = gemm.awaited_weight_gradient(x, dy, workspace, counts=counts)
            workspace.check()
            assert torch.equal(gathered, whole) and torch.equal(again, whole)
            for y, w in zip(ys, ws, strict=True):
                expected = (whole.float() @ w.float().t()).to(dtype)
                assert digest(y.cpu()) == digest(expected.cpu()), (rows, rank)
            expected = (dy.float().t() @ whole.float()).to(dtype)
            assert digest(dw.cpu()) == digest(expected.cpu()), (rows, rank)


@contextmanager
def arriving(whole: Tensor, delay: int = LATE // 10) -> Iterator[None]:
    """Copies within the device stand in for those of peers: rows come in chunks, each a while later."""

    @contextmanager
    def gathered_by_copies(
        workspace: Workspace, x: Tensor, gathered: Tensor, division: Division
    ) -> Iterator[None]:
        width = x.shape[1]
        mine = division.start(workspace.rank)
        gathered.fill_(torch.nan)
        gathered[mine : mine + x.shape[0]] = x
        stream = workspace.copy_stream()
        stream.wait_stream(torch.cuda.current_stream())
        most = division.most * width
        part = _copies.chunk_of(most, x.element_size())
        source, to = whole.view(-1), gathered.view(-1)
        with torch.cuda.stream(stream):
            for chunk, begin in enumerate(range(0, most, part)):
                torch.cuda._sleep(delay)
                for owner in range(workspace.world):
                    length = min(division.rows(owner) * width - begin, part)
                    if length > 0 and owner != workspace.rank:
                        first = division.start(owner) * width + begin
                        to[first : first + length].copy_(source[first : first + length])
                _copies._raise_flag(workspace.local, chunk + 1)
        yield
        torch.cuda.current_stream().wait_stream(stream)

    with mock.patch.object(_copies, "gathered_by_copies", gathered_by_copies):
        yield


def ops_between_processes() -> dict[str, Any]:
    """The public ops with implementation="cuda", straight to the memory of the other process."""
    usable()
    with Ranks(WORLD, timeout=100.0, env={OVERLAP: "1"}) as ranks:
        by_rank = ranks.run(call_ops, STRAIGHT, DEVICE, "cuda")
    for case, *digests in zip(STRAIGHT, *by_rank, strict=True):
        assert all(one == digests[0] for one in digests), f"{case}: ranks have different bits"
    return {"world": WORLD, "cases": [str(case) for case in STRAIGHT]}


def time_groups(name: str) -> dict[str, Any]:
    product = times.Product(linear_reduce_scatter, 8192, 8192, 3584)  # its sizes
    x, w = times.operands(product.rows, product.width, product.inner)
    groups = RowGroups([product.rows], 1024)
    out = x.new_empty(product.rows, product.width)
    counters = torch.zeros(len(groups), dtype=torch.int32, device="cuda")

    def fused() -> None:
        counters.zero_()
        gemm.signalled_linear([x], [w], groups, out, counters, reserved=0)

    fused()
    times.check_product(out, x, w)
    samples = times.interleaved({"fused": fused, "matmul": lambda: torch.matmul(x, w.t())})
    return times.product_report(f"hopper {name}", samples, product)


def time_owners(name: str) -> dict[str, Any]:
    """With all flags set ahead, as times.py does it."""
    product = times.Product(gemm.linear_reduce_scatter, 8192, 8192, 3584)
    return times.time_product(f"hopper {name}", product)


def time_arrived(name: str) -> dict[str, Any]:
    """With all rows there."""
    gather = times.Gather(8192, 3584, 8192, target=0.95)
    whole, w = times.operands(gather.rows, gather.width, gather.inner)
    workspace, *_peers = times.preset_workspaces(gather.world)
    times.preset_arrivals(workspace)
    x = whole[: gather.rows // gather.world]
    workspace.staging = (torch.empty(x.nbytes, dtype=torch.uint8, device="cuda"),) * gather.world
    y = x.new_empty(gather.rows, gather.width)

    @contextmanager
    def nothing(*_given: Any) -> Iterator[None]:
        yield

    def fused() -> None:
        gemm.awaited_linear(x, w, workspace, gathered=whole, outs=[y])

    with mock.patch.object(_copies, "gathered_by_copies", nothing):
        fused()
        workspace.check()
        times.check_product(y, whole, w)
        samples = times.interleaved({"fused": fused, "matmul": lambda: torch.matmul(whole, w.t())})
    return times.product_report(f"hopper {name}", samples, gather)


FUNCTIONS: dict[str, Callable[[], Any]] = {
    "products by groups": products_by_groups,
    "tiles to their owners": tiles_to_owners,
    "rows that come late": rows_that_come_late,
}
PRODUCTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "signalled_linear 8192x8192x28672": time_groups,
    "linear_reduce_scatter 8192x8192x28672": time_owners,
    "awaited_linear 8192x28672x8192": time_arrived,
}
