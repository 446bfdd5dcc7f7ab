"""What a rank computes for `tp-kernels bench linear`: the ops, and what they are held against.

Column-parallel ops (`copy_linear`, `all_gather_linear`): x [M, H] or this rank's rows, W [H/W, H].
Row-parallel ops (`linear_all_reduce`, `linear_reduce_scatter`): x [M, H/W], W [H, H/W].
The collective of every op and pass moves [M, H].

Results and gradients are new tensors in all contestants, as those of any layer are: on the CPU, memory that
was given back costs a page fault per 4 KiB when it is used again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from tp_kernels.comm import ParallelGroup, split_range
from tp_kernels.comm.collectives import all_gather, all_reduce, my_rows, reduce_scatter
from tp_kernels.dispatch import choose
from tp_kernels.ops import (
    all_gather_linear,
    copy_linear,
    linear_all_reduce,
    linear_reduce_scatter,
)
from tp_kernels.ops._gemm import few_rows, linear
from tp_kernels.ops._op import bias_gradient

from . import collectives
from .pool import Builder, Case
from .products import column_sum_error, product_error, random
from .slices import Work

OPS: dict[str, Callable[..., Any]] = {
    "linear_all_reduce": linear_all_reduce,
    "linear_reduce_scatter": linear_reduce_scatter,
    "all_gather_linear": all_gather_linear,
    "copy_linear": copy_linear,
}
COLUMN_PARALLEL = ("all_gather_linear", "copy_linear")
COLLECTIVE = {
    ("linear_all_reduce", "forward"): "all_reduce",
    ("linear_all_reduce", "backward"): None,
    ("linear_reduce_scatter", "forward"): "reduce_scatter",
    ("linear_reduce_scatter", "backward"): "all_gather",
    ("all_gather_linear", "forward"): "all_gather",
    ("all_gather_linear", "backward"): "reduce_scatter",
    ("copy_linear", "forward"): None,
    ("copy_linear", "backward"): "all_reduce",
}
NO_COLLECTIVE = "communicates nothing"


def collective_of(case: Case) -> str | None:
    """What this op and pass send, or None."""
    return COLLECTIVE[case["op"], case["pass"]]


@lru_cache(maxsize=1)  # several contestants of a case share them
def whole(rows: int, hidden: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """The unsplit x [M, H], W [H, H] and dy [M, H]."""
    kind = getattr(torch, dtype)
    return (
        random(1, rows, hidden).to(kind),
        random(2, hidden, hidden).to(kind),
        random(3, rows, hidden).to(kind),
    )


class Shard:
    """What one rank holds in a case, and what it should compute."""

    def __init__(self, group: ParallelGroup, case: Case) -> None:
        self.group, self.op, self.rows = group, case["op"], case["rows"]
        self.forward = case["pass"] == "forward"
        self.collective = collective_of(case)
        self.whole = whole(case["rows"], case["hidden"], case["dtype"])
        x, w, dy = self.whole
        start, stop = split_range(case["hidden"], group.size, group.rank)
        if self.op in COLUMN_PARALLEL:
            self.w = w[start:stop].clone()
            self.all_x, self.all_dy = x, dy[:, start:stop].contiguous()
        else:
            self.w = w[:, start:stop].contiguous()
            self.all_x, self.all_dy = x[:, start:stop].contiguous(), dy
        self.x = my_rows(x, group).clone() if self.op == "all_gather_linear" else self.all_x
        self.dy = my_rows(dy, group).clone() if self.op == "linear_reduce_scatter" else self.all_dy
        self.bias = torch.zeros(self.w.shape[0], dtype=self.w.dtype)

    def call_op(self, implementation: str, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        options: dict[str, Any] = {"group": self.group, "implementation": implementation}
        if self.op == "all_gather_linear":
            options["rows"] = self.rows
        return OPS[self.op](x, w, bias, **options)

    def output_error(self, y: Tensor) -> float:
        """Of the complete result of the forward."""
        x, w, _ = self.whole
        if self.op in COLUMN_PARALLEL:
            return product_error(y, x, self.w.t())
        if self.op == "linear_reduce_scatter":
            return product_error(y, my_rows(x, self.group), w.t())
        return product_error(y, x, w.t())

    def gradient_error(self, dx: Tensor, dw: Tensor, db: Tensor) -> float:
        """Of the complete gradients."""
        _, w, dy = self.whole
        if self.op == "copy_linear":
            error = product_error(dx, dy, w)
        elif self.op == "all_gather_linear":
            error = product_error(dx, my_rows(dy, self.group), w)
        else:
            error = product_error(dx, dy, self.w)
        return max(error, self._weight_error(dw, db))

    def local_gradient_error(self, dx: Tensor, dw: Tensor, db: Tensor) -> float:
        """Of the gradients before any collective."""
        return max(product_error(dx, self.all_dy, self.w), self._weight_error(dw, db))

    def _weight_error(self, dw: Tensor, db: Tensor) -> float:
        return max(
            product_error(dw, self.all_dy.t(), self.all_x), column_sum_error(db, self.all_dy)
        )


def product(group: ParallelGroup, case: Case, variant: str) -> Work | str:
    """The products of this rank alone, whole: T_gemm is the fastest variant."""
    shard = Shard(group, case)
    x, w = shard.all_x, shard.w
    if not shard.forward:
        if variant == "autograd":
            return gradients(shard, torch_backward(shard), local=True)
        if variant != "mm":
            return "forward only"
        return gradients(shard, lambda: local_gradients(shard.all_dy, w, x), local=True)
    if variant == "autograd":
        return "backward only"
    call: Callable[[], Tensor]
    if variant == "mm":
        call = lambda: torch.mm(x, w.t())
    elif variant == "mv":
        if shard.rows != 1:
            return "one row only"
        call = lambda: torch.mv(w, x[0]).unsqueeze(0)
    elif variant == "linear":
        call = lambda: torch.nn.functional.linear(x, w)
    else:
        if not few_rows(x, w):
            return "few rows only"
        call = lambda: linear(x, w)
    return Work(call, lambda: product_error(call(), x, w.t()))


def communication(group: ParallelGroup, case: Case, via: Any) -> Work | str:
    """The collective of the op alone: T_comm."""
    op = collective_of(case)
    if op is None:
        return NO_COLLECTIVE
    if via is collectives.through_engine and case["rows"] != 1:
        return "one row only"
    itemsize = getattr(torch, case["dtype"]).itemsize
    return collectives.ours(
        group,
        {
            "op": op,
            "dtype": case["dtype"],
            "bytes": case["rows"] * case["hidden"] * itemsize,
            "width": case["hidden"],
        },
        via,
    )


def serial(group: ParallelGroup, case: Case) -> Work | str:
    """The package's product, then its collective (or before, where it gathers): T_serial.

    The products of a backward are those of torch's layer, run by autograd as the op's are.
    """
    shard = Shard(group, case)
    if shard.collective is None:
        return NO_COLLECTIVE
    x, w, dy, rows = shard.x, shard.w, shard.dy, shard.rows
    if not shard.forward:
        products = torch_backward(shard)

        def backward() -> tuple[Tensor, ...]:
            if shard.collective == "all_gather":
                return products(all_gather(dy, group, rows))
            dx, dw, db = products()
            if shard.collective == "all_reduce":
                return all_reduce(dx, group, dx), dw, db
            return reduce_scatter(dx, group), dw, db

        return gradients(shard, backward)

    def forward() -> Tensor:
        if shard.collective == "all_gather":
            return linear(all_gather(x, group, rows), w)
        y = linear(x, w)
        if shard.collective == "all_reduce":
            return all_reduce(y, group, y)
        return reduce_scatter(y, group)

    return Work(forward, lambda: shard.output_error(forward()))


def op(group: ParallelGroup, case: Case, implementation: str) -> Work | str:
    """The op itself."""
    if (collective_of(case) is None) != (implementation == "local"):
        return NO_COLLECTIVE if implementation != "local" else "communicates"
    asked = "auto" if implementation == "local" else implementation
    shard = Shard(group, case)
    if shard.forward:
        x, w = shard.x, shard.w
        call = lambda: shard.call_op(asked, x, w, None)
        return Work(call, lambda: shard.output_error(call()))
    leaves = tuple(t.detach().requires_grad_() for t in (shard.x, shard.w, shard.bias))
    y = shard.call_op(asked, *leaves)
    return gradients(shard, lambda: torch.autograd.grad(y, leaves, shard.dy, retain_graph=True))


def gradients(shard: Shard, call: Callable[[], tuple[Tensor, ...]], local: bool = False) -> Work:
    error = shard.local_gradient_error if local else shard.gradient_error
    return Work(call, lambda: error(*(gradient.detach() for gradient in call())))


def torch_backward(shard: Shard) -> Callable[..., tuple[Tensor, ...]]:
    """(dy) -> dx, dW, db of torch.nn.functional.linear on this rank; dy: default, that of all rows."""
    leaves = tuple(t.detach().requires_grad_() for t in (shard.all_x, shard.w, shard.bias))
    y = torch.nn.functional.linear(*leaves)
    return lambda dy=shard.all_dy: torch.autograd.grad(y, leaves, dy, retain_graph=True)


def local_gradients(dy: Tensor, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.mm(dy, w), torch.mm(dy.t(), x), bias_gradient(dy)


def chosen(group: ParallelGroup, case: Case) -> str:
    """The implementation that "auto" stands for."""
    if collective_of(case) is None:
        return "local"
    return choose(
        case["op"] if case["pass"] == "forward" else f"{case['op']}.backward",
        group,
        rows=case["rows"],
        width=case["hidden"],
        dtype=getattr(torch, case["dtype"]),
        device="cpu",
    ).implementation


# Contestants by name, in the order of their turns.
BUILDERS: dict[str, Builder] = {
    "gemm": partial(product, variant="mm"),
    "gemm linear": partial(product, variant="linear"),
    "gemm mv": partial(product, variant="mv"),
    "gemm few": partial(product, variant="few"),
    "gemm autograd": partial(product, variant="autograd"),
    "comm": partial(communication, via=collectives.through_python),
    "comm raw": partial(communication, via=collectives.through_engine),
    "serial": serial,
    "local": partial(op, implementation="local"),
    "host": partial(op, implementation="host"),
    "chunked": partial(op, implementation="chunked"),
    "reference": partial(op, implementation="reference"),
}
