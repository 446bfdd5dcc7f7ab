"""What ranks do in the tests of the products that gather; see body.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests import oracle
from tests.kernels.body import DTYPES, REAL, Kernels, gives_up, kernels, stalled
from tests.oracle import Case, digest
from tp_kernels import ParallelGroup, ShapeError, UnsupportedError, split_sizes
from tp_kernels.comm.symmetric_region import SymmetricRegion

CHUNK = 16 * 16 * 4


def whole_numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Whose sums of products are exact in float32 in any order, but not in 16 bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-31, 32, shape, generator=generator).to(dtype)


def nan(*shape: int, dtype: torch.dtype) -> Tensor:
    """Poisoned memory for a result, so that what nobody writes is seen."""
    return torch.full(shape, torch.nan, dtype=dtype)


class Problem:
    """Operands of all ranks: `shape` is (rows before they are multiplied, inner), `widths` of this rank."""

    def __init__(
        self, k: Kernels, shape: tuple[int, int], widths: tuple[int, ...], dtype: torch.dtype,
        seed: int, unit: int = 1,
    ) -> None:  # fmt: skip
        rows, self.inner = shape
        self.k, self.dtype = k, dtype
        self.counts = [unit * count for count in split_sizes(rows, k.group.size)]
        self.rows = sum(self.counts)
        self.xs = [
            whole_numbers(count, self.inner, dtype=dtype, seed=1009 * seed + peer)
            for peer, count in enumerate(self.counts)
        ]
        self.x = self.xs[k.group.rank]
        mine = 101 * seed + k.group.rank
        self.ws = [whole_numbers(n, self.inner, dtype=dtype, seed=mine + n) for n in widths]
        self.biases = [whole_numbers(n, dtype=dtype, seed=mine - n) / 8 for n in widths]
        self.outs = [nan(self.rows, n, dtype=dtype) for n in widths]
        self.gathered = nan(self.rows, self.inner, dtype=dtype)

    def linear(self, seed: int, **more: Any) -> list[Tensor]:
        module = self.k.module("all_gather_linear")
        bias: Any = self.biases if seed % 2 else None
        ys, gathered = module.all_gather_linear(
            self.x, self.ws, self.k.workspace, counts=self.counts, bias=bias,
            gathered=self.gathered, outs=self.outs, **more,
        )  # fmt: skip
        expected = module.reference(self.xs, self.ws, bias or [None] * len(ys))
        self.k.expect(digest(gathered) == digest(torch.cat(self.xs)), "gathered", seed)
        for index, (y, y_expected) in enumerate(zip(ys, expected, strict=True)):
            same = digest(y) == digest(y_expected)
            self.k.expect(same, "y", index, seed, self.dtype, self.k.group.rank)
        return ys

    def gradient(self, seed: int) -> Tensor:
        """In every way that a result may be asked for."""
        module = self.k.module("all_gather_weight_gradient")
        other = whole_numbers(self.rows, 5 + seed, dtype=self.dtype, seed=seed)
        of_gathered, add = bool(seed & 1), (None, self.dtype, torch.float32)[seed % 3]
        expected = module.reference(self.xs, other, of_gathered)
        into = None if add is None else whole_numbers(*expected.shape, dtype=add, seed=seed)
        if into is not None:
            expected = into.float() + expected
            if seed % 4 > 1:
                into = into.t().contiguous().t()
        out = nan(*expected.shape, dtype=self.dtype) if into is None else None
        dw, gathered = module.all_gather_weight_gradient(
            self.x, other, self.k.workspace, counts=self.counts, of_gathered=of_gathered, out=out,
            accumulate_into=into, gathered=self.gathered,
        )  # fmt: skip
        self.k.expect(digest(gathered) == digest(torch.cat(self.xs)), "gathered", seed)
        self.k.expect(dw is (out if into is None else into), "another result")
        same = digest(dw) == digest(expected.to(dw.dtype))
        self.k.expect(same, "dW", seed, self.dtype, self.k.group.rank)
        return dw

    def run(self, operation: str, seed: int) -> None:
        self.linear(seed) if operation == "all_gather_linear" else self.gradient(seed)


def exact(
    package: str, operation: str, shapes: list[tuple[int, int]], widths: tuple[int, ...],
    **options: Any,
) -> None:  # fmt: skip
    """Every bit, for all dtypes; ranks have multiples of one, two or three rows, and differ in widths."""
    with kernels(package, **{"chunk": CHUNK} | options) as k:
        for dtype in DTYPES:
            for seed, shape in enumerate(shapes):
                mine = tuple(width + k.group.rank for width in widths)
                Problem(k, shape, mine, dtype, seed, 1 + seed % 3).run(operation, seed)


def against_float64(package: str, cases: list[Case], **options: Any) -> None:
    with kernels(package, **{"chunk": CHUNK} | options) as k:
        run = k.module("all_gather_linear").all_gather_linear
        for case in cases:
            args = oracle.shard(case, k.group.size, k.group.rank)
            counts = split_sizes(case.leading[0], k.group.size)
            bias: Any = args.bs if case.biased[0] else None
            ys, _ = run(args.x, args.ws, k.workspace, counts=counts, bias=bias)
            oracle.check(case, {f"y{index}": y for index, y in enumerate(ys)}, k.group)


def activations(package: str, **options: Any) -> None:
    """As torch's function of the result without one, within the error of a few float32 operations."""
    with kernels(package, **{"chunk": CHUNK} | options) as k:
        module = k.module("all_gather_linear")
        for name, function in k.module("_activation").TORCH.items():
            for dtype in DTYPES:
                problem = Problem(k, (5, 3), (20,), dtype, 1)
                w = problem.ws[0] / 128  # about 0, where the functions are curved
                (plain,), _ = module.all_gather_linear(
                    problem.x, w, k.workspace, counts=problem.counts
                )
                (y,), _ = module.all_gather_linear(
                    problem.x, w, k.workspace, counts=problem.counts, activation=name
                )
                expected = function(plain.double())
                # |act(x)| <= |x|. Seven float32 operations, exp() of an argument up to 10 among them, whose
                # relative error is that of the argument times 10; and one rounding to the dtype.
                u32, u = torch.finfo(torch.float32).eps, torch.finfo(dtype).eps / 2
                bound = plain.double().abs() * (32 * u32 + u) + torch.finfo(dtype).tiny
                k.expect(bool(((y.double() - expected).abs() <= bound).all()), name, dtype)


def back_to_back(package: str, operation: str, late: int, **options: Any) -> None:
    """Calls of changing size without a host between them; rank `late` comes last to each of them."""
    with kernels(package, **{"chunk": CHUNK} | options) as k:
        for seed, rows in enumerate((40, 50, 2)):
            if k.group.rank == late:
                time.sleep(0.15)
            Problem(k, (rows, 18), (20,), DTYPES[seed], seed).run(operation, seed)


def slow_rank(package: str, operation: str, slow: int, **options: Any) -> None:
    """Rank `slow` rests after each signal, while the others run as far ahead as they may."""
    with kernels(package, **{"chunk": 256, "channels": 2} | options) as k:
        for seed in range(2):
            problem = Problem(k, (40, 9), (17,), torch.float32, seed)
            if k.group.rank == slow:
                with stalled(k, 0.03):
                    problem.run(operation, seed)
            else:
                problem.run(operation, seed)


@contextmanager
def producer(problem: Problem, seed: int, last: int | None = None) -> Iterator[None]:
    """Gathers instead of the programs of the kernel, which is launched without those.

    One chunk comes whenever a program waits, so what it does not wait for is not there. The channels' chunks
    come in any order; with seed 0 those of the last channel first. `last`: so many in all.
    """
    k, workspace = problem.k, problem.k.workspace
    signals, real = k.module("_signals"), workspace.launch

    def deliveries(part: int, channels: int) -> Iterator[None]:
        flags = [
            workspace.local[c * workspace.shape.stride + signals.DONE.value :][:4].view(torch.int32)
            for c in range(channels)
        ]
        chunks = -(-max(problem.counts) * problem.inner // part)
        pending = {c: list(range(c, chunks, channels)) for c in range(channels)}
        order = Random(seed)
        starts = [sum(problem.counts[:peer]) * problem.inner for peer in range(len(problem.xs))]
        for _ in range(chunks if last is None else last):
            left = [c for c in pending if pending[c]]
            c = order.choice(left) if seed else left[-1]
            chunk = pending[c].pop(0)
            for start, x in zip(starts, problem.xs, strict=True):
                piece = x.view(-1)[chunk * part : (chunk + 1) * part]
                at = start + chunk * part
                problem.gathered.view(-1)[at : at + len(piece)] = piece
            flags[c] += 1
            yield

    def launch(kernel: Any, operation: str, programs: int, *args: Any, **constants: Any) -> None:
        part, channels, senders = (
            kernel.arg_names.index(name) for name in ("part", "channels", "senders")
        )
        arrivals = deliveries(args[part], args[channels])
        changed = list(args)
        changed[senders] = 0
        with mock.patch.object(signals, "rest", partial(next, arrivals, None)):
            real(kernel, operation, programs - args[channels], *changed, **constants)

    with mock.patch.object(workspace, "launch", launch):
        yield


def chunks_in_any_order(
    package: str, operation: str, shape: tuple[int, int], unit: int, **options: Any
) -> None:
    """Products of tiles begin when exactly their rows are there, also if they are of several ranks."""
    with kernels(package, chunk=128, channels=3, **options) as k:
        for seed in range(4):
            problem = Problem(k, shape, (3,), torch.float32, seed, unit)
            with producer(problem, seed):
                problem.run(operation, seed)
        signals = k.module("_signals")
        region = k.workspace.local.view(k.workspace.shape.channels, -1)
        for flag in (signals.DONE.value, signals.FINISHED.value):
            assert not region[:, flag : flag + 4].any(), "flags are not put back"


def own_rows_first(package: str) -> None:
    """Nothing arrives: the products of own rows are there all the same, those of others are not begun."""
    with kernels(package, chunk=128, channels=3, timeout=0.3) as k:
        problem = Problem(k, (48 * k.group.size, 4), (20,), torch.float32, 0)
        begin = time.monotonic()
        with producer(problem, 0, last=0), gives_up("the rows that its own program "):
            problem.linear(0)
        # Programs that gather give up first, since they know for which rank.
        assert time.monotonic() - begin > 2 * k.workspace.timeout
        expected = k.module("all_gather_linear").reference(problem.xs, problem.ws, [None])[0]
        mine = slice(48 * k.group.rank, 48 * (k.group.rank + 1))
        assert torch.equal(problem.outs[0][mine], expected[mine])
        problem.outs[0][mine] = torch.nan
        assert problem.outs[0].isnan().all()


def few_programs(package: str, operation: str) -> None:
    """No more than the workspace allows, where the shape asks for many: ranks may share a GPU."""
    with kernels(package, chunk=CHUNK, channels=3) as k:
        k.workspace.programs = 3
        with mock.patch.object(k.workspace, "launch", wraps=k.workspace.launch) as launch:
            Problem(k, (50, 18), (70,), torch.float32, 1).run(operation, 1)
        _, _, programs, *_ = launch.call_args.args
        assert programs == 3


def absent_rank(package: str, operation: str, absent: int) -> dict[str, int] | None:
    """Rank `absent` does not call: the others raise and keep the record."""
    with kernels(package, chunk=CHUNK) as k:
        Problem(k, (5, 3), (4,), torch.float32, 0).run(operation, 0)
        k.workspace.timeout = 0.3
        if k.group.rank == absent:
            return None
        with gives_up(f"{operation}: rank {k.group.rank} waited for data of rank {absent} "):
            Problem(k, (5, 3), (4,), torch.float32, 0).run(operation, 0)
        names = k.module("_signals").RECORD
        return dict(zip(names, k.workspace.record.tolist(), strict=True))


def mixed() -> None:
    """On one workspace, between the collectives."""
    from tests.kernels.body import OPERATIONS, check

    with kernels(REAL, chunk=CHUNK, channels=3) as k:
        for seed, operation in enumerate(OPERATIONS):
            if (seed + k.group.rank) % 2:
                time.sleep(0.02)
            check(k, operation, (9, 5), DTYPES[seed % 3], seed)
            for name in ("all_gather_linear", "all_gather_weight_gradient"):
                Problem(k, (7 + 9 * seed, 6), (5,), DTYPES[seed % 3], seed).run(name, seed)


def random_gradient(package: str) -> str:
    """Sums whose bits depend on their order, within the bound against float64."""
    with kernels(package, chunk=256) as k:
        counts = split_sizes(50, k.group.size)
        generator = torch.Generator().manual_seed(5)
        parts = [torch.randn(count, 9, generator=generator) for count in counts]
        other = torch.randn(50, 18, generator=generator)
        run = k.module("all_gather_weight_gradient").all_gather_weight_gradient
        dw, gathered = run(parts[k.group.rank], other, k.workspace, counts=counts)
        expected = other.double().t() @ gathered.double()
        bound = (
            other.double().abs().t() @ gathered.double().abs() * 50 * torch.finfo(torch.float32).eps
        )
        assert bool(((dw - expected).abs() <= bound).all())
        return digest(dw)


def refused(package: str = REAL) -> None:
    """Errors come before any signal, so ranks go on together afterwards."""
    x, w = torch.ones(4, 3), torch.ones(5, 3)
    with kernels(package, chunk=CHUNK) as k:
        run = k.module("all_gather_linear").all_gather_linear
        for error, text, args, more in (
            (ShapeError, "expected \\[R_r, K\\]", (x, w.t()), {}),
            (ShapeError, "expected \\[R_r, K\\]", (x, []), {}),
            (ShapeError, "expected \\[5\\]", (x, w), {"bias": torch.ones(4)}),
            (ShapeError, "1 biases for 2 weights", (x, [w, w]), {"bias": [torch.ones(5)]}),
            (ShapeError, "x has 4 rows", (x, w), {"counts": [5, 5]}),
            (ShapeError, "divided as by", (x, w), {"counts": [4, 5]}),
            (ShapeError, "out is", (x, w), {"outs": [torch.ones(1, 1)]}),
            (UnsupportedError, "w is torch.float16", (x, w.half()), {}),
            (UnsupportedError, "torch.float64", (x.double(), w.double()), {}),
            (UnsupportedError, "activation='tanh'", (x, w), {"activation": "tanh"}),
            (UnsupportedError, "2147483648 rows", (x[:1].expand(2**30, 3), w), {}),
        ):
            with pytest.raises(error, match=text):
                run(*args, k.workspace, **more)
        Problem(k, (5, 3), (4,), torch.float32, 0).linear(0)


def refused_gradient(package: str = REAL) -> None:
    x, dy = torch.ones(2, 3), torch.ones(4, 5)
    with kernels(package, chunk=CHUNK) as k:
        run = k.module("all_gather_weight_gradient").all_gather_weight_gradient
        for error, text, args, more in (
            (ShapeError, "expected \\[R_r, K\\]", (x[0], dy), {}),
            (ShapeError, "other 3", (x, dy[:3]), {}),
            (ShapeError, "the result \\(5, 3\\)", (x, dy), {"accumulate_into": torch.ones(3, 5)}),
            (
                UnsupportedError,
                "give one",
                (x, dy),
                {"accumulate_into": dy, "out": torch.ones(5, 3)},
            ),
            (
                UnsupportedError,
                "accumulate_into is torch.float16",
                (x, dy),
                {"accumulate_into": torch.ones(5, 3).half()},
            ),
            (UnsupportedError, "other is torch.float16", (x, dy.half()), {}),
        ):
            with pytest.raises(error, match=text):
                run(*args, k.workspace, **more)
        Problem(k, (5, 3), (4,), torch.float32, 0).gradient(0)


def by_copies(package: str, shapes: list[tuple[int, int]], **options: Any) -> None:
    """Through staging memory, of every rank's rows between NaN; several calls after each other."""
    with ParallelGroup(timeout=30) as group, kernels(package, group, chunk=CHUNK, **options) as k:
        region = SymmetricRegion(group, 1 << 14)
        region.local.fill_(0xFF)
        region.settle()
        k.workspace.staging = tuple(region.parts)
        module = k.module("all_gather_linear")
        for dtype in DTYPES:
            for seed, shape in enumerate(shapes):
                problem = Problem(k, shape, (20, 3), dtype, seed, 1 + seed % 3)
                if k.group.rank == 0:
                    time.sleep(0.03)
                problem.linear(seed, producer="copies")
        x, w = torch.ones(1000, 6), torch.ones(2, 6)
        for producer, text in (
            ("copies", "needs 24000 bytes of staging memory, the workspace has 16384"),
            ("host", "producer='host'"),
        ):
            with pytest.raises(UnsupportedError, match=text):
                module.all_gather_linear(x, w, k.workspace, producer=producer)
        region.close()


def meet_and_count(package: str, late: int) -> list[float]:
    """When each rank came to a barrier, and left it."""
    times = []
    with kernels(package) as k:
        for _ in range(3):
            if k.group.rank == late:
                time.sleep(0.2)
            times.append(time.monotonic())
            k.module("barrier").barrier(k.workspace)
            times.append(time.monotonic())
    return times
