"""The public ops with implementation="triton", interpreted: values, gradients, bits, refusals, failures."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from tests.kernels.body import DTYPES
from tests.oracle import LAYOUTS, OPERATIONS, SEVERAL_WEIGHTS, Case, check, compute
from tp_kernels import ParallelGroup

# Fewer than the ranks, none, some, a tile of the interpreter and its borders, several of them.
LEADING = ((0,), (1,), (2,), (17,), (33,), (4, 3), (2, 1), (1, 5), (5, 0), (1, 2, 3))
WIDTHS = (1, 5, 16, 17, 24)


def cases(op: str, seed: int) -> Iterator[Case]:
    """Every dtype and every leading shape, with other widths, layouts and biases each time."""
    random = Random(f"{op} {seed}")
    for index, leading in enumerate(LEADING):
        n = random.choice((1, 2, 3)) if op in SEVERAL_WEIGHTS else 1
        yield Case(
            op,
            leading,
            random.choice(WIDTHS),
            tuple(random.choice(WIDTHS) for _ in range(n)),
            random.choice(((True,) * n, (False,) * n, (False, True, True)[-n:])),
            DTYPES[(seed + index) % len(DTYPES)],
            "triton",
            random.choice(LAYOUTS),
            random.choice(("keep", "redo")),
            random.choice(("", "", "", "x", "w", "b")),
            unused=n > 1 and random.random() < 0.2,
            seed=random.randrange(1 << 30),
        )


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("size", [2, 3])
def test_values_and_gradients(interpreted, size, op):
    given = list(cases(op, size))
    by_rank = interpreted(size).run(against_float64, given)
    for case, *digests in zip(given, *by_rank, strict=True):
        assert all(d == digests[0] for d in digests), f"{case}: ranks have different bits"


def against_float64(given: list[Case]) -> list[dict[str, str]]:
    digests = []
    with ParallelGroup(timeout=30) as group:
        for case in given:
            group.reset_stats()
            digests.append(check(case, compute(case, group), group))
            assert_path(case, group)
    return digests


def assert_path(case: Case, group: ParallelGroup) -> None:
    """What communicated in `case` was "triton"."""
    calls = group.stats()["calls"]
    expected = {case.op: {"local": 1} if case.op == "copy_linear" else {"triton": 1}}
    x_or_w = {"linear_reduce_scatter": "xwb"}.get(case.op, "x")
    if case.op != "linear_all_reduce" and set(x_or_w) - set(case.frozen):
        expected[f"{case.op}.backward"] = {"triton": 1}
    for name in ("all_gather", "barrier"):  # of gathered="redo", and after making the workspace
        calls.pop(name, None)
    assert calls == expected, (case, calls)
