"""How long kernels take on one device, beside what the device can do. No multi-GPU efficiency follows.

Alone: the kernel of rank 0 of W with all flags set ahead, so that no wait lasts, and the memory of peers on
the same device, so that transfers cost its bandwidth instead of that of links. Products are compared with
torch.matmul of the same operands: what the fused kernel adds to the plain one. Reductions are compared with
a copy on the device: bytes that the algorithm loads and stores, over time, beside those of the copy. What
is summed stays in the L2 cache where the buffers of the channels fit into it.

Of products that gather, "fused" is the launch as it is: some programs copy the rows of W ranks, the others
multiply. "gathered" is one with the others only, where all rows are there already: what waits, the order of
tiles and fewer programs cost.

Together: virtual ranks that really exchange, on streams. Of all ranks, from one common start to the last end.

Calls are captured in graphs, contestants take turns in one run, and times are medians over slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.gpu.runner import Check
from tp_kernels.bench.timing import Sample
from tp_kernels.kernels import (
    Workspace,
    WorkspaceShape,
    all_gather,
    all_gather_linear,
    all_reduce,
    all_reduce_rms_norm,
    linear_all_reduce,
    linear_reduce_scatter,
    reduce_scatter,
)
from tp_kernels.kernels._signals import CREDIT, DONE, FINISHED, MOST_RANKS, READY
from tp_kernels.kernels.virtual_ranks import VirtualRanks, workspaces_of_one_process

DEVICE = "cuda"
SLICES, SLICE_SECONDS, MOST_CALLS = 15, 0.02, 50
COPY_BYTES = 1 << 30  # beyond every cache

Function = Callable[[], Any]


@dataclass(frozen=True)
class Product:
    """A fused product, alone: x [rows, inner], w [width, inner] of one rank of `world`."""

    call: Callable[..., Tensor]
    rows: int
    width: int
    inner: int
    world: int = 8
    target: float = 0.95


@dataclass(frozen=True)
class Move:
    """A kernel that moves and adds, alone: x [rows, width] of this rank, and a weight [width].

    moved: (world, bytes of x) -> bytes that the kernel loads and stores.
    """

    call: Callable[[Tensor, Tensor, Workspace], Any]
    moved: Callable[[int, int], float]
    rows: int
    width: int = 8192
    world: int = 8
    target: float = 0.85


@dataclass(frozen=True)
class Gather:
    """all_gather_linear, alone: x [rows / world, inner], w [width, inner] of one rank of `world`."""

    rows: int
    width: int
    inner: int
    world: int = 8
    target: float = 0.8


# Shapes of the tables that GPU libraries publish, of one of 8 ranks; bfloat16.
PRODUCTS = {
    "linear_reduce_scatter 4096x12288x49152": Product(linear_reduce_scatter, 4096, 12288, 6144),
    "linear_reduce_scatter 8192x8192x28672": Product(linear_reduce_scatter, 8192, 8192, 3584),
    "linear_reduce_scatter 512x8192x28672": Product(linear_reduce_scatter, 512, 8192, 3584),
    "linear_all_reduce 64x8192x28672": Product(linear_all_reduce, 64, 8192, 3584),
    "linear_all_reduce 128x8192x28672": Product(linear_all_reduce, 128, 8192, 3584),
}
# Counted in the kernels: every load and store of the exchange, the sum and the result.
MOVES = {
    "all_reduce_2 256 MiB": Move(
        lambda x, _, ws: all_reduce(x, ws, shots=2),
        lambda world, n: (6 * (world - 1) + 2) / world * n,
        rows=16384,
    ),
    "reduce_scatter 256 MiB": Move(
        lambda x, _, ws: reduce_scatter(x, ws),
        lambda world, n: (3 * (world - 1) + 2) / world * n,
        rows=16384,
    ),
    "all_gather 8 x 32 MiB": Move(
        lambda x, _, ws: all_gather(x, ws),
        lambda world, n: (3 * (world - 1) + 2) * n,
        rows=2048,
    ),
    # As all_reduce_2; then s is read again and y written.
    "rms_norm_2 64 MiB": Move(
        lambda x, weight, ws: all_reduce_rms_norm(x, weight, ws, shots=2),
        lambda world, n: ((6 * (world - 1) + 2) / world + 2) * n,
        rows=4096,
    ),
}
# Together: elements of bfloat16 that each of 2 virtual ranks reduces.
LATENCIES = {"all_reduce 16 B": 8, "all_reduce 64 KiB": 32768, "all_reduce 1 MiB": 524288}


# As PRODUCTS: rows of all ranks, width of one. 16 of 132 programs gather, so 0.88 is the most that can be.
GATHERS = {
    "all_gather_linear 4096x49152x12288": Gather(4096, 6144, 12288),
    "all_gather_linear 8192x28672x8192": Gather(8192, 3584, 8192),
    "all_gather_linear 512x28672x8192": Gather(512, 3584, 8192),
}


def checks() -> Iterator[Check]:
    for name, product in PRODUCTS.items():
        run, ahead = partial(time_product, name, product), partial(alone, product)
        yield Check(f"time {name}", run, 90, prepare=ahead)
    for name, gather in GATHERS.items():
        run, ahead = partial(time_gather, name, gather), partial(gather_alone, gather)
        yield Check(f"time {name}", run, 90, prepare=ahead)
    for name, move in MOVES.items():
        yield Check(f"time {name}", partial(time_move, name, move), 90)
    for name, elements in LATENCIES.items():
        yield Check(f"time together {name}", partial(time_together, name, elements), 60)


def alone(product: Product) -> tuple[Tensor, Tensor, list[Workspace], Tensor]:
    """x, w, the workspaces of all ranks, and the result of rank 0."""
    x, w = operands(product.rows, product.width, product.inner)
    workspaces = preset_workspaces(product.world)
    out = product.call(x, w, workspaces[0])
    workspaces[0].check()
    return x, w, workspaces, out


def time_product(name: str, product: Product) -> dict[str, Any]:
    x, w, (workspace, *_peers), out = alone(product)
    # The peers' parts are zero, so what comes out is what rank 0 has computed for itself.
    check_product(out, x[: out.shape[0]], w)
    samples = interleaved(
        {
            "fused": lambda: product.call(x, w, workspace, out=out),
            "matmul": lambda: torch.matmul(x, w.t()),
        }
    )
    workspace.check()
    return product_report(name, samples, product)


def gather_alone(
    gather: Gather,
) -> tuple[Tensor, Tensor, list[Workspace], tuple[list[Tensor], Tensor]]:
    """The rows of all ranks, w, the workspaces of all ranks, and the results of rank 0."""
    whole, w = operands(gather.rows, gather.width, gather.inner)
    workspaces = preset_workspaces(gather.world)
    results = all_gather_linear(whole[: gather.rows // gather.world], w, workspaces[0])
    workspaces[0].check()
    return whole, w, workspaces, results


def time_gather(name: str, gather: Gather) -> dict[str, Any]:
    whole, w, (workspace, *_peers), ((y,), rows) = gather_alone(gather)
    x = whole[: gather.rows // gather.world]

    def fused() -> None:
        all_gather_linear(x, w, workspace, gathered=rows, outs=[y])

    # The peers have sent zeros.
    check_product(y[: len(x)], x, w)
    assert torch.equal(rows[: len(x)], x) and not rows[len(x) :].any(), "wrong rows"
    ready, *_others = preset_workspaces(gather.world)
    preset_arrivals(ready)

    def gathered() -> None:
        with without_senders(ready):
            all_gather_linear(x, w, ready, gathered=whole, outs=[y])

    y.fill_(torch.nan)
    gathered()
    ready.check()
    check_product(y, whole, w)
    samples = interleaved(
        {"fused": fused, "gathered": gathered, "matmul": lambda: torch.matmul(whole, w.t())}
    )
    workspace.check()
    ready.check()
    return product_report(name, samples, gather)


def operands(rows: int, width: int, inner: int, device: str = DEVICE) -> list[Tensor]:
    """x [rows, inner] and w [width, inner]."""
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(size, inner, generator=generator, device=device, dtype=torch.bfloat16)
        for size in (rows, width)
    ]


def check_product(out: Tensor, x: Tensor, w: Tensor) -> None:
    expected = x.float() @ w.float().t()
    magnitude = x.float().abs() @ w.float().abs().t()
    bound = torch.finfo(torch.bfloat16).eps * expected.abs() + 1e-5 * magnitude
    assert bool(((out.float() - expected).abs() <= bound).all()), "wrong product"


def product_report(
    name: str, samples: Mapping[str, Sample], product: Product | Gather
) -> dict[str, Any]:
    flops = 2.0 * product.rows * product.width * product.inner
    return {
        "name": name,
        "kind": "product",
        "samples": {one: sample.to_json() for one, sample in samples.items()},
        "tflops": {one: flops / sample.median / 1e12 for one, sample in samples.items()},
        "ratio": samples["matmul"].median / samples["fused"].median,
        "target": product.target,
    }


def time_move(name: str, move: Move) -> dict[str, Any]:
    x = torch.randn(move.rows, move.width, device=DEVICE).to(torch.bfloat16)
    weight = torch.ones(move.width, device=DEVICE, dtype=torch.bfloat16)
    workspace, *_peers = preset_workspaces(move.world)
    results = move.call(x, weight, workspace)
    workspace.check()
    result = (results[1] if isinstance(results, tuple) else results).view(-1)
    # The peers have sent zeros: each element is rank 0's own, or of a part that a peer would have summed.
    own = torch.zeros_like(result)
    own[: x.numel()] = x.view(-1)[: result.numel()]
    assert bool(((result == own) | (result == 0)).all()), "wrong sum"
    assert int((result == own).sum()) >= x.numel() // move.world, "parts are missing"
    del results, result, own
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    samples = interleaved(
        {"kernel": lambda: move.call(x, weight, workspace), "copy": lambda: target.copy_(source)}
    )
    workspace.check()
    moved = {"kernel": move.moved(move.world, x.nbytes), "copy": 2.0 * COPY_BYTES}
    rates = {one: moved[one] / sample.median for one, sample in samples.items()}
    return {
        "name": name,
        "kind": "move",
        "samples": {one: sample.to_json() for one, sample in samples.items()},
        "gigabytes_per_second": {one: rate / 1e9 for one, rate in rates.items()},
        "ratio": rates["kernel"] / rates["copy"],
        "target": move.target,
    }


def preset_workspaces(world: int) -> list[Workspace]:
    """Of all ranks, with a channel for every multiprocessor; the waits of rank 0 are over for ever."""
    channels = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    device = torch.device(DEVICE, torch.cuda.current_device())
    workspaces = workspaces_of_one_process(WorkspaceShape(world, channels), device)
    preset(workspaces[0], READY.value, MOST_RANKS)
    preset(workspaces[0], CREDIT.value, MOST_RANKS)
    return workspaces


def preset(workspace: Workspace, word: int, count: int) -> None:
    """Set `count` flags of every channel, from the byte `word` on, to what they will never reach."""
    shape = workspace.shape
    signals = workspace.local[: shape.nbytes].view(shape.channels, shape.stride)
    ahead = torch.full((count,), 1 << 30, dtype=torch.int32, device=workspace.local.device)
    signals[:, word : word + 4 * count] = ahead.view(torch.uint8)


def preset_arrivals(workspace: Workspace) -> None:
    """All rows have arrived, for every launch: the programs that multiply are never counted as finished.

    The last of them would put the flags back.
    """
    preset(workspace, DONE.value, 1)
    preset(workspace, FINISHED.value, 1)


@contextmanager
def without_senders(workspace: Workspace) -> Iterator[None]:
    """Launches of kernels that gather have no programs that do."""
    real = workspace.launch

    def launch(kernel: Any, operation: str, programs: int, *given: Any, **constants: Any) -> None:
        changed = list(given)
        at = kernel.arg_names.index("senders")
        changed[at] = 0
        real(kernel, operation, programs - given[at], *changed, **constants)

    with mock.patch.object(workspace, "launch", launch):
        yield


def time_together(
    name: str, elements: int, world: int = 2, reduce: Callable[..., Tensor] = all_reduce
) -> dict[str, Any]:
    ranks = VirtualRanks(world, DEVICE)
    xs = [torch.ones(elements, device=DEVICE, dtype=torch.bfloat16) for _ in range(world)]
    outs = [torch.empty_like(x) for x in xs]

    def call(rank: int, workspace: Workspace) -> Tensor:
        return reduce(xs[rank], workspace, out=outs[rank])

    ranks.rehearse(call)
    graphs = []
    for rank, stream in enumerate(ranks.streams):
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            for _ in range(MOST_CALLS):
                call(rank, ranks.workspaces[rank])
        graphs.append(captured)
    with ranks.muted():  # the first launch of a graph may allocate
        common(ranks, graphs)
    sample = Sample([common(ranks, graphs) / MOST_CALLS for _ in range(SLICES)])
    ranks.check()
    assert all(bool((out == world).all()) for out in outs), "wrong sum"
    return {"name": name, "kind": "together", "samples": {"call": sample.to_json()}}


def common(ranks: VirtualRanks, graphs: list[torch.cuda.CUDAGraph]) -> float:
    """Seconds from a start that all ranks have in common to the end of the last."""
    main = torch.cuda.current_stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(200_000)  # until everything is in the queues
    begin.record(main)
    for stream, captured in zip(ranks.streams, graphs, strict=True):
        stream.wait_event(begin)
        with torch.cuda.stream(stream):
            captured.replay()
        main.wait_stream(stream)
    end.record(main)
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def interleaved(functions: Mapping[str, Function]) -> dict[str, Sample]:
    """Seconds of a call of each function, in turns."""
    replays = {name: _captured(function) for name, function in functions.items()}
    samples = {name: Sample() for name in functions}
    for turn in range(SLICES):
        names = list(functions)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            captured, calls = replays[name]
            samples[name].seconds.append(_elapsed(captured.replay) / calls)
    return samples


def _captured(function: Function) -> tuple[torch.cuda.CUDAGraph, int]:
    """As many calls as fit into a slice, and their number."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    once = _elapsed(function)
    calls = max(1, min(MOST_CALLS, int(SLICE_SECONDS / once)))
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(calls):
            function()
    captured.replay()
    torch.cuda.synchronize()
    return captured, calls


def _elapsed(function: Function) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
