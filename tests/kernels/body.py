"""What ranks do in the tests of kernels. Every function runs in each rank of an interpreted world.

`package` is where the kernels come from: the real ones, or a copy with a defect that a test must find.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.oracle import digest
from tp_kernels import CollectiveTimeoutError, ParallelGroup, split_range, split_sizes
from tp_kernels import all_reduce as host_all_reduce
from tp_kernels.comm.symmetric_region import SymmetricRegion
from tp_kernels.comm.workspace import SIGNAL_BYTES
from tp_kernels.kernels._rounds import length_of

REAL = "tp_kernels.kernels"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPSILON = 1e-5
OPERATIONS = (
    "all_reduce_1", "all_reduce_2", "reduce_scatter", "all_gather", "rms_norm_1", "rms_norm_2",
)  # fmt: skip


@dataclass
class Kernels:
    """The kernels of a package with a workspace of this rank, called by the names in OPERATIONS."""

    package: str
    group: ParallelGroup
    workspace: Any
    failures: list[Any] = field(default_factory=list)

    def expect(self, holds: bool, *what: Any) -> None:
        """Assert at the end: a rank that stopped here would keep the others waiting."""
        if not holds:
            self.failures.append(what)

    def module(self, name: str) -> Any:
        return importlib.import_module(f"{self.package}.{name}")

    def call(self, operation: str, x: Tensor, **more: Any) -> tuple[Tensor, ...]:
        name, _, shots = operation.rpartition("_")
        if name == "all_reduce":
            out = torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)
            run = self.module("all_reduce").all_reduce
            return (run(x, self.workspace, out=out, shots=int(shots)),)
        if name == "rms_norm":
            run = self.module("all_reduce_rms_norm").all_reduce_rms_norm
            extra = {"weight": parameters(x)["weight"], "epsilon": EPSILON} | more
            return run(x, workspace=self.workspace, shots=int(shots), **extra)
        run = getattr(self.module(operation), operation)
        return (run(x, self.workspace, **more),)


@contextmanager
def kernels(
    package: str = REAL,
    group: ParallelGroup | None = None,
    *,
    channels: int = 2,
    chunk: int = 256,
    depth: int = 2,
    timeout: float = 20.0,
    epoch: int = 0,
) -> Iterator[Kernels]:
    """A workspace whose buffers are full of NaN; collective."""
    module = importlib.import_module(f"{package}.workspace")
    own = ParallelGroup(timeout=30) if group is None else None
    group = group or own
    assert group is not None
    shape = module.WorkspaceShape(group.size, channels, chunk, depth)
    region = SymmetricRegion(group, shape.nbytes)
    # Signals stay zero.
    region.local.view(channels, shape.stride)[:, SIGNAL_BYTES:] = 0xFF
    workspace = module.Workspace(
        shape, group.rank, region.local, region.addresses, timeout=timeout, epoch=epoch
    )
    region.settle()
    k = Kernels(package, group, workspace)
    try:
        yield k
        assert not k.failures, k.failures
    finally:
        region.close()
        if own is not None:
            own.close()


def values(shape: tuple[int, ...], dtype: torch.dtype, rank: int, seed: int) -> Tensor:
    """Numbers of very different size, so that another order of summation has other bits."""
    generator = torch.Generator().manual_seed(1009 * seed + rank)
    x = torch.randn(shape, generator=generator)
    return (x * torch.exp2(torch.randint(-6, 6, shape, generator=generator))).to(dtype)


def whole_numbers(
    shape: tuple[int, int, int], dtype: torch.dtype, rank: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """x, w, bias: products are exact in float32 in any order, but not in 16 bits, nor are sums over ranks."""
    rows, width, inner = shape
    generator = torch.Generator().manual_seed(1009 * seed + rank)

    def draw(*sizes: int) -> Tensor:
        return torch.randint(-31, 32, sizes, generator=generator)

    x, w = draw(rows, inner), draw(width, inner)
    scale = 1.0 if dtype == torch.float16 else 2.0 ** (7 * rank - 7)
    bias = torch.randint(-999, 999, (width,), generator=torch.Generator().manual_seed(seed))
    return (x * scale).to(dtype), w.to(dtype), bias.to(dtype) / 8


def parameters(x: Tensor) -> dict[str, Tensor]:
    """Of the norm; equal on all ranks."""
    return {
        "weight": values(x.shape[-1:], x.dtype, 0, 7),
        "bias": values(x.shape[-1:], x.dtype, 0, 8),
        "residual": values(tuple(x.shape), x.dtype, 0, 9),
    }


def check(
    k: Kernels, operation: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0
) -> list[str]:
    """Call with random numbers and compare every bit; digests of what all ranks must have alike."""
    size, rank = k.group.size, k.group.rank
    module = k.module("all_reduce_rms_norm" if "rms_norm" in operation else operation.rstrip("_12"))
    where = (operation, shape, dtype, seed, rank)
    if operation == "all_gather":
        parts = [
            values((count, *shape[1:]), dtype, peer, seed)
            for peer, count in enumerate(split_sizes(shape[0], size))
        ]
        (whole,) = k.call(operation, parts[rank], rows=shape[0])
        k.expect(digest(whole) == digest(module.reference(parts)), *where)
        return [digest(whole)]
    xs = [values(shape, dtype, peer, seed) for peer in range(size)]
    kept = xs[rank].clone()
    if operation.startswith("all_reduce"):
        (total,) = k.call(operation, xs[rank])
        k.expect(digest(total) == digest(module.reference(xs)), *where)
        k.expect(digest(xs[rank]) == digest(kept), *where, "x has changed")
        return [digest(total)]
    if operation == "reduce_scatter":
        (part,) = k.call(operation, xs[rank])
        k.expect(digest(part) == digest(module.reference(xs, rank)), *where)
        start, stop = split_range(shape[0], size, rank)
        k.expect(digest(part) == digest(k.module("all_reduce").reference(xs)[start:stop]), *where)
        return []
    p = parameters(xs[0])
    given = [{}, {"bias": p["bias"]}, {"residual": p["residual"]}, dict(p)][seed % 4]
    y, s = k.call(operation, xs[rank], **given)
    y_expected, s_expected = module.reference(
        xs, **{"weight": p["weight"]} | given, epsilon=EPSILON
    )
    k.expect(digest(s) == digest(s_expected), *where, "s")
    # The mean has another order of summation than torch: s is exact, so only roundings of the scale
    # (fp32), the unit row and the product remain.
    eps32, eps = torch.finfo(torch.float32).eps, torch.finfo(dtype).eps
    allowed = y_expected.double().abs() * ((shape[-1] + 4) * eps32 + 1.1 * eps)
    excess = (y.double() - y_expected.double()).abs() - allowed - torch.finfo(dtype).tiny
    k.expect(bool((excess <= 0).all()), *where, "y")
    return [digest(y), digest(s)]


# Bodies of tests, which mutants have to fail.


def bits(
    package: str,
    operation: str,
    shapes: list[tuple[int, ...]],
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    **options: Any,
) -> list[str]:
    """Every dtype and shape: the reference's bits, on all ranks."""
    with kernels(package, **options) as k:
        return [
            line
            for dtype in dtypes
            for seed, shape in enumerate(shapes)
            for line in check(k, operation, shape, dtype, seed)
        ]


def back_to_back(package: str, operation: str, late: int, **options: Any) -> list[str]:
    """Calls of changing size without a host between them; rank `late` comes last to each of them."""
    with kernels(package, **options) as k:
        digests = []
        for seed, rows in enumerate((5, 13, 2)):
            if k.group.rank == late:
                time.sleep(0.3)
            digests += check(k, operation, (rows, 12), torch.float32, seed)
        return digests


def slow_rank(package: str, operation: str, slow: int, **options: Any) -> list[str]:
    """Rank `slow` rests after each signal it sends or sees, while the others run as far ahead as they may.

    What must not happen before a signal and what must not happen after it is then seen to happen.
    """
    with kernels(package, **options) as k, stalled(k) if k.group.rank == slow else nullcontext():
        return [
            line for seed in range(2) for line in check(k, operation, (2, 60), torch.float32, seed)
        ]


@contextmanager
def stalled(k: Kernels, seconds: float = 0.1) -> Iterator[None]:
    """Kernels rest after each publish and observe."""

    def resting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = function(*args)
            time.sleep(seconds)
            return result

        return call

    real = k.module("_signals")
    with ExitStack() as stack:
        for module in [m for name, m in sys.modules.items() if name.startswith(f"{k.package}.")]:
            for name in ("publish", "observe"):
                if module is not real and hasattr(module, name):
                    patch = mock.patch.object(module, name, resting(getattr(real, name)))
                    stack.enter_context(patch)
        yield


def mixed(package: str = REAL) -> list[str]:
    """All kernels in turn on one workspace, and on two workspaces of one group."""
    digests = []
    with (
        ParallelGroup(timeout=30) as group,
        kernels(package, group) as first,
        kernels(package, group, channels=3, chunk=64) as second,
    ):
        for seed, operation in enumerate(OPERATIONS):
            for k, rows in ((first, 9), (second, 14), (first, 2)):
                if (seed + group.rank) % 3 == 0:
                    time.sleep(0.02)
                digests += check(k, operation, (rows, 5), DTYPES[seed % 3], seed)
    return digests


def absent_rank(package: str, operation: str, absent: int, **options: Any) -> dict[str, int] | None:
    """Rank `absent` does not call: the others raise, keep the record, and raise again at once."""
    with kernels(package, **options) as k:
        check(k, operation, (4, 4), torch.float32)
        k.workspace.timeout = 0.3
        if k.group.rank == absent:
            return None
        x = torch.ones(4, 4)
        for _ in range(2):
            with gives_up(f"waited for data of rank {absent} "):
                k.call(operation, x)
        signals = k.module("_signals")
        return dict(zip(signals.RECORD, k.workspace.record.tolist(), strict=True))


def no_credit(package: str, operation: str) -> dict[str, int] | None:
    """Rank 1 ends after it has sent its data: the others have a result, but cannot send any more."""
    with kernels(package, depth=1) as k:
        x = torch.ones(4, 4)
        if k.group.rank == 1:
            module = k.module("_gather" if operation == "all_gather" else operation.rstrip("_12"))
            real = module.publish

            def publish(*args: Any) -> None:
                if args[3] != k.module("_signals").CREDIT:
                    real(*args)

            with mock.patch.object(module, "publish", publish):
                k.call(operation, x)
            return None
        k.call(operation, x)
        k.workspace.timeout = 0.3
        with gives_up("waited for credit of rank 1 "):
            k.call(operation, x)
        signals = k.module("_signals")
        return dict(zip(signals.RECORD, k.workspace.record.tolist(), strict=True))


def late_for_one(package: str, operation: str) -> None:
    """Rank 2 comes too late for rank 0, not for rank 1: rank 1 gets no numbers from what rank 0 gave up."""
    with kernels(package) as k:
        rendezvous, rank = k.group.rendezvous, k.group.rank
        assert rendezvous is not None
        if rank == 2:
            rendezvous.get("gave up", owner=0)
        k.workspace.timeout = (0.3, 4.0, 1.0)[rank]
        with gives_up():
            k.call(operation, torch.ones(3, 60))
        if rank == 0:
            rendezvous.put("gave up", "")


@triton.jit
def length(count, first, out):  # type: ignore[no-untyped-def]
    tl.store(out, length_of(tl.load(count), tl.load(first), 512))


def lengths() -> None:
    """Of a rank without rows, where another has rows of more than 2^31 elements: too many to try."""
    out = torch.zeros(1, dtype=torch.int32)
    for count, first, expected in ((700, 0, 512), (700, 512, 188), (0, 512, 0), (0, 3 << 30, 0)):
        length[(1,)](torch.tensor([count]), torch.tensor([first]), out)
        assert out.item() == expected, (count, first, out)


@contextmanager
def gives_up(match: str = "") -> Iterator[None]:
    """As pytest.raises; its own error cannot be sent to another process."""
    message = None
    try:
        yield
    except CollectiveTimeoutError as error:
        message = str(error)
    assert message is not None and match in message, message


def host_bits() -> None:
    """all_reduce has the bits of the package's engine, also of numbers beyond the normal ones."""
    special = torch.tensor(
        [0.0, -0.0, 1e-40, -1e-45, 3e38, -3e38, float("inf"), 65504.0, 6e-8, 1e-39]
    )
    with kernels() as k:
        for dtype in DTYPES:
            for seed in range(3):
                x = values((100,), dtype, k.group.rank, seed)
                x[seed::7] = special.to(dtype)[torch.arange(len(x[seed::7])) % len(special)]
                for shots in (1, 2):
                    (total,) = k.call(f"all_reduce_{shots}", x)
                    theirs = host_all_reduce(x, k.group)
                    assert torch.equal(total.isnan(), theirs.isnan())
                    assert digest(total.nan_to_num(7)) == digest(theirs.nan_to_num(7))


def layouts() -> None:
    """Non-contiguous and offset inputs, results in place and given, dtypes that are only moved, nothing."""
    with kernels() as k:
        run = k.module("all_reduce").all_reduce
        size, rank = k.group.size, k.group.rank
        x = values((6, 4), torch.float32, 0, 0)
        for laid in (x.t(), x[:, 1:], x[::2], torch.cat([x.view(-1), x[0, :1]])[1:]):
            assert digest(run(laid, k.workspace)) == digest(laid.contiguous() * size)
        mine = x.clone()
        assert run(mine, k.workspace, out=mine) is mine and digest(mine) == digest(x * size)
        gather = k.module("all_gather").all_gather
        for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.complex128):
            parts = [torch.arange(15).view(5, 3).add(peer).to(dtype) for peer in range(size)]
            assert torch.equal(gather(parts[rank], k.workspace), torch.cat(parts)), dtype
        k.group.slot.barrier()  # the peers' last credits are here
        before = k.workspace.local.clone()
        for operation in OPERATIONS:  # of nothing: no launch, so no signals either
            (empty, *_) = k.call(operation, torch.ones(0, 4))
            assert empty.shape == (0, 4)
        k.group.slot.barrier()
        assert torch.equal(k.workspace.local, before)


def of_copy(directory: str, package: str, test: str, *args: Any, **options: Any) -> Any:
    """Run a body, "file.function", with the kernels of `package` in `directory`."""
    file, _, function = test.partition(".")
    sys.path.insert(0, directory)
    try:
        importlib.invalidate_caches()
        module = importlib.import_module(f"tests.kernels.{file}")
        return getattr(module, function)(package, *args, **options)
    finally:
        sys.path.remove(directory)
