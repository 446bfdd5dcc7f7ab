"""Where each parameter lives: declared once, read by gradients, checkpoints, clipping and counting.

A module keeps `placements: dict[parameter name, ParamPlacement]`; nothing is ever inferred from a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from tp_kernels.comm.collectives import all_gather, all_reduce
from tp_kernels.comm.errors import ShapeError
from tp_kernels.comm.group import ParallelGroup


@dataclass(frozen=True)
class ParamPlacement:
    """One parameter's place in the unsplit tensor.

    Attributes:
        shape: of the unsplit tensor.
        dim: the dimension that is divided over ranks; None when every rank holds the whole.
        ranges: half-open [start, stop) of every rank along `dim`. Ranges may overlap (a KV head held by
            several ranks); the gradient of an overlap is the sum over exactly the ranks that hold it.
        partial_gradient: a whole (dim=None) parameter that each rank uses for a part of the work, so
            that its gradient is a summand (norm weights under sequence parallelism).
        group: the ranks concerned.
    """

    group: ParallelGroup
    shape: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    partial_gradient: bool = False

    @property
    def overlapping(self) -> bool:
        return any(b[0] < a[1] for a, b in pairwise(self.ranges))

    @property
    def needs_reduction(self) -> bool:
        return self.group.size > 1 and (self.partial_gradient or self.overlapping)

    @property
    def local_range(self) -> tuple[int, int]:
        return self.ranges[self.group.rank]

    def local_shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        start, stop = self.local_range
        return (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])

    def slice(self, full: Tensor) -> Tensor:
        """This rank's part of the unsplit tensor; a view."""
        if tuple(full.shape) != self.shape:
            raise ShapeError(f"unsplit tensor is {tuple(full.shape)}, expected {self.shape}")
        if self.dim is None:
            return full
        start, stop = self.local_range
        return full.narrow(self.dim, start, stop - start)

    def gather(self, local: Tensor) -> Tensor:
        """The unsplit tensor on every rank (collective). Overlaps are taken from the first holder."""
        if self.dim is None or self.group.size == 1:
            return local.detach().clone()
        rows = local.detach().movedim(self.dim, 0).contiguous()
        counts = [stop - start for start, stop in self.ranges]
        stacked = all_gather(rows, self.group, counts=counts)
        full = rows.new_empty(self.shape[self.dim], *rows.shape[1:])
        first = 0
        filled = 0
        for (_, stop), count in zip(self.ranges, counts, strict=True):
            new = max(0, stop - filled)
            full[stop - new : stop] = stacked[first + count - new : first + count]
            first += count
            filled = max(filled, stop)
        return full.movedim(0, self.dim).contiguous()


def placements(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParamPlacement]]:
    """(qualified name, parameter, placement) of every placed parameter; shared ones appear once."""
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        for name, placement in getattr(child, "placements", {}).items():
            parameter = getattr(child, name, None)
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{prefix}.{name}" if prefix else name, parameter, placement


def place(module: nn.Module, name: str, placement: ParamPlacement) -> None:
    """Declare the placement of `module`'s own parameter `name`."""
    module.__dict__.setdefault("placements", {})[name] = placement


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
    pieces = []
    offset = 0
    for parameter, place in members:
        size = torch.Size(place.shape).numel()
        piece = place.slice(flat[offset : offset + size].view(place.shape))
        if parameter.grad is not None:
            piece.copy_(parameter.grad)
        pieces.append((parameter, place, offset, size))
        offset += size
    flat = all_reduce(flat, placement.group)
    for parameter, place, offset, size in pieces:
        summed = place.slice(flat[offset : offset + size].view(place.shape))
        if parameter.grad is None:
            parameter.grad = summed.clone()
        else:
            parameter.grad.copy_(summed)
