"""How long kernels take on one device, beside what the device can do. No multi-GPU efficiency follows.

Alone: the kernel of rank 0 of W with all flags set ahead, so that no wait lasts, and the memory of peers on
the same device, so that transfers cost its bandwidth instead of that of links. Products are compared with
torch.matmul of the same operands: what the fused kernel adds to the plain one. Reductions are compared with
a copy on the device: bytes that the algorithm loads and stores, over time, beside those of the copy. What
is summed stays in the L2 cache where the buffers of the channels fit into it.

Together: virtual ranks that really exchange, on streams. Of all ranks, from one common start to the last end.

Calls are captured in graphs, contestants take turns in one run, and times are medians over slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.gpu.runner import Check
from tp_kernels.bench.timing import Sample
from tp_kernels.kernels import (
    Workspace,
    WorkspaceShape,
    all_gather,
    all_reduce,
    all_reduce_rms_norm,
    linear_all_reduce,
    linear_reduce_scatter,
    reduce_scatter,
)
from tp_kernels.kernels._signals import CREDIT, MOST_RANKS, READY
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


def checks() -> Iterator[Check]:
    for name, product in PRODUCTS.items():
        yield Check(f"time {name}", partial(time_product, name, product), 90)
    for name, move in MOVES.items():
        yield Check(f"time {name}", partial(time_move, name, move), 90)
    for name, elements in LATENCIES.items():
        yield Check(f"time together {name}", partial(time_together, name, elements), 60)


def time_product(name: str, product: Product) -> dict[str, Any]:
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)

    x, w = draw(product.rows, product.inner), draw(product.width, product.inner)
    workspace, *_peers = preset_workspaces(product.world)
    out = product.call(x, w, workspace)
    workspace.check()
    # The peers' parts are zero, so what comes out is what rank 0 has computed for itself.
    mine = x[: out.shape[0]].float() @ w.float().t()
    magnitude = x[: out.shape[0]].float().abs() @ w.float().abs().t()
    bound = torch.finfo(torch.bfloat16).eps * mine.abs() + 1e-5 * magnitude
    assert bool(((out.float() - mine).abs() <= bound).all()), "wrong product"
    del mine, magnitude, bound
    samples = interleaved(
        {
            "fused": lambda: product.call(x, w, workspace, out=out),
            "matmul": lambda: torch.matmul(x, w.t()),
        }
    )
    workspace.check()
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
    shape = WorkspaceShape(world, channels)
    device = torch.device(DEVICE, torch.cuda.current_device())
    workspaces = workspaces_of_one_process(shape, device)
    signals = workspaces[0].local[: shape.nbytes].view(shape.channels, shape.stride)
    ahead = torch.full((MOST_RANKS,), 1 << 30, dtype=torch.int32).view(torch.uint8)
    for word in (READY.value, CREDIT.value):
        signals[:, word : word + 4 * MOST_RANKS] = ahead.to(device)
    return workspaces


def time_together(name: str, elements: int, world: int = 2) -> dict[str, Any]:
    ranks = VirtualRanks(world, DEVICE)
    xs = [torch.ones(elements, device=DEVICE, dtype=torch.bfloat16) for _ in range(world)]
    outs = [torch.empty_like(x) for x in xs]

    def call(rank: int, workspace: Workspace) -> Tensor:
        return all_reduce(xs[rank], workspace, out=outs[rank])

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
