"""Products as subjects of the tuner: operands that show roundings, compilation alone, interpreted runs."""

from __future__ import annotations

import json
import subprocess
import sys
from unittest import mock

import pytest
import torch

from tests.planning import body
from tp_kernels import UnsupportedError
from tp_kernels.kernels._gemm import INTERPRETER
from tp_kernels.planning import OPERATIONS, Product, products
from tp_kernels.planning.tilings import GATHERING
from tp_kernels.planning.tuner import Timing, Tuned

PRODUCT = Product("linear_all_reduce", 5, 7, 75, torch.bfloat16)
CPU = torch.device("cpu")


@pytest.mark.parametrize("k", [1, 2, 74, 75])
def test_operands_leave_roundings_only(k):
    x, w = products.operands((9, 11, k), torch.float32, 3, CPU)
    assert x.shape == (9, k) and w.shape == (11, k)
    exact = x.double() @ w.double().T
    terms = x.double().abs() @ w.double().abs().T
    assert (exact.abs() <= 1e-12 * terms).all() == (k % 2 == 0)
    again = products.operands((9, 11, k), torch.float32, 3, CPU)
    other = products.operands((9, 11, k), torch.float32, 4, CPU)
    assert torch.equal(again[0], x) and not torch.equal(other[0], x)


def test_order_of_summation_shows_in_16_bits():
    x, w = products.operands((16, 16, 256), torch.bfloat16, 0, CPU)
    terms = x.float()[:, None] * w.float()  # [16, 16, 256], exact
    forwards, backwards = torch.zeros(2, 16, 16)
    for k in range(256):  # not a product of a library, whose order is its own affair
        forwards, backwards = forwards + terms[..., k], backwards + terms[..., -1 - k]
    assert (forwards.bfloat16() != backwards.bfloat16()).float().mean() > 0.5


@pytest.mark.parametrize("operation", OPERATIONS)
def test_arguments(operation):
    """Of rank 1 of 2: gathered rows are parts of one x, and what is summed over has a product of 0."""
    product = Product(operation, 5, 3, 8, torch.float32)
    made = [products.arguments(product, rank, 2, CPU) for rank in range(2)]
    (first, second), options, out = made[1]
    assert any(out is one or [out] == one for one in options.values())
    assert first.shape == (2 if operation in GATHERING else 5, 8)
    if operation == "all_gather_weight_gradient":
        whole = torch.cat([x for (x, _), _, _ in made])
        assert whole.shape == (5, 8) and second.shape == (5, 3) and out.shape == (3, 8)
        even = products.arguments(Product(operation, 6, 3, 8, torch.float32), 0, 1, CPU)[0]
        assert (even[1].double().T @ even[0].double()).abs().max() < 1e-12
    else:
        assert second.shape == (3, 8)
        assert out.shape == ({"linear_reduce_scatter": 2}.get(operation, 5), 3)


def test_compiling_launches_nothing():
    """And refuses what the device has too little memory for."""
    command = [sys.executable, "-m", "tests.planning.compile_only"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [name for name, _ in found["loaded"]] == ["one_shot"]
    assert found["launched"] == []
    assert [kind for kind, _ in found["refused"]] == ["OutOfResources"]


def test_entry():
    other = body.CHOICES[0]
    timings = {INTERPRETER: Timing(2e-6, 1e-6, 3e-6, 7), other: Timing(1e-6, 1e-6, 1e-6, 7)}
    made = products.entry(PRODUCT, Tuned(INTERPRETER, timings, {}), other)
    assert (made.median_us, made.p10_us, made.p90_us, made.built_in_us) == (2.0, 1.0, 3.0, 1.0)
    assert made.tiling["block_k"] == 16 and made.calls == 7
    assert made.measured == "linear_all_reduce 5 x 7 x 75 bfloat16"
    assert made.date.endswith("+00:00")
    assert (
        products.entry(PRODUCT, Tuned(INTERPRETER, timings, {}), body.CHOICES[2]).built_in_us == 0
    )


def test_compiled_kernels_are_not_for_cpu_tensors():
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET"):
        products.ProductSubject(mock.Mock(), PRODUCT, CPU, (INTERPRETER,))


def test_end_to_end(interpreted, tmp_path):
    product = Product("linear_all_reduce", 5, 17, 20, torch.float32)
    found = interpreted(2).run(body.end_to_end, product, tmp_path / "tilings.json")
    winner, tiling, results = found[0]
    assert found[1] == found[0] and tiling == winner and results == 1


def test_a_rank_that_misses_a_call(interpreted):
    """The other one waits in vain; both go on in a workspace of their own."""
    product = Product("linear_reduce_scatter", 3, 5, 6, torch.float32)
    found = interpreted(2).run(body.broken_call, product)
    assert found[0] == found[1] and found[0][1] is False
    (why,) = found[0][0]
    assert "rank 1: RuntimeError: out of luck" in why and "rank 0: CollectiveTimeoutError" in why
