"""What kernels in CUDA C++ are called with, and what is refused before that. Nothing is launched."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tp_kernels import CollectiveTimeoutError, ShapeError, UnsupportedError, native, split_sizes
from tp_kernels.comm import workspace as layout
from tp_kernels.comm.workspace import OPERATIONS, Workspace, WorkspaceShape
from tp_kernels.native import _extension, collectives, wait

STREAM = 4711
Launches = list[tuple[str, dict[str, Any]]]


def make(rank: int = 0, world: int = 2, multicast: int = 0, **options: int) -> Workspace:
    shape = WorkspaceShape(world, **{"channels": 4, "chunk": 1 << 14} | options)
    parts = [torch.zeros(shape.nbytes, dtype=torch.uint8) for _ in range(world)]
    addresses = [part.data_ptr() for part in parts]
    return Workspace(shape, rank, parts[rank], addresses, timeout=2.5, multicast=multicast)


@pytest.fixture
def launches(monkeypatch) -> Launches:
    """What `_cuda` would have been called with: its functions and classes keep their arguments."""
    made: Launches = []

    def record(name: str) -> Callable[..., None]:
        return lambda **arguments: made.append((name, arguments))

    names = ("all_reduce", "reduce_scatter", "all_gather", "all_reduce_rms_norm")
    module = SimpleNamespace(
        **{name: record(name) for name in (*names, "wait_for", "write_flag")},
        Workspace=SimpleNamespace,
        Division=lambda *sizes: sizes,
        Wait=lambda *names: names,
    )

    @contextmanager
    def stream_on(where: str, device: torch.device) -> Iterator[int]:
        yield STREAM

    for user in (collectives, wait):
        monkeypatch.setattr(user, "extension", lambda: module)
        monkeypatch.setattr(user, "stream_on", stream_on)
    return made


def test_all_reduce(launches):
    workspace = make(rank=1, multicast=4096)
    x = torch.ones(100, 50, dtype=torch.bfloat16)
    for shots in (1, 2, "switch"):
        out = native.all_reduce(x, workspace, shots=shots)
        name, given = launches.pop()
        assert name == "all_reduce" and out.shape == x.shape
        kernel = given.pop("workspace")
        assert vars(kernel) == {
            "table": workspace.table.data_ptr(),
            "record": workspace.record.data_ptr(),
            "stride": workspace.shape.stride,
            "chunk": 1 << 14,
            "timeout": 2_500_000_000,
            "rank": 1,
            "world": 2,
            "depth": 2,
            "operation": OPERATIONS["all_reduce"],
        }
        assert given == {
            "way": {1: "one_shot", 2: "two_shots", "switch": "by_switch"}[shots],
            "type": "bfloat16",
            "x": x.data_ptr(),
            "out": out.data_ptr(),
            "bytes": 10000,
            # A tile of 4 KiB in as few channels as have one, of what a rank sums.
            "part": 4096,
            "bias": 0,
            "width": 0,
            "multicast": 4096,
            "blocks": 2 if shots == 2 else 3,
            "stream": STREAM,
        }


def test_bias_of_all_reduce(launches):
    bias = torch.ones(100)[::2]
    out = native.all_reduce(torch.ones(3, 50), make(), bias=bias)
    given = launches.pop()[1]
    assert (given["width"], out.shape) == (50, (3, 50)) and given["bias"] != bias.data_ptr()
    assert torch.equal(
        native.all_reduce(torch.ones(3, 50), make(world=1), bias=bias), torch.full((3, 50), 2.0)
    )


def test_size_decides_about_shots(launches):
    workspace = make()
    for elements, way in ((1 << 16, "one_shot"), ((1 << 16) + 1, "two_shots")):
        native.all_reduce(torch.ones(elements), workspace)
        assert launches.pop()[1]["way"] == way
    native.all_reduce(torch.ones(1 << 17), make(depth=1))
    assert launches.pop()[1]["way"] == "one_shot"


def test_in_place_and_strided(launches):
    workspace, x = make(), torch.ones(4, 6)
    assert native.all_reduce(x, workspace, out=x) is x
    assert launches[-1][1]["x"] == launches[-1][1]["out"] == x.data_ptr()
    native.all_reduce(x.t(), workspace)
    assert launches[-1][1]["x"] != x.data_ptr()  # a copy in order


@pytest.mark.parametrize("rows", [1, 7, 8])
def test_reduce_scatter(launches, rows):
    for rank in range(3):
        out = native.reduce_scatter(torch.ones(rows, 5, 2), make(rank, 3))
        assert out.shape == (split_sizes(rows, 3)[rank], 5, 2)
        name, given = launches.pop()
        # small, unit, ranks that have one more; in bytes
        assert given["division"] == (rows // 3 * 40, 40, rows % 3)
        assert (name, given["part"], given["blocks"]) == ("reduce_scatter", 4096, 1)


@pytest.mark.parametrize(
    ("dtype", "piece"), [(torch.int8, 1), (torch.float16, 2), (torch.complex128, 4)]
)
def test_all_gather(launches, dtype, piece):
    x = torch.ones(3, 7, dtype=dtype)
    out = native.all_gather(x, make(1, 3), 8)
    _, given = launches.pop()
    row = 7 * dtype.itemsize
    assert out.shape == (8, 7) and given["piece"] == piece
    assert given["division"] == (2 * row, row, 2)


def test_all_reduce_rms_norm(launches):
    x, residual = torch.ones(6, 1, 11), torch.ones(6, 1, 11)
    weight, scale = torch.ones(11), torch.tensor(0.5)
    y, s = native.all_reduce_rms_norm(
        x, weight, make(), residual=residual, epsilon=1e-3, shots=2, scale=scale
    )
    assert (y.dtype, s.dtype) == (torch.float8_e4m3fn, x.dtype) and y.shape == s.shape == x.shape
    name, given = launches.pop()
    del given["workspace"]
    assert name == "all_reduce_rms_norm" and given == {
        "way": "two_shots",
        "type": "float32",
        "x": x.data_ptr(),
        "bias": 0,
        "residual": residual.data_ptr(),
        "weight": weight.data_ptr(),
        "scale": scale.data_ptr(),
        "y": y.data_ptr(),
        "s": s.data_ptr(),
        "rows": 6,
        "width": 11,
        "epsilon": 1e-3,
        "part": 1,  # rows: every channel has some
        "blocks": 3,
        "stream": STREAM,
    }
    y, s = native.all_reduce_rms_norm(x, weight, make())
    assert y.dtype == x.dtype and launches.pop()[1]["scale"] == 0


@pytest.mark.parametrize(("width", "itemsize", "pitch"), [(1, 2, 16), (8, 2, 16), (9, 2, 32)])
def test_rows_start_lines(width, itemsize, pitch):
    assert collectives.norm_pitch(width, itemsize) == pitch


def test_rows_with_their_padding_fit_into_a_chunk(launches):
    """Of 36 bytes, in lines of 48."""
    workspace = make(channels=1, chunk=96)
    native.all_reduce_rms_norm(torch.ones(5, 9), torch.ones(9), workspace, shots=1)
    assert launches.pop()[1]["part"] == 2


def test_sizes_beyond_32_bits(launches):
    """Of tensors that take no memory."""
    workspace = make(channels=128, chunk=1 << 20)
    x = torch.empty(1, 1 << 16, dtype=torch.bfloat16, device="meta").expand(1 << 17, -1)
    counts = split_sizes(x.shape[0], 2)
    division = collectives._in_bytes(counts, x.shape[1] * x.element_size())
    assert division.start(1) == 1 << 33 and division.most == 1 << 33
    assert workspace.divide(division.most, 1, collectives.TILE) == (1 << 20, 128)
    odd = collectives._in_bytes(split_sizes((1 << 33) + 1, 2), 2)
    assert (odd.start(1), odd.rows(1)) == (2 * ((1 << 32) + 1), 1 << 33)
    with pytest.raises(ShapeError, match="at most 1 GiB"):
        WorkspaceShape(2, chunk=1 << 31)


def test_nothing_to_exchange(launches):
    x = torch.arange(6.0).view(2, 3)
    alone = make(world=1)
    assert native.all_reduce(x, alone) is not x and torch.equal(native.all_reduce(x, alone), x)
    assert native.all_reduce(x, alone, out=x) is x
    assert torch.equal(native.reduce_scatter(x, alone), x)
    assert torch.equal(native.all_gather(x, alone), x)
    empty, workspace = torch.empty(0, 3), make()
    assert native.all_reduce(empty, workspace).shape == (0, 3)
    assert native.reduce_scatter(empty, workspace).shape == (0, 3)
    assert native.all_gather(empty, workspace).shape == (0, 3)
    y, s = native.all_reduce_rms_norm(empty, torch.ones(3), workspace)
    assert y.shape == s.shape == (0, 3)
    assert launches == []
    native.all_reduce_rms_norm(x, torch.ones(3), alone)  # a norm all the same
    assert len(launches) == 1


X = torch.ones(6, 4)
REFUSED: list[tuple[Callable[[Workspace], Any], type[Exception], str]] = [
    (lambda w: native.all_reduce(X.double(), w), UnsupportedError, "float64; supported are"),
    (lambda w: native.all_reduce(X.to("meta"), w), UnsupportedError, "x is on meta"),
    (lambda w: native.all_reduce(X, w, shots=3), UnsupportedError, "shots=3; use 1, 2 or None"),
    (lambda w: native.all_reduce(X, w, shots="both"), UnsupportedError, "shots=both"),
    (lambda w: native.all_reduce(X, w, shots="switch"), UnsupportedError, "multicast address"),
    (lambda w: native.all_reduce(X, make(depth=1), shots=2), UnsupportedError, "depth 2"),
    (
        lambda w: native.all_reduce(X, make(depth=1, multicast=64), shots="switch"),
        UnsupportedError,
        "depth 2",
    ),
    (lambda w: native.all_reduce(X, w, out=X[1:]), ShapeError, r"out is \(5, 4\)"),
    (lambda w: native.all_reduce(X, w, out=X.half()), ShapeError, "float16"),
    (lambda w: native.all_reduce(X, w, out=torch.ones(4, 6).t()), ShapeError, "contiguous"),
    (lambda w: _in_place(X.t(), w), ShapeError, "summed in place"),
    (lambda w: native.all_reduce(X, w, bias=X[0, 1:]), ShapeError, r"bias is \(3,\)"),
    (lambda w: native.all_reduce(X, w, bias=X[0].half()), ShapeError, "float16"),
    (lambda w: native.all_reduce(X, w, bias=X[0].to("meta")), UnsupportedError, "bias is on meta"),
    (
        lambda w: native.all_reduce(X, make(multicast=64), shots="switch", bias=X[0]),
        UnsupportedError,
        "adds no bias",
    ),
    (lambda w: native.reduce_scatter(X[0, 0], w), ShapeError, "a scalar"),
    (lambda w: native.reduce_scatter(X.int(), w), UnsupportedError, "int32"),
    (lambda w: native.reduce_scatter(X, w, out=X), ShapeError, r"result is \(3, 4\)"),
    (lambda w: native.all_gather(X[0, 0], w), ShapeError, "a scalar"),
    (lambda w: native.all_gather(X, w, 5), ShapeError, "its share of rows=5 is 3"),
    (lambda w: native.all_gather(X, w, out=X), ShapeError, r"result is \(12, 4\)"),
    (lambda w: native.all_reduce_rms_norm(X, X[0, :3], w), ShapeError, "weight is"),
    (lambda w: native.all_reduce_rms_norm(X[0, 0], X[0], w), ShapeError, "expected"),
    (lambda w: _norm(w, bias=X), ShapeError, "bias is"),
    (lambda w: _norm(w, residual=X.half()), ShapeError, "residual is"),
    (lambda w: _norm(w, residual=X.to("meta")), UnsupportedError, "residual is on meta"),
    (lambda w: _norm(w, scale=X[0]), ShapeError, "expected one float32"),
    (lambda w: _norm(w, scale=X[0, 0].double()), ShapeError, "scale is .* torch.float64"),
    (lambda w: _norm(w, shots=4), UnsupportedError, "shots=4"),
    (lambda w: _norm(make(chunk=8 * 16), wide=True), UnsupportedError, "fit into a chunk"),
]


def _in_place(x: Tensor, workspace: Workspace) -> Tensor:
    return native.all_reduce(x, workspace, out=x)


def _norm(workspace: Workspace, wide: bool = False, **options: Any) -> Any:
    x = torch.ones(2, 40) if wide else X
    return native.all_reduce_rms_norm(x, x[0], workspace, **options)


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_refused_before_any_launch(launches, call, error, message):
    with pytest.raises(error, match=message):
        call(make())
    assert launches == []


def test_waits_and_flags(launches):
    flags, record = torch.zeros(4, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    native.wait_for(
        flags[2], 2**31, record, timeout=0.5, operation="all_gather", rank=1, group=3, peer=2
    )
    assert launches.pop() == (
        "wait_for",
        {
            "flag": flags[2].data_ptr(),
            "expected": -(2**31),  # counters wrap
            "record": record.data_ptr(),
            "timeout": 500_000_000,
            "wait": (1, OPERATIONS["all_gather"], 3, 0, 2),
            "stream": STREAM,
        },
    )
    native.write_flag(flags[1:2], -1)
    given = {"flag": flags[1].data_ptr(), "value": -1, "stream": STREAM}
    assert launches.pop() == ("write_flag", given)


FLAG, RECORD = torch.zeros(1, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)


@pytest.mark.parametrize(
    ("flag", "record", "operation", "error", "message"),
    [
        (FLAG.long(), RECORD, "barrier", ShapeError, "flag is .* torch.int64"),
        (RECORD, RECORD, "barrier", ShapeError, r"flag is \(8,\)"),
        (FLAG, FLAG, "barrier", ShapeError, r"record is \(1,\)"),
        (FLAG, torch.zeros(16, dtype=torch.int32)[::2], "barrier", ShapeError, "in a row"),
        (FLAG, RECORD.to("meta"), "barrier", UnsupportedError, "record on meta"),
        (FLAG, RECORD, "sum", UnsupportedError, "operation='sum'; use one of all_reduce"),
    ],
)
def test_waits_that_are_refused(launches, flag, record, operation, error, message):
    with pytest.raises(error, match=message):
        native.wait_for(flag, 1, record, timeout=1, operation=operation)
    assert launches == []


def test_tensors_in_host_memory_are_refused(monkeypatch):
    monkeypatch.setattr(collectives, "extension", SimpleNamespace)
    with pytest.raises(
        UnsupportedError, match=r"all_reduce on rank 0: tensors are on cpu.*Triton|TRITON"
    ):
        native.all_reduce(X, make())


def test_extension_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "tp_kernels._cuda", None)
    with pytest.raises(UnsupportedError, match="_cuda is not built"):
        _extension.extension()


def test_triton_is_not_needed():
    code = "import sys; sys.modules['triton'] = None; import tp_kernels.native"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_failure_of_a_workspace_is_told_without_triton():
    workspace = make()
    workspace.record.copy_(torch.tensor([2, 0, 1, 3, layout.READY, 1, 6, 5]))
    with pytest.raises(
        CollectiveTimeoutError, match="all_reduce: rank 0 waited for data of rank 1"
    ):
        workspace.check()


@pytest.fixture
def cuda() -> Any:
    try:
        return importlib.import_module("tp_kernels._cuda")
    except ModuleNotFoundError:
        pytest.skip("nvcc is not installed: _cuda is not built")


def test_constants_are_those_of_the_kernels(cuda):
    constants = cuda.constants()
    for name in ("READY", "CREDIT", "EPOCH", "DONE", "FINISHED", "SIGNAL_BYTES", "MOST_RANKS"):
        assert constants[name] == getattr(layout, name), name
    assert constants["RECORD"] == list(range(len(layout.RECORD)))
    assert (
        *("state", "rank", "operation", "channel", "signal", "peer", "expected", "seen"),
    ) == layout.RECORD
    assert (constants["INTACT"], constants["FAILED"]) == (0, 2)


def test_places_are_those_of_the_kernels(cuda):
    shape = WorkspaceShape(4, channels=8, chunk=1 << 20, depth=4)
    kernel = cuda.Workspace(0, 0, shape.stride, shape.chunk, 0, 1, 4, 4, 1)
    # The last chunk of the last channel ends where the region does.
    assert kernel.buffer_offset(7, 3, 3) + shape.chunk == shape.nbytes
    assert kernel.buffer_offset(0, 0, 0) == layout.SIGNAL_BYTES
    division = cuda.Division(2**33, 40, 3)
    assert [division.start(4), division.rows(2), division.rows(3)] == [
        4 * 2**33 + 120,
        2**33 + 40,
        2**33,
    ]


@pytest.mark.parametrize(("part", "blocks"), [(0, 1), (24, 1), (16, 0), (16, 3)])
def test_blocks_without_a_round_are_refused(cuda, part, blocks):
    """Their epoch would not be kept; before CUDA is asked for anything."""
    workspace = cuda.Workspace(0, 0, 1024, 64, 0, 0, 2, 2, 1)
    with pytest.raises(ValueError, match="blocks"):
        cuda.all_reduce("one_shot", "float32", 0, 0, 32, part, 0, 0, 0, workspace, blocks, 0)
    with pytest.raises(ValueError, match="blocks"):
        cuda.reduce_scatter("float32", 0, 0, cuda.Division(32, 1, 0), part, workspace, blocks, 0)


def test_launch_without_a_device_names_kernel_and_grid(cuda):
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here: this is about a launch without one")
    workspace = cuda.Workspace(0, 0, 1024, 64, 0, 0, 2, 2, 1)
    with pytest.raises(RuntimeError, match="all_reduce two_shots with 1 blocks of 32 threads: "):
        cuda.all_reduce("two_shots", "float16", 0, 0, 32, 16, 0, 0, 0, workspace, 1, 0)
