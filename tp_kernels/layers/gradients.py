"""Gradients of parameters that are divided over ranks: completed, clipped; and how many parameters there are.

Everything reads `ParamPlacement`, never a name, and takes `gradient_of(parameter)`: its `main_grad` if there
is one, else its `grad`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tp_kernels.comm.collectives import all_reduce

from .placement import ParamPlacement, placements


def finalize_gradients(module: nn.Module) -> None:
    """Sum the gradients that the ranks hold in parts. Call once after backward, on every rank.

    Touches partial gradients only (norms under sequence parallelism, q/k norms, replicated KV heads);
    one all-reduce per group and dtype. Parameters without gradient count as zero on their rank.
    """
    buckets: dict[tuple[str, torch.dtype], list[tuple[nn.Parameter, ParamPlacement]]] = {}
    for _, parameter, placement in placements(module):
        if placement.needs_reduction and parameter.requires_grad:
            key = (placement.group.name, parameter.dtype)
            buckets.setdefault(key, []).append((parameter, placement))
    for members in buckets.values():
        _reduce_bucket(members)


def _reduce_bucket(members: Sequence[tuple[nn.Parameter, ParamPlacement]]) -> None:
    parameter, placement = members[0]
    total = sum(torch.Size(place.shape).numel() for _, place in members)
    flat = torch.zeros(total, dtype=parameter.dtype, device=parameter.device)
    unsplit = flat.split([torch.Size(place.shape).numel() for _, place in members])
    for (parameter, place), full in zip(members, unsplit, strict=True):
        if parameter.grad is not None:
            place.fill(full.view(place.shape), _undivided(parameter.grad))
    all_reduce(flat, placement.group, out=flat)
    for (parameter, place), full in zip(members, unsplit, strict=True):
        summed = place.slice(full.view(place.shape))
        if isinstance(parameter, DTensor):
            summed = distribute_tensor(
                summed, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        if parameter.grad is None:
            parameter.grad = summed.clone()
        else:
            parameter.grad.copy_(summed)


def _undivided(gradient: Tensor) -> Tensor:
    """This rank's whole gradient, which FSDP2 divides over other ranks than ours (collective over those)."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
