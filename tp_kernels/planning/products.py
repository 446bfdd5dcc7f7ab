"""The products of this package as subjects of the tuner: tensors, a workspace, clocks.

Times of a GPU are for operands that are not in its L2 cache, as the weights of a layer are not either.
Left: several hosts, and the CUDA graphs in which short products are usually launched.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tp_kernels.comm.cuda_region import CudaRegion
from tp_kernels.comm.errors import UnsupportedError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.layout import split_range, split_sizes
from tp_kernels.comm.symmetric_region import SymmetricRegion
from tp_kernels.kernels._device import INTERPRETED
from tp_kernels.kernels._gemm import Tiling
from tp_kernels.kernels.workspace import Workspace

from .cache import Entry
from .hardware import Hardware
from .tilings import ShapeClass, candidates, workspace_shape
from .tuner import Limits, Progress, Tuned, tune

# Bytes that the device overwrites before a timed call. That empties the L2 cache, and lasts longer (0.2 ms at
# 5 TB/s) than the host takes to launch the call, which would otherwise be part of the time.
BEFORE = 1 << 30


@dataclass(frozen=True)
class Product:
    """x [rows, k] times w [n, k] transposed, on every rank, as part of `operation`; or its gradient of w.

    Gathered or scattered rows are those of all ranks, divided by split_sizes.
    """

    operation: str
    rows: int
    n: int
    k: int
    dtype: torch.dtype

    def shape_class(self, world: int) -> ShapeClass:
        return ShapeClass.of(self.operation, self.rows, self.n, self.k, self.dtype, world)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.operation} {self.rows} x {self.n} x {self.k} {dtype}"


def tune_product(
    group: ParallelGroup,
    product: Product,
    device: torch.device,
    limits: Limits | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Tuned[Tiling]:
    """The fastest tiling of `product` on the devices of `group`; the first candidate is the usual one.

    Collective, and raises, as `tune`; ranks must have equal hardware.
    """
    choices = candidates(Hardware.of(device), product.shape_class(group.size))
    subject = ProductSubject(group, product, device, choices)
    try:
        return tune(group, choices, subject, limits, progress, tile_of)
    finally:
        subject.close()


def tile_of(tiling: Tiling) -> str:
    return f"{tiling.block_m} x {tiling.block_n} x {tiling.block_k}"


def entry(product: Product, tuned: Tuned[Tiling], built_in: Tiling) -> Entry:
    """What the cache keeps of a result."""
    best, usual = tuned.timings[tuned.winner], tuned.timings.get(built_in)
    return Entry(
        tiling=asdict(tuned.winner),
        median_us=round(best.median * 1e6, 3),
        p10_us=round(best.p10 * 1e6, 3),
        p90_us=round(best.p90 * 1e6, 3),
        calls=best.calls,
        built_in_us=round(usual.median * 1e6, 3) if usual is not None else 0.0,
        measured=str(product),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


class ProductSubject:
    """See `Subject`. Construction is collective.

    Args:
        group: of two ranks or more, on one host.
        product: with sizes of at least 1.
        device: of this rank, a CUDA device of its own, or "cpu" in the Triton interpreter.
        choices: all tilings that will be asked for.
        timeout: seconds a kernel waits for another rank.
    """

    def __init__(
        self,
        group: ParallelGroup,
        product: Product,
        device: torch.device,
        choices: Sequence[Tiling],
        timeout: float = 10.0,
    ) -> None:
        if (device.type == "cpu") != INTERPRETED:
            raise UnsupportedError(
                f"{product} on {device}: kernels are interpreted for CPU tensors and only for them; "
                "TRITON_INTERPRET counts when tp_kernels.kernels is imported"
            )
        self.group, self.product, self.device = group, product, device
        self._shape = workspace_shape(choices, product.dtype, group.size)
        self._timeout = timeout
        function = getattr(
            importlib.import_module(f"tp_kernels.kernels.{product.operation}"), product.operation
        )
        self._arguments, self._options, self._out = arguments(
            product, group.rank, group.size, device
        )
        self._function: Callable[..., Any] = function
        self._before: Tensor | None = None
        if device.type == "cuda":
            self._before = torch.empty(BEFORE, dtype=torch.uint8, device=device)
        self._open()

    def prepare(self, tiling: Tiling) -> None:
        if not INTERPRETED:
            self._call(tiling, CompilingWorkspace(self._shape, *self._memory))

    def digest(self, tiling: Tiling) -> str:
        self._out.fill_(torch.nan)  # or what nobody writes would be right from the call before
        self._call(tiling, self._workspace)
        self._workspace.check()
        return hashlib.sha256(self._out.view(torch.uint8).cpu().numpy().tobytes()).hexdigest()

    def ready(self) -> None:
        if self._before is not None:
            torch.cuda.synchronize(self.device)

    def seconds(self, tiling: Tiling) -> float:
        def call() -> None:
            self._call(tiling, self._workspace)

        if self._before is None:
            return wall_seconds(call)
        seconds = device_seconds(call, self._before)
        self._workspace.check()
        return seconds

    def recover(self) -> None:
        self.close()
        self._open()

    def close(self) -> None:
        """Let go of the memory that is shared with the peers."""
        self._close()

    def _call(self, tiling: Tiling, workspace: Workspace) -> None:
        self._function(*self._arguments, workspace, **self._options, tiling=tiling)

    def _open(self) -> None:
        nbytes = self._shape.nbytes
        region = (
            SymmetricRegion(self.group, nbytes)
            if self.device.type == "cpu"
            else CudaRegion(self.group, nbytes, self.device)
        )
        self._close: Callable[[], None] = region.close
        self._memory = (self.group.rank, region.local, region.addresses)
        self._workspace = Workspace(self._shape, *self._memory, timeout=self._timeout)
        region.settle()  # all ranks have constructed theirs


class CompilingWorkspace(Workspace):
    """Compiles and loads a kernel instead of launching it: no rank waits for another."""

    def launch(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        super().launch(_Warmup(kernel), *arguments, **constants)


class _Warmup:
    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile(*arguments: Any, **constants: Any) -> None:
            compiled = self._kernel.warmup(*arguments, grid=grid, **constants)
            # Loads it, which fails if the device has too little memory or too few registers for it.
            compiled.run  # noqa: B018

        return compile


def arguments(
    product: Product, rank: int, world: int, device: torch.device
) -> tuple[list[Tensor], dict[str, Any], Tensor]:
    """What the kernel takes on this rank: operands, options, and of these the memory of its result."""
    rows, n, k, dtype = product.rows, product.n, product.k, product.dtype
    start, stop = split_range(rows, world, rank)
    counts = split_sizes(rows, world)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    if product.operation == "all_gather_weight_gradient":  # sums over rows
        dy, x = operands((n, k, rows), dtype, 0, device)
        out, gathered = empty(n, k), empty(rows, k)
        options: dict[str, Any] = {"counts": counts, "out": out, "gathered": gathered}
        return [x.t()[start:stop].contiguous(), dy.t().contiguous()], options, out
    if product.operation == "all_gather_linear":
        x, w = operands((rows, n, k), dtype, 0, device)
        out, gathered = empty(rows, n), empty(rows, k)
        options = {"counts": counts, "outs": [out], "gathered": gathered}
        return [x[start:stop].contiguous(), w], options, out
    x, w = operands((rows, n, k), dtype, rank, device)
    out = empty(stop - start if product.operation == "linear_reduce_scatter" else rows, n)
    return [x, w], {"out": out}, out


def operands(
    sizes: tuple[int, int, int], dtype: torch.dtype, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """x [M, K] and w [N, K] for `sizes` (M, N, K): random, of very different size, with a product of 0.

    Every column comes twice, with opposite signs in w, in random order. What is left are roundings, so
    another order of summation shows in most elements, however much the result is rounded.
    """
    generator = torch.Generator(device).manual_seed(seed)
    m, n, k = sizes
    half, pairs = k // 2, k // 2 + k % 2

    def random(rows: int) -> Tensor:
        return torch.randn(rows, pairs, generator=generator, device=device)

    scale = torch.randint(-6, 7, (pairs,), generator=generator, device=device).exp2()
    order = torch.randperm(k, generator=generator, device=device)
    x, w = random(m) * scale, random(n)
    x, w = torch.cat([x[:, :half], x], dim=1), torch.cat([-w[:, :half], w], dim=1)
    return x[:, order].to(dtype), w[:, order].to(dtype)


def device_seconds(call: Callable[[], Any], before: Tensor) -> float:
    """By events of the current CUDA stream, after `before` was overwritten."""
    start = torch.cuda.Event(enable_timing=True)
    stop = torch.cuda.Event(enable_timing=True)
    before.zero_()
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def wall_seconds(call: Callable[[], Any]) -> float:
    """Of calls that have finished when they return."""
    start = perf_counter()
    call()
    return perf_counter() - start
