"""Kernels in CUDA C++: the entries of the collectives with them, waits and flags, times, sanitizers.

Skipped, counted, where module _cuda is not built. The switch needs several GPUs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import which
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.gpu import collectives, times
from tests.gpu.entry import Kernel
from tests.gpu.runner import Check, Skipped
from tests.kernels.body import EPSILON
from tp_kernels import UnsupportedError, kernels, native
from tp_kernels.bench.timing import Sample
from tp_kernels.comm.workspace import OPERATIONS, RECORD, Workspace
from tp_kernels.kernels.virtual_ranks import VirtualRanks
from tp_kernels.native._extension import extension

ROOT = Path(__file__).parents[2]
DEVICE = "cuda"
ROUND_TRIPS = 100
SANITIZER = "compute-sanitizer"


def built() -> None:
    """Skip the check if there are no kernels."""
    try:
        extension()
    except UnsupportedError as error:
        raise Skipped(str(error)) from None


def calling(function: Callable[..., Any]) -> Callable[[Workspace, SimpleNamespace], Any]:
    def call(workspace: Workspace, operands: SimpleNamespace) -> Any:
        built()
        return function(workspace, operands)

    return call


def norm(shots: int, workspace: Workspace, o: SimpleNamespace) -> tuple[Tensor, Tensor]:
    return native.all_reduce_rms_norm(
        o.x,
        o.weight,
        workspace,
        bias=o.bias,
        residual=o.residual,
        epsilon=EPSILON,
        shots=shots,
    )


CALLS: dict[str, Callable[[Workspace, SimpleNamespace], Any]] = {
    "all_reduce_1": lambda ws, o: (native.all_reduce(o.x, ws, out=o.out, shots=1),),
    "all_reduce_2": lambda ws, o: (native.all_reduce(o.x, ws, out=o.out, shots=2),),
    "reduce_scatter": lambda ws, o: (native.reduce_scatter(o.x, ws, out=o.out),),
    "all_gather": lambda ws, o: (native.all_gather(o.x, ws, o.rows, out=o.out),),
    "rms_norm_1": partial(norm, 1),
    "rms_norm_2": partial(norm, 2),
}
KERNELS: dict[str, Kernel] = {
    f"native {name}": replace(kernel, call=calling(CALLS[name]))
    for name, kernel in collectives.KERNELS.items()
}
# As in times.py: the same bytes are moved.
MOVES = {
    "native all_reduce_2 256 MiB": replace(
        times.MOVES["all_reduce_2 256 MiB"], call=lambda x, _, ws: native.all_reduce(x, ws, shots=2)
    ),
    "native reduce_scatter 256 MiB": replace(
        times.MOVES["reduce_scatter 256 MiB"], call=lambda x, _, ws: native.reduce_scatter(x, ws)
    ),
    "native all_gather 8 x 32 MiB": replace(
        times.MOVES["all_gather 8 x 32 MiB"], call=lambda x, _, ws: native.all_gather(x, ws)
    ),
    "native rms_norm_2 64 MiB": replace(
        times.MOVES["rms_norm_2 64 MiB"],
        call=lambda x, weight, ws: native.all_reduce_rms_norm(x, weight, ws, shots=2),
    ),
}


def checks() -> Iterator[Check]:
    yield Check("native and Triton in turns", in_turns, 60)
    yield Check("native waits and flags", waits, 30)
    for name, move in MOVES.items():
        yield Check(f"time {name}", partial(time_move, name, move), 90)
    for name, elements in times.LATENCIES.items():
        yield Check(f"time together native {name}", partial(time_together, name, elements), 60)
    yield Check("time native flags", time_flags, 60)
    for tool in ("memcheck", "racecheck"):
        yield Check(f"{SANITIZER} {tool}", partial(sanitized, tool), 120)


def in_turns() -> None:
    """Kernels of both kinds in one workspace, without a host between them."""
    built()
    ranks = VirtualRanks(2, DEVICE, channels=2, chunk=1 << 12)
    xs = [torch.full((9000,), rank + 1.0, device=DEVICE) for rank in range(2)]

    def call(rank: int, workspace: Workspace) -> list[Tensor]:
        x, results = xs[rank], []
        for shots in (1, 2) * 4:
            results.append(kernels.all_reduce(x, workspace, shots=shots))
            results.append(native.all_reduce(x, workspace, shots=shots))
            results.append(kernels.all_gather(x, workspace))
            results.append(native.all_gather(x, workspace))
        return results

    gathered = torch.cat(xs)
    for results in ranks.run(call):
        for index, result in enumerate(results):
            expected = gathered if index % 4 > 1 else torch.full_like(xs[0], 3.0)
            assert torch.equal(result, expected), f"result {index}"


def waits() -> dict[str, int]:
    """A stream goes on when another has written the flag, and after its time with a record."""
    built()
    flag, record, data, seen = (torch.zeros(8, dtype=torch.int32, device=DEVICE) for _ in range(4))
    waiting, writing = torch.cuda.Stream(), torch.cuda.Stream()
    native.wait_for(flag[:1], 0, record, timeout=1, operation="barrier")  # loaded
    native.write_flag(flag[1:2], 1)
    torch.cuda.synchronize()
    for epoch in range(1, 50):
        with torch.cuda.stream(waiting):
            native.wait_for(flag[:1], epoch, record, timeout=5, operation="barrier")
            seen.copy_(data)
        with torch.cuda.stream(writing):
            torch.cuda._sleep(100_000)
            data.fill_(epoch)
            native.write_flag(flag[:1], epoch)
        torch.cuda.synchronize()
        assert seen.tolist() == [epoch] * 8 and not record.any()
    with torch.cuda.stream(waiting):
        native.wait_for(flag[:1], 99, record, timeout=0.2, operation="barrier", rank=3, group=4)
    torch.cuda.synchronize()
    found = dict(zip(RECORD, record.tolist(), strict=True))
    assert found == {
        "state": 2,
        "rank": 3,
        "operation": OPERATIONS["barrier"],
        "channel": 4,
        "signal": 0,
        "peer": 0,
        "expected": 99,
        "seen": 49,
    }, found
    return found


def time_move(name: str, move: times.Move) -> dict[str, Any]:
    built()
    return times.time_move(name, move)


def time_together(name: str, elements: int) -> dict[str, Any]:
    built()
    return times.time_together(f"native {name}", elements, reduce=native.all_reduce)


def time_flags() -> dict[str, Any]:
    """From a flag that is written to the stream behind the wait for it, between two streams in turn."""
    built()
    flags, record = (
        torch.zeros(2, dtype=torch.int32, device=DEVICE),
        torch.zeros(len(RECORD), dtype=torch.int32, device=DEVICE),
    )
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    done = 0

    def play() -> float:
        nonlocal done
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[0]):
            torch.cuda._sleep(60_000_000)  # 30 ms: until everything is in the queues
            begin.record()
        for epoch in range(done + 1, done + ROUND_TRIPS + 1):
            with torch.cuda.stream(streams[0]):
                native.write_flag(flags[:1], epoch)
                native.wait_for(flags[1:], epoch, record, timeout=5, operation="barrier")
            with torch.cuda.stream(streams[1]):
                native.wait_for(flags[:1], epoch, record, timeout=5, operation="barrier")
                native.write_flag(flags[1:], epoch)
        done += ROUND_TRIPS
        with torch.cuda.stream(streams[0]):
            end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / (2 * ROUND_TRIPS)

    play()
    sample = Sample([play() for _ in range(times.SLICES)])
    assert not record.any(), record.tolist()
    return {"name": "native flags", "kind": "together", "samples": {"one way": sample.to_json()}}


def sanitized(tool: str) -> None:
    """Every kernel alone, its flags set ahead: a sanitizer may run one kernel after the other."""
    built()
    found = which(SANITIZER) or which(SANITIZER, path="/usr/local/cuda/bin")
    if found is None:
        raise Skipped(f"{SANITIZER} is not installed")
    done = subprocess.run(
        [
            *(found, "--tool", tool, "--error-exitcode", "9"),
            # torch and others ask the driver for what it may not have.
            *(("--report-api-errors", "no") if tool == "memcheck" else ()),
            *(sys.executable, "-m", "tests.gpu.native"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,  # less than the check: nobody else would end it
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def every_kernel_alone() -> None:
    """With sizes and addresses that 16 does not divide."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        workspace, *_peers = times.preset_workspaces(3)
        x = torch.ones(1 + 40 * 13, dtype=dtype, device=DEVICE)[1:].view(40, 13)
        for shots in (1, 2):
            native.all_reduce(x, workspace, shots=shots)
            native.all_reduce_rms_norm(x, x[0].clone(), workspace, residual=x, shots=shots)
        native.reduce_scatter(x, workspace)
        native.all_gather(x, workspace)
        workspace.check()


if __name__ == "__main__":
    every_kernel_alone()
