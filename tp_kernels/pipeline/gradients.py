"""Gradients of a pipeline: what replicas sum, and clipping by the norm of all stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import torch
from torch import Tensor, nn

from tp_kernels.comm.collectives import all_reduce, barrier
from tp_kernels.comm.errors import UnsupportedError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.layers.gradients import _total_norm, _unique, gradient_of
from tp_kernels.ops._weight_gradient import main_grad_of

from .agreement import gather


class SetAside:
    """Gradients that were there before a step, kept out of what the step sums over ranks.

    Steps may accumulate: what a step sends to other ranks is its own part alone, added to what was there.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._before: list[tuple[nn.Parameter, Tensor]] = []
        for p in parameters:
            main = main_grad_of(p)
            if main is not None:
                if main.any():
                    self._before.append((p, main.clone()))
                    main.zero_()
            elif p.grad is not None:
                self._before.append((p, p.grad))
                p.grad = None

    def put_back(self) -> None:
        for p, before in self._before:
            gradient = gradient_of(p)
            if gradient is None:
                p.grad = before
            else:
                gradient.add_(before)
        self._before = []


def set_gradient(parameter: nn.Parameter, total: Tensor) -> None:
    """`total` in `main_grad` if there is one, else as a `grad` of the parameter's own."""
    main = main_grad_of(parameter)
    if main is not None:
        main.copy_(total)
    elif parameter.grad is None:
        parameter.grad = total.to(parameter.dtype, copy=True)
    else:
        parameter.grad.copy_(total)


def sum_over_replicas(parameters: Sequence[nn.Parameter], group: ParallelGroup) -> None:
    """Sum of the gradients over the ranks of `group`, in rank order, equal bits on all. Collective.

    A parameter without gradient counts as zero on its rank; one without gradient on all ranks gets none.
    """
    # Failed replicas say so in host memory, where a process group would wait for its deadline.
    barrier(group)
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for p in parameters:
        main = main_grad_of(p)
        by_dtype.setdefault(p.dtype if main is None else main.dtype, []).append(p)
    for dtype, members in by_dtype.items():
        sizes = [p.numel() for p in members]
        flat = torch.zeros(sum(sizes) + len(members), dtype=dtype, device=members[0].device)
        *sums, there = flat.split([*sizes, len(members)])
        for index, p in enumerate(members):
            gradient = gradient_of(p)
            if gradient is not None:
                sums[index].view(p.shape).copy_(gradient)
                there[index] = 1
        all_reduce(flat, group, out=flat)
        for index, p in enumerate(members):
            if there[index]:
                set_gradient(p, sums[index].view(p.shape))


@torch.no_grad()
def clip_grad_norm_(
    modules: Sequence[nn.Module],
    max_norm: float,
    group: ParallelGroup,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    counted_elsewhere: Sequence[nn.Parameter] = (),
) -> Tensor:
    """Scale all gradients so that their norm over the whole pipeline is at most `max_norm`. Collective.

    Args:
        modules: the stages of this rank.
        group: the ranks of the pipeline.
        counted_elsewhere: parameters that are scaled but not counted here: tied ones of later stages.

    Returns:
        The norm before, float64 [], the same bits on all ranks of the pipeline.

    Raises:
        GroupMismatchError: ranks that do something else, such as a step, or with other arguments. No
            gradient is scaled then, and all ranks can go on.
    """
    call = f"clip_grad_norm_(max_norm={float(max_norm)}, norm_type={float(norm_type)})"
    if not norm_type > 0:
        gather(call, None, group, UnsupportedError(f"{call}: norm_type is not positive"))
    skipped = {id(p) for p in counted_elsewhere}
    found = [(p, place) for p, place in _unique(modules) if p.requires_grad]
    own = float(_total_norm([(p, place) for p, place in found if id(p) not in skipped], norm_type))
    norms = gather(call, own, group)
    if norm_type == inf:
        # max() drops a nan that is not the first
        total = next((norm for norm in norms if norm != norm), max(norms))
    else:
        total = sum(norm**norm_type for norm in norms) ** (1.0 / norm_type)
    if error_if_nonfinite and not abs(total) < inf:
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total}, so they cannot be clipped; "
            "error_if_nonfinite=False scales them nevertheless"
        )
    scale = max_norm / (total + 1e-6)
    scale = 1.0 if scale > 1.0 else scale  # a norm of nan makes all gradients nan, as torch does
    for p, _ in found:
        gradient = gradient_of(p)
        if gradient is not None:
            gradient.mul_(scale)
    return torch.tensor(total, dtype=torch.float64)
