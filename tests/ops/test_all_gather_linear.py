"""all_gather_linear: rows of all ranks times the output features of this one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops import body
from tests.oracle import Case, call, digest, shard
from tp_kernels import ParallelGroup, all_gather_linear

OP = "all_gather_linear"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_values_and_gradients(world, size):
    body.values_and_gradients(world, OP, size)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bits(world, size):
    body.bits(world, OP, size)


def test_one_rank_gives_the_bits_of_torch(world):
    world(1).run(body.compare_with_torch, OP)
    body.compare_with_torch(OP)  # without torch.distributed


@pytest.mark.parametrize("size", [1, 3])
def test_activations(world, size):
    world(size).run(body.compare_activations, OP)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_calls_that_record_nothing(world, size):
    world(size).run(body.compare_direct, OP)


def test_kept_and_repeated_gathers(world):
    """The same gradients; "redo" saves this rank's 3 or 2 of 8 rows, and gathers twice."""
    for rank, by_mode in enumerate(world(3).run(gathers)):
        (kept, kept_calls, kept_bits), (redone, redone_calls, redone_bits) = by_mode
        assert kept - redone == (8 - (3, 3, 2)[rank]) * 64 * 4
        assert "all_gather" not in kept_calls and redone_calls["all_gather"] == {"host": 1}
        assert kept_bits == redone_bits


def gathers() -> list[tuple[int, dict[str, dict[str, int]], str]]:
    """Bytes saved for the backward, calls and gradients, for "keep" and "redo"."""
    outcomes = []
    with ParallelGroup(timeout=30) as group:
        for gathered in ("keep", "redo"):
            case = Case(OP, (8,), 64, (6,), implementation="host", gathered=gathered)
            args = shard(case, group.size, group.rank).leaves("")
            saved: list[Tensor] = []

            def pack(t: Tensor, saved: list[Tensor] = saved) -> Tensor:
                saved.append(t)
                return t

            group.reset_stats()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                (y,) = call(case, args, group)
            y.backward(args.dys[0])
            nbytes = sum(t.numel() * t.element_size() for t in saved)
            gradients = digest(args.x.grad, args.ws[0].grad, args.bs[0].grad)
            outcomes.append((nbytes, group.stats()["calls"], gradients))
    return outcomes


def test_one_row_of_each_rank_may_be_a_vector(world):
    world(3).run(vectors)


def vectors() -> None:
    with ParallelGroup(timeout=30) as group:
        x, w = torch.randn(1, 6), torch.randn(4, 6)
        y = all_gather_linear(x[0], w, group=group)
        assert y.shape == (3, 4)
        assert digest(y) == digest(all_gather_linear(x, w, group=group))


def test_a_list_of_weights_gives_a_tuple(world):
    world(2).run(one_in_a_list)


def one_in_a_list() -> None:
    with ParallelGroup(timeout=30) as group:
        x, w, b = torch.randn(2, 6), torch.randn(4, 6), torch.randn(4)
        y = all_gather_linear(x, w, b, group=group)
        (z,) = all_gather_linear(x, [w], [b], group=group)
        assert digest(y) == digest(z)
