"""Tests that every op has to pass; the files test_<op>.py name the op."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.oracle import (
    HALVES,
    SEVERAL_WEIGHTS,
    SPLIT,
    Case,
    call,
    compute,
    digest,
    draw_cases,
    part,
    run_cases,
    shard,
    split_of,
    unsplit,
)
from tp_kernels import ParallelGroup, Ranks
from tp_kernels.ops._gemm import linear
from tp_kernels.ops._op import ACTIVATIONS

World = Callable[[int], Ranks]

# Rows up to which an op is one block for every implementation, and up to which `host` gathers rows
# before it multiplies them.
ONE_BLOCK, GATHER_FIRST = 128, 64
DTYPES = (torch.float32, *HALVES)
IMPLEMENTATIONS = ("reference", "chunked", "host")


def values_and_gradients(world: World, op: str, size: int) -> None:
    """Random cases against float64, through buffers so small that one op takes many rounds."""
    cases = list(draw_cases(op, size, seed=0, each=6 if size < 4 else 3))
    by_rank = world(size).run(run_cases, cases)
    for case, *digests in zip(cases, *by_rank, strict=True):
        assert all(d == digests[0] for d in digests), f"{case}: ranks have different bits"


def bits(world: World, op: str, size: int) -> None:
    """Every implementation gives the bits of the arithmetic that the package promises."""
    outs = (33, 20, 7) if op in SEVERAL_WEIGHTS else (33,)
    cases = [
        Case(op, (rows,), 48, outs, (True,) * len(outs), dtype, implementation, seed=rows)
        for dtype in DTYPES
        for rows in (1, 3, 50, GATHER_FIRST, 100, ONE_BLOCK)
        for implementation in IMPLEMENTATIONS
    ]
    # wide enough for the two-step sum of more than two ranks
    cases += [Case(op, (ONE_BLOCK,), 260, (260,), implementation=name) for name in IMPLEMENTATIONS]
    world(size).run(compare_bits, cases)


def compare_bits(cases: Sequence[Case]) -> None:
    with ParallelGroup(timeout=30) as group:
        for case in cases:
            promised = promised_bits(case, group.size, group.rank)
            results = compute(case, group)
            for name in promised if one_product(case) else promised.keys() - by_piece(case):
                assert digest(results[name]) == digest(promised[name]), (case, name)


def by_piece(case: Case) -> set[str]:
    """Results whose rows are multiplied as they arrive, where a product's shape may change its bits."""
    return {"all_gather_linear": {"y0", "y1", "y2"}, "linear_reduce_scatter": {"dx"}}.get(
        case.op, set()
    )


def one_product(case: Case) -> bool:
    return case.implementation == "reference" or (
        case.implementation == "host" and case.rows <= GATHER_FIRST
    )


def promised_bits(case: Case, size: int, rank: int) -> dict[str, Tensor]:
    """Products of the dtype on each rank, summed in fp32 in rank order plus bias, rounded once."""
    shards = [shard(case, size, r) for r in range(size)]
    whole, mine, results = unsplit(case), shards[rank], {}

    def summed(partials: list[Tensor], bias: Tensor | None = None) -> Tensor:
        total = partials[0].float()
        for partial in partials[1:]:
            total = total + partial.float()
        return (total if bias is None else total + bias.float()).to(case.dtype)

    if case.op in SEVERAL_WEIGHTS:
        x, dys = whole.x, mine.dys
        for i, (w, b) in enumerate(zip(mine.ws, mine.bs, strict=True)):
            results[f"y{i}"] = linear(x, w, b)
        partials = []
        for one in shards:
            partials.append(torch.mm(one.dys[0], one.ws[0]))
            for dy, w in zip(one.dys[1:], one.ws[1:], strict=True):
                partials[-1].addmm_(dy, w)
        dx = summed(partials)
    else:
        x, dys = mine.x, whole.dys
        y = summed([linear(one.x, one.ws[0]) for one in shards], mine.bs[0])
        results["y0"] = part(y, SPLIT[case.op]["y"], size, rank)
        dx = torch.mm(dys[0], mine.ws[0])
    in_rows = case.op == "all_gather_linear"
    results["dx"] = part(dx, split_of(case, "dx"), size, rank) if in_rows else dx
    for i, dy in enumerate(dys):
        results[f"dw{i}"] = torch.mm(dy.t(), x)
        results[f"db{i}"] = dy.sum(0, dtype=torch.float32).to(case.dtype)
    return results


def compare_with_torch(op: str) -> None:
    """A group of one rank gives forward and gradients of F.linear, to the bit."""
    with ParallelGroup() as group:
        for dtype in (*DTYPES, torch.float64):
            for leading in ((5,), (2, 3), (0,), (200, 1, 2)):
                case = Case(op, leading, 19, dtype=dtype, implementation="auto")
                ours = compute(case, group)
                args = shard(case, 1, 0).leaves("")
                y = torch.nn.functional.linear(args.x, args.ws[0], args.bs[0])
                y.backward(args.dys[0])
                theirs = {
                    "y0": y,
                    "dx": args.x.grad,
                    "dw0": args.ws[0].grad,
                    "db0": args.bs[0].grad,
                }
                for name, value in theirs.items():
                    assert digest(ours[name]) == digest(value), (case, name)


def compare_activations(op: str) -> None:
    """An activation inside the op is the one outside it, in the forward and in every gradient."""
    with ParallelGroup(timeout=30) as group:
        for name, function in ACTIVATIONS.items():
            if function is None:
                continue
            case = Case(op, (6, 2), 9, (8,), implementation="auto")
            inside, outside = (shard(case, group.size, group.rank).leaves("") for _ in range(2))
            (y,) = call(case, inside, group, activation=name)
            (z,) = call(case, outside, group)
            z = function(z)
            y.backward(inside.dys[0])
            z.backward(outside.dys[0])
            assert digest(y) == digest(z)
            for a, b in ((inside.x, outside.x), (inside.ws[0], outside.ws[0])):
                assert digest(a.grad) == digest(b.grad), (name, "grad")


def compare_direct(op: str) -> None:
    """Calls that record nothing take another way to the same bits, whatever the grad mode."""
    with ParallelGroup(window=8192, timeout=30) as group:
        for rows, biased, dtype in (
            (3, True, torch.float32),
            (1, False, torch.bfloat16),
            (16, False, torch.float32),  # the most of the short way in ops/_decode.py
            (17, False, torch.float32),
            (8, False, torch.float16),
            (150, True, torch.float32),
        ):
            case = Case(op, (rows,), 40, (33,), (biased,), dtype, "auto", seed=rows)
            recorded = digest(compute(case, group)["y0"])
            frozen = shard(case, group.size, group.rank).leaves("xwb")
            wanting = shard(case, group.size, group.rank).leaves("")
            for mode, args in (
                (torch.enable_grad, frozen),
                (torch.no_grad, wanting),
                (torch.inference_mode, frozen),
                (torch.inference_mode, wanting),
            ):
                with mode():
                    (y,) = call(case, args, group)
                assert not y.requires_grad
                assert digest(y) == recorded, (case, mode)
