"""Classes of shapes and the candidates for them: equal on all ranks, of equal bits, within what a GPU has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.planning import body
from tp_kernels import ShapeError, UnsupportedError, split_sizes
from tp_kernels.kernels._gemm import FEW_ROWS, INTERPRETER, TILINGS, choose, choose_for_gradient
from tp_kernels.kernels.workspace import OPERATIONS as CODES
from tp_kernels.kernels.workspace import WorkspaceShape
from tp_kernels.planning import (
    OPERATIONS,
    Hardware,
    Product,
    ShapeClass,
    candidates,
    workspace_shape,
)
from tp_kernels.planning.tilings import GATHERING, SIZES

INTERPRETED = Hardware.of(torch.device("cpu"))
CLASSES = [
    (Hardware("", family), ShapeClass(operation, 1, itemsize, 2, rows, 4096, 4096))
    for operation in OPERATIONS
    for family in (80, 90, 100)
    for itemsize in (2, 4)
    for rows in (FEW_ROWS, 2 * FEW_ROWS)
]

sizes = st.integers(1, 1 << 20)


def test_buckets_are_powers_of_two():
    def rows_of(rows: int) -> int:
        return ShapeClass.of("linear_all_reduce", rows, 1, 1, torch.float16, 2).rows

    assert [rows_of(rows) for rows in (1, 2, 3, 4, 5, 64, 65, 128)] == [1, 2, 4, 4, 8, 64, 128, 128]


@given(sizes, sizes, sizes, st.integers(1, 32), st.sampled_from(OPERATIONS))
def test_class_of_any_product(rows, n, k, world, operation):
    shape = ShapeClass.of(operation, rows, n, k, torch.bfloat16, world)
    assert shape == ShapeClass.of(operation, split_sizes(rows, world), n, k, torch.bfloat16, world)
    # What the kernels pass to `choose`.
    two = operation == "linear_all_reduce" and rows > FEW_ROWS and world != 2
    whole = operation == "linear_all_reduce" and not two
    counted = rows if whole else split_sizes(rows, world)[0]
    assert shape.shots == 1 + two
    for size, bucket in ((counted, shape.rows), (n, shape.width), (k, shape.inner)):
        assert bucket / 2 < size <= bucket and bucket & (bucket - 1) == 0
    # Or the built-in choice, and BLOCK_K with it, would not be one for a class.
    if operation == "all_gather_weight_gradient":
        assert shape.kind == "gradient"
    else:
        assert (counted <= FEW_ROWS) == (shape.kind == "few")
    assert (shape.operation, shape.itemsize, shape.world) == (operation, 2, world)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nothing_to_multiply(numbers):
    with pytest.raises(ShapeError):
        ShapeClass.of("linear_all_reduce", *numbers, torch.float16, 2)


def test_rows_of_each_rank():
    """Of the rank that has most, as the kernels count them."""
    shape = ShapeClass.of("linear_reduce_scatter", [96, 32], 1, 1, torch.float16, 2)
    assert shape.rows == 128 and shape.kind == "many"
    shape = ShapeClass.of("linear_all_reduce", [96, 32], 1, 1, torch.float16, 2)
    assert (shape.rows, shape.shots) == (128, 1)
    shape = ShapeClass.of("linear_all_reduce", [96, 32, 0], 1, 1, torch.float16, 3)
    assert (shape.rows, shape.shots) == (128, 2)


def test_unknown_operation():
    with pytest.raises(UnsupportedError, match="linear_reduce_scatter"):
        ShapeClass.of("linear", 1, 1, 1, torch.float16, 2)


def test_operations_are_those_of_kernels():
    assert set(OPERATIONS) <= set(CODES)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
@pytest.mark.parametrize("rows", [FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_is_the_built_in_choice(monkeypatch, capability, rows, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    hardware = Hardware.of(torch.device("cuda"))
    x = SimpleNamespace(is_cpu=False, device="cuda", element_size=lambda: dtype.itemsize)
    shape = ShapeClass.of("linear_all_reduce", rows, 64, 64, dtype, 2)
    assert candidates(hardware, shape)[0] == choose(x, rows)
    shape = ShapeClass.of("all_gather_weight_gradient", rows, 64, 64, dtype, 2)
    assert candidates(hardware, shape)[0] == choose_for_gradient(x)
    assert hardware.architecture == f"sm_{10 * capability[0] + capability[1]}"


def test_interpreter_has_candidates_of_its_own():
    shape = ShapeClass.of("linear_all_reduce", 5, 5, 5, torch.float32, 2)
    found = candidates(INTERPRETED, shape)
    assert found[0] == INTERPRETER == choose(torch.ones(1), 5) and len(found) > 2
    assert INTERPRETED.architecture == "interpreter"
    assert not {hardware.family for hardware, _ in CLASSES} & {INTERPRETED.family}


@pytest.mark.parametrize(("hardware", "shape"), CLASSES, ids=str)
def test_candidates(hardware, shape):
    """What a GPU needs is in tests/kernels/aot_candidates.py."""
    found = candidates(hardware, shape)
    assert 4 <= len(found) <= 11 and len(set(found)) == len(found)
    # Only where programs are set apart it matters how many.
    assert (len({one.senders for one in found}) > 1) == (shape.operation in GATHERING)
    assert {one.block_k for one in found} == {found[0].block_k}
    for one in found:
        for side in (one.block_m, one.block_n):
            assert side >= 16 and side & (side - 1) == 0
        assert one.chunk(torch.float16 if shape.itemsize == 2 else torch.float32) <= 1 << 16
        assert one.senders < one.programs
    assert SIZES.keys() == TILINGS.keys()


def test_workspace():
    hardware, shape = next(one for one in CLASSES if one[0].family == 90)
    found = candidates(hardware, shape)
    wanted = workspace_shape(found, torch.bfloat16, 4)
    assert wanted == WorkspaceShape(4, 264, 1 << 15, 4)
    assert workspace_shape((INTERPRETER,), torch.float32, 2).channels == 1024


@pytest.mark.parametrize(
    ("operation", "dtype"), list(zip(OPERATIONS, [torch.bfloat16, torch.float32] * 2, strict=True))
)
def test_candidates_have_equal_bits(interpreted, operation, dtype):
    """Several tiles, ragged in every dimension; other steps along K would be seen."""
    product = Product(operation, 35, 20, 41, dtype)
    choices = candidates(INTERPRETED, product.shape_class(2))
    found = interpreted(2).run(body.digests, product, choices)
    assert [len(set(of_rank)) for of_rank in found] == [1, 1]
    found = interpreted(2).run(body.digests, product, body.OTHER_STEPS)
    assert [len(set(of_rank)) for of_rank in found] == [2, 2]
