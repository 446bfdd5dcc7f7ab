"""Which products run on Hopper, with what they are called, and what is refused. Nothing is launched."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tp_kernels import ShapeError, UnsupportedError
from tp_kernels.comm.cuda_support import CudaSupport
from tp_kernels.comm.row_groups import RowGroups
from tp_kernels.comm.workspace import Workspace, WorkspaceShape
from tp_kernels.native import _products, gemm
from tp_kernels.native._products import (
    BLOCK_K,
    CLOCKS,
    KERNELS,
    LARGE,
    SMALL,
    SMALL_SHARED,
    Layout,
    choose,
    layouts,
    tiles_of,
)

MULTIPROCESSORS = 132


def make(rank: int = 0, world: int = 2, staging: int = 0, **options: int) -> Workspace:
    shape = WorkspaceShape(world, **{"channels": 256} | options)
    parts = [torch.zeros(shape.nbytes, dtype=torch.uint8) for _ in range(world)]
    addresses = [part.data_ptr() for part in parts]
    rows = [torch.zeros(staging, dtype=torch.uint8) for _ in range(world if staging else 0)]
    return Workspace(shape, rank, parts[rank], addresses, timeout=2.5, staging=rows)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype)


@pytest.fixture
def launches(monkeypatch) -> dict[str, Any]:
    """Arguments of the function of `_cuda` that would have been called; CPU tensors pass for CUDA's."""
    made: dict[str, Any] = {}
    names = ("signalled_product", "awaited_products", "sent_products")
    module = SimpleNamespace(
        **{name: lambda made_by=name, **given: made.update(given, name=made_by) for name in names},
        ProductKind=lambda *kind: kind,
        ProductMatrix=lambda *matrix: matrix,
        ProductPair=lambda a, b: (a, b),
        Division=lambda *sizes: sizes,
        Workspace=lambda **fields: fields,
    )

    @contextmanager
    def stream_on(where: str, device: torch.device) -> Iterator[int]:
        yield 4711

    monkeypatch.setattr(gemm, "extension", lambda: module)
    monkeypatch.setattr(gemm, "stream_on", stream_on)
    monkeypatch.setattr(gemm, "on_gpu", lambda x: True)
    monkeypatch.setattr(gemm, "multiprocessors", lambda x: MULTIPROCESSORS)
    return made


# What TMA loads.


def test_layouts_of_ordinary_matrices():
    assert layouts((100, 64), (64, 1), 0, 2) == [Layout(True, 64)]
    assert layouts((64, 100), (1, 64), 32, 2) == [Layout(False, 64)]
    assert layouts((100, 60), (64, 1), 16, 2) == [Layout(True, 64)]  # a part of a wider one


def test_layouts_of_lines_and_columns():
    assert layouts((1, 30), (30, 1), 0, 2) == [Layout(True, 32)]
    assert layouts((30, 1), (8, 1), 0, 2) == [Layout(True, 8)]
    assert layouts((1, 30), (1, 8), 0, 2) == [Layout(False, 8)]
    assert layouts((1, 1), (1, 1), 0, 2) == [Layout(True, 8), Layout(False, 8)]


@pytest.mark.parametrize(
    ("shape", "strides", "address"),
    [
        ((100, 64), (64, 1), 8),  # the base
        ((100, 60), (60, 1), 0),  # the distance of rows
        ((100, 64), (128, 2), 0),  # nothing contiguous
        ((100, 64), (0, 1), 0),  # expanded
        ((100, 64), (32, 1), 0),  # rows that overlap
        ((100, 64), (2**39, 1), 0),  # too far
    ],
)
def test_what_tma_does_not_load(shape, strides, address):
    assert layouts(shape, strides, address, 2) == []


def test_sizes_beyond_32_bits():
    rows, columns = 2**31 - 1, 4096
    assert layouts((rows, columns), (columns, 1), 0, 2) == [Layout(True, columns)]
    assert tiles_of(LARGE, rows, columns) == 2**24 * 16
    assert gemm._blocks("here", 2**31 - 1, 100) == 100
    with pytest.raises(UnsupportedError, match=r"here: 2147483648 tiles, 2\^31 or more.*triton"):
        gemm._blocks("here", 2**31, 100)


def huge(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(
    ("x", "w", "why"),
    [
        (
            random(8, 64, dtype=torch.float32),
            random(8, 64),
            "x.0. is torch.float32: .* bfloat16 and",
        ),
        (
            random(8, 64),
            random(8, 64, dtype=torch.float16),
            "x.0. is torch.bfloat16, w.0. torch.float16",
        ),
        (random(8, 64, 2), random(8, 64), "3 dimensions"),
        (random(8, 0), random(8, 0), r"\(8, 0\): there is nothing to load"),
        (
            random(8, 60),
            random(8, 60),
            r"x.0. of shape \(8, 60\) has strides \(60, 1\) .* 16 bytes",
        ),
        (random(64, 8).t(), random(8, 64), r"layouts: .* \(K, K\) or \(K, rows\)"),
        (huge(2**31, 8), huge(8, 8), r"coordinates of TMA are below 2\^31"),
    ],
)
def test_signalled_obstacle(x, w, why):
    found = gemm.signalled_obstacle([x], [w])
    assert found is not None and re.search(why, found), found


def test_no_signalled_obstacle():
    x, w = random(100, 64), random(70, 64)
    assert gemm.signalled_obstacle([x], [w]) is None
    assert gemm.signalled_obstacle([x], [random(64, 72).t()]) is None
    assert gemm.signalled_obstacle([x[:, :56]], [w[:, :56]]) is None


# Which tile.


def test_large_tiles_for_large_results():
    assert choose((LARGE, SMALL), 8192, 8192, 4096, 132) == LARGE
    assert choose((LARGE, SMALL), 256, 4096, 4096, 132) == SMALL  # 32 large ones leave 100 idle


@given(
    rows=st.integers(1, 20000),
    columns=st.integers(1, 20000),
    inner=st.integers(1, 20000),
    blocks=st.integers(1, 200),
)
def test_chosen_tile_is_the_fastest_of_the_model(rows, columns, inner, blocks):
    def clocks(tile):
        tiles = -(-rows // tile.block_m) * -(-columns // tile.block_n)
        stage, exposed = CLOCKS[tile]
        return -(-tiles // blocks) * (-(-inner // BLOCK_K) * stage + exposed)

    chosen = choose((LARGE, SMALL), rows, columns, inner, blocks)
    assert clocks(chosen) == min(clocks(LARGE), clocks(SMALL))


@pytest.mark.skipif(
    not CudaSupport.current().gemm_images,
    reason="nvcc is not installed, or CUTLASS was not found: no Hopper products",
)
def test_kernels_are_those_of_the_module():
    module = importlib.import_module("tp_kernels._cuda")
    ours = {
        (policy, dtype, a, b, *tile)
        for (policy, a, b), tiles in KERNELS.items()
        for tile in tiles
        for dtype in ("bfloat16", "float16")
    }
    assert set(module.product_kinds()) == ours


# What is launched.


def test_signalled_linear(launches):
    x, w = random(300, 136), random(136, 200).t()
    groups = RowGroups([100, 100, 100], 64)
    out, counters = torch.empty(300, 200).bfloat16(), torch.zeros(2, dtype=torch.int32)
    gemm.signalled_linear([x], [w], groups, out, counters, reserved=8)
    tile = gemm.signalled_tile([x], [w])
    tiles = sum(groups.tiles(g, *tile, 200) for g in range(2))
    assert launches.pop("name") == "signalled_product"
    assert launches == {
        "kind": ("signal", "bfloat16", True, False, *SMALL),
        "pairs": [((x.data_ptr(), 300, 136, 136), (w.data_ptr(), 200, 136, 200))],
        "out": out.data_ptr(),
        "counters": counters.data_ptr(),
        "width": 200,
        "division": (100, 0, 0),
        "size": 64,
        "parts": 3,
        "tiles": tiles,
        "blocks": tiles,
        "stream": 4711,
    }
    assert tiles == 12


def test_signalled_linear_leaves_multiprocessors_free(launches):
    x, w = random(4096, 64), random(4096, 64)
    groups = RowGroups([4096], 4096)
    counters = torch.zeros(1, dtype=torch.int32)
    out = torch.empty(4096, 4096).bfloat16()
    gemm.signalled_linear([x, x], [w, w], groups, out, counters, reserved=20)
    assert launches["blocks"] == MULTIPROCESSORS - 20 and len(launches["pairs"]) == 2


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"groups": RowGroups([7], 4)}, ShapeError, "2 groups of 7 rows"),
        ({"out": torch.empty(8, 15).bfloat16()}, ShapeError, r"out is \(8, 15\)"),
        ({"out": torch.empty(8, 16)}, UnsupportedError, "out is torch.float32"),
        ({"out": torch.empty(16, 8).bfloat16().t()}, UnsupportedError, "contiguous"),
        ({"counters": torch.zeros(3, dtype=torch.int32)}, ShapeError, "counters"),
        ({"counters": torch.zeros(2)}, UnsupportedError, "counters are torch.float32"),
        ({"ws": [random(16, 24)]}, ShapeError, r"expected \[M, K\] and \[N, K\]"),
        (
            {"xs": [random(8, 60)[:, ::2]], "ws": [random(16, 30)]},
            UnsupportedError,
            "TMA needs .*triton",
        ),
        ({"xs": [random(8, 32)] * 2}, ShapeError, "expected pairs"),
    ],
)
def test_signalled_linear_refuses(launches, change, error, why):
    given = {
        "xs": [random(8, 32)],
        "ws": [random(16, 32)],
        "groups": RowGroups([8], 4),
        "out": torch.empty(8, 16).bfloat16(),
        "counters": torch.zeros(2, dtype=torch.int32),
    } | change
    with pytest.raises(error, match=why):
        gemm.signalled_linear(**given, reserved=0)
    assert not launches


def test_cpu_tensors_are_refused():
    with pytest.raises(UnsupportedError, match="operands are on cpu"):
        gemm.linear_reduce_scatter(random(8, 32), random(16, 32), make())


def test_linear_reduce_scatter(launches):
    workspace = make(rank=1, world=3, chunk=1 << 16)
    xs, ws = [random(1000, 64), random(1000, 32)], [random(520, 64), random(520, 32)]
    bias = random(520)
    y = gemm.linear_reduce_scatter(xs, ws, workspace, bias=bias)
    assert y.shape == (333, 520)
    assert launches["kind"] == ("send", "bfloat16", True, True, *SMALL_SHARED)
    assert launches["pairs"][1] == (
        (xs[1].data_ptr(), 1000, 32, 32),
        (ws[1].data_ptr(), 520, 32, 32),
    )
    assert launches["out"] == y.data_ptr() and launches["bias"] == bias.data_ptr()
    assert launches["division"] == (333, 1, 1)
    assert launches["blocks"] == 3 * 5  # rows of the rank that has most
    fields = launches["workspace"]
    assert (fields["rank"], fields["world"], fields["chunk"]) == (1, 3, 1 << 16)
    assert fields["timeout"] == 2_500_000_000
    assert fields["operation"] == 5


def test_linear_reduce_scatter_by_chunk_and_channels(launches):
    x, w = random(4096, 64), random(4096, 64)
    gemm.linear_reduce_scatter(x, w, make(chunk=1 << 16))
    assert launches["kind"][4:] == LARGE
    gemm.linear_reduce_scatter(x, w, make(chunk=1 << 15, channels=40))
    assert launches["kind"][4:] == SMALL_SHARED and launches["blocks"] == 40
    with pytest.raises(UnsupportedError, match="a tile needs chunk=32768 and depth=2 or more"):
        gemm.linear_reduce_scatter(x, w, make(chunk=1 << 14))
    with pytest.raises(UnsupportedError, match="depth=2 or more"):
        gemm.linear_reduce_scatter(x, w, make(chunk=1 << 16, depth=1))


def test_ranks_with_different_inner_sizes_and_layouts_take_the_same_tiles(launches):
    found = set()
    for rank, inner in enumerate((8, 64, 1 << 14)):
        x, w = random(512, inner), random(640, inner)
        w = w.t().contiguous().t() if rank else w
        gemm.linear_reduce_scatter(x, w, make(rank=rank, world=3, chunk=1 << 16))
        found.add((launches["kind"][4:], launches["blocks"]))
    assert len(found) == 1


def test_refusals_of_exchanges(launches):
    x, w = random(64, 64), random(64, 64)
    with pytest.raises(UnsupportedError, match="nobody to exchange with"):
        gemm.linear_reduce_scatter(x, w, make(world=1))
    with pytest.raises(ShapeError, match=r"bias is \(3,\); expected \[64\]"):
        gemm.linear_reduce_scatter(x, w, make(), bias=random(3))
    with pytest.raises(UnsupportedError, match=r"bias is torch\.float32"):
        gemm.linear_reduce_scatter(x, w, make(), bias=torch.zeros(64))
    with pytest.raises(ShapeError, match=r"a result \(64, 64\) .* is given, \(32, 64\)"):
        gemm.linear_reduce_scatter(x, w, make(), out=random(64, 64))
    with pytest.raises(UnsupportedError, match="results have to be contiguous"):
        gemm.linear_reduce_scatter(x, w, make(), out=random(64, 32).t())
    with pytest.raises(UnsupportedError, match=r"5 pairs of operands: .* 4 at most"):
        gemm.linear_reduce_scatter([x] * 5, [w] * 5, make())
    with pytest.raises(ShapeError, match="1 times x and 2 times w"):
        gemm.linear_reduce_scatter([x], [w, w], make())
    with pytest.raises(UnsupportedError, match="activation='tanh'"):
        gemm.awaited_linear(x, w, make(), activation="tanh")
    with pytest.raises(
        UnsupportedError, match="needs 8192 bytes of staging memory, the workspace has 0"
    ):
        gemm.awaited_linear(x, w, make())
    with pytest.raises(ShapeError, match="x has 64 rows, counts="):
        gemm.awaited_linear(x, w, make(), counts=[60, 60])
    with pytest.raises(ShapeError, match=r"other is \(64, 64\); expected \[128, N\]"):
        gemm.awaited_weight_gradient(x, w, make())
    other = random(128, 64)
    with pytest.raises(UnsupportedError, match="give one of them"):
        gemm.awaited_weight_gradient(x, other, make(), out=w, accumulate_into=w)
    assert not launches


@pytest.fixture
def no_copies(monkeypatch) -> list[Any]:
    """Nobody else is there: what the copies would have been asked for."""
    copies = importlib.import_module("tp_kernels.kernels._copies")
    made: list[Any] = []

    @contextmanager
    def gathered_by_copies(*arguments: Any) -> Iterator[None]:
        made.append(arguments)
        yield

    monkeypatch.setattr(copies, "gathered_by_copies", gathered_by_copies)
    return made


def test_awaited_linear(launches, no_copies):
    workspace = make(rank=0, staging=1 << 20)
    x, ws, biases = random(300, 64), [random(520, 64), random(40, 64)], [random(520), random(40)]
    ys, gathered = gemm.awaited_linear(
        x, ws, workspace, counts=[300, 299], bias=biases, activation="silu"
    )
    assert [y.shape for y in ys] == [(599, 520), (599, 40)] and gathered.shape == (599, 64)
    assert launches["kind"] == ("await_rows", "bfloat16", True, True, *SMALL)
    assert [pair[0] for pair in launches["pairs"]] == [(gathered.data_ptr(), 599, 64, 64)] * 2
    assert launches["outs"] == [
        (y.data_ptr(), b.data_ptr(), 599, len(b)) for y, b in zip(ys, biases, strict=True)
    ]
    assert launches["division"] == (299, 1, 1)
    assert (launches["width"], launches["part"], launches["channels"]) == (64, 2400, 1)
    assert launches["activation"] == 3 and not launches["add"]
    assert launches["workspace"]["operation"] == 7
    assert no_copies[0][2] is gathered


def test_copies_of_biases_live_until_the_launch(launches, no_copies):
    """Or the memory of one would be that of the next."""
    ws = [random(32, 64), random(32, 64)]
    biases = [random(64)[::2], random(64)[::2]]
    gemm.awaited_linear(random(8, 64), ws, make(staging=1 << 20), bias=biases)
    (_, first, *_), (_, second, *_) = launches["outs"]
    assert first != second


def test_awaited_products_leave_room_for_ranks_that_share_a_device(launches, no_copies):
    workspace = make(staging=1 << 20)
    workspace.programs = 3
    gemm.awaited_linear(random(2000, 64), random(2000, 64), workspace)
    assert launches["blocks"] == 3


@pytest.mark.parametrize("of_gathered", [False, True])
def test_awaited_weight_gradient(launches, no_copies, of_gathered):
    workspace = make(staging=1 << 20)
    x, other, out = (
        random(150, 64),
        random(300, 520),
        random(64, 520) if of_gathered else random(520, 64),
    )
    result, gathered = gemm.awaited_weight_gradient(
        x, other, workspace, of_gathered=of_gathered, accumulate_into=out
    )
    assert result is out
    assert launches["kind"][:4] == ("await_sum", "bfloat16", False, False)
    operands = ((other.data_ptr(), 520, 300, 520), (gathered.data_ptr(), 64, 300, 64))
    assert launches["pairs"] == [operands[::-1] if of_gathered else operands]
    assert launches["outs"] == [(out.data_ptr(), 0, *out.shape)]
    assert launches["add"] and launches["workspace"]["operation"] == 8


def test_activations_are_numbered_as_in_the_kernels():
    source = Path(__file__).parents[2] / "csrc/cuda/gemm_sm90/arguments.h"
    names = ["none" if one is None else one for one in gemm.ACTIVATIONS]
    assert "{ " + ", ".join(names) + " }" in source.read_text()
    assert f"kMostPairs = {_products.MOST_PAIRS};" in source.read_text()


@pytest.mark.parametrize("name", ["device.h", "hopper.h"])
def test_instructions_tell_the_compiler_that_memory_changes(name):
    """Or it would move plain data over a barrier or a flag, which no test on the host could show."""
    source = (Path(__file__).parents[2] / "csrc/cuda" / name).read_text()
    statements = [part.split(";\n")[0] for part in source.split("asm volatile(")[1:]]
    assert statements
    assert [one for one in statements if '"memory"' not in one] == []
