"""Wrong arguments raise on every rank before anything is sent; the group works on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tp_kernels
from tests.oracle import OPERATIONS, SEVERAL_WEIGHTS, Case, check, compute, shard
from tp_kernels import ParallelGroup, ShapeError, UnsupportedError

Change = Callable[[dict[str, Any]], dict[str, Any]]

# What is wrong, and which error says so how.
WRONG: dict[str, tuple[Change, type[Exception], str]] = {
    "dtype of weight": (
        lambda a: {"weight": a["weight"].double()},
        UnsupportedError,
        "weight 0 is torch.float64",
    ),
    "integers": (
        lambda a: {name: t.long() for name, t in a.items()},
        UnsupportedError,
        "x has dtype torch.int64",
    ),
    "complex numbers": (
        lambda a: {name: t.cfloat() for name, t in a.items()},
        UnsupportedError,
        "x has dtype torch.complex64",
    ),
    "hidden size": (lambda a: {"x": a["x"][..., :-1]}, ShapeError, r"with K = \d"),
    "scalar": (lambda a: {"x": torch.tensor(1.0)}, ShapeError, "x is a scalar"),
    "weight of one dimension": (lambda a: {"weight": a["weight"][0]}, ShapeError, "weight 0 is"),
    "weight of three dimensions": (
        lambda a: {"weight": a["weight"][None]},
        ShapeError,
        "weight 0 is",
    ),
    "length of bias": (lambda a: {"bias": a["bias"][:-1]}, ShapeError, "bias 0 is"),
    "shape of bias": (lambda a: {"bias": a["bias"][None]}, ShapeError, "bias 0 is"),
    "dtype of bias": (lambda a: {"bias": a["bias"].half()}, ShapeError, "bias 0 is"),
    "device of bias": (
        lambda a: {"bias": a["bias"].to("meta")},
        UnsupportedError,
        "x is on cpu, bias 0 on meta",
    ),
    "number of biases": (
        lambda a: {"bias": [a["bias"], a["bias"]]},
        ShapeError,
        "1 weights and 2 biases",
    ),
    "activation": (lambda a: {"activation": "tanh"}, UnsupportedError, "known are .*silu"),
    "no group": (lambda a: {"group": None}, UnsupportedError, "ops take a ParallelGroup"),
    "process group": (
        lambda a: {"group": dist.group.WORLD},
        UnsupportedError,
        "ops take a ParallelGroup",
    ),
    "implementation": (lambda a: {"implementation": "x"}, UnsupportedError, "known are"),
}
WRONG_ROWS = {
    "rows": (lambda a: {"rows": 6}, ShapeError, r"rank \d of \d holds . rows.*split_sizes\(6"),
    "gathered": (lambda a: {"gathered": "drop"}, UnsupportedError, "use 'keep' or 'redo'"),
}
WRONG_WEIGHTS = {
    "no weights": (lambda a: {"weight": []}, ShapeError, "0 weights"),
    "one of several weights": (
        lambda a: {"weight": [a["weight"], a["weight"][:, :-1]], "bias": None},
        ShapeError,
        "weight 1 is",
    ),
    "device of one of several weights": (
        lambda a: {"weight": [a["weight"], a["weight"].to("meta")], "bias": None},
        UnsupportedError,
        "weight 1 is torch.float32 on meta",
    ),
}


@pytest.mark.parametrize("provider", ["host", "none"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_wrong_arguments(world, op, provider):
    world(3).run(refuse, op, provider)


def refuse(op: str, provider: str) -> None:
    case = Case(op, (9,), 11, (7,), implementation="auto")
    wrong = WRONG | (WRONG_ROWS if op == "all_gather_linear" else {})
    wrong |= WRONG_WEIGHTS if op in SEVERAL_WEIGHTS else {}
    with ParallelGroup(provider=provider, timeout=30) as group:
        args = shard(case, group.size, group.rank)
        right = {"x": args.x, "weight": args.ws[0], "bias": args.bs[0]}
        for what, (change, error, text) in wrong.items():
            for grad in (False, True):
                tensors = right
                if grad:
                    tensors = {name: t.clone().requires_grad_() for name, t in right.items()}
                options = {"group": group} | tensors | change(tensors)
                with pytest.raises(error, match=text):
                    getattr(tp_kernels, op)(**options)
            assert not group.stats()["calls"], f"{what}: something was sent"
        group.reset_stats()
        check(replace(case, seed=1), compute(replace(case, seed=1), group), group)


def test_a_closed_group_is_refused(world):
    world(2).run(use_closed)


def use_closed() -> None:
    for provider in ("host", "none"):
        group = ParallelGroup(provider=provider, timeout=30)
        group.close()
        for op in OPERATIONS:
            with pytest.raises(UnsupportedError, match=r"closed|alive"):
                compute(Case(op, implementation="auto"), group)
