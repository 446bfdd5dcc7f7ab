"""Shared buffers between calls: nothing stale is read, and no call waits for more than it needs."""

from __future__ import annotations

import time
from random import Random

import pytest
import torch

from tests.oracle import OPERATIONS, SEVERAL_WEIGHTS, Case, check, compute, draw_width, poison
from tp_kernels import ParallelGroup


def test_poison_is_seen_by_every_rank(world):
    """The tests of values rely on it: what nobody wrote is NaN in every dtype."""
    world(2).run(read_poison)


def read_poison() -> None:
    with ParallelGroup(window=4096, timeout=30) as group:
        poison(group)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for rank in range(group.size):
                for index in range(3):
                    view = group.slot.view(rank, index, (group.slot.capacity // 4,), dtype)
                    assert bool(view.isnan().all())


@pytest.mark.parametrize("size", [2, 4])
def test_back_to_back_calls_of_two_groups(world, size):
    world(size).run(call_back_to_back, 200)


def call_back_to_back(calls: int) -> None:
    """Random ops without a barrier between them; some ranks dawdle, so others run ahead."""
    shared, own = Random(0), Random()
    with ParallelGroup(window=4096, timeout=30) as a, ParallelGroup(window=8192, timeout=30) as b:
        for seed in range(calls):
            op = shared.choice(OPERATIONS)
            n = shared.choice((1, 2)) if op in SEVERAL_WEIGHTS else 1
            case = Case(
                op,
                (shared.choice((0, 1, 7, 33, 70, 150)),),
                draw_width(shared),
                tuple(draw_width(shared) for _ in range(n)),
                (False,) * n,
                shared.choice((torch.float32, torch.bfloat16)),
                shared.choice(("host", "host", "auto", "reference")),
                frozen=shared.choice(("", "", "x", "xw")),
                seed=seed,
            )
            if own.random() < 0.1:
                time.sleep(0.003 * own.random())
            group = shared.choice((a, b))
            check(case, compute(case, group), group)
