"""Where each parameter lives: declared once, read by gradients, checkpoints, clipping and counting.

A module keeps `placements: dict[parameter name, ParamPlacement]`; nothing is ever inferred from a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from tp_kernels.comm.collectives import all_gather
from tp_kernels.comm.errors import ShapeError
from tp_kernels.comm.group import ParallelGroup

Piece: TypeAlias = tuple[int, int]
Ranges: TypeAlias = Sequence[Piece | tuple[Piece, ...]]
"""What every rank holds along one dimension."""


class Span(NamedTuple):
    """A part of a rank's tensor along the divided dimension, with the same holders throughout.

    [start, stop) in the unsplit tensor lies from `at` in the rank's own; `replica` earlier ranks hold it too.
    """

    start: int
    stop: int
    at: int
    replica: int


@dataclass(frozen=True)
class ParamPlacement:
    """One parameter's place in the unsplit tensor.

    Attributes:
        group: the ranks concerned.
        shape: of the unsplit tensor.
        dim: the dimension that is divided over ranks; None when every rank holds the whole.
        ranges: of every rank, the half-open (start, stop) that it holds along `dim`, or, for packed
            parameters, a tuple of such pieces, which it holds one after the other. Ranks may hold the
            same (a KV head used by several); the gradient of such a part is the sum over its holders.
        partial_gradient: a whole (dim=None) parameter that each rank uses for a part of the work, so
            that its gradient is a summand (norm weights under sequence parallelism).

    Raises:
        ShapeError: a dimension that is not there, pieces outside it, pieces of one rank that overlap, or
            elements that no rank holds.
    """

    group: ParallelGroup
    shape: tuple[int, ...]
    dim: int | None = None
    ranges: Ranges = ()
    partial_gradient: bool = False

    def __post_init__(self) -> None:
        if self.dim is None:
            if self.ranges:
                raise ShapeError(f"ranges {self.ranges} but dim=None")
            return
        where = f"dimension {self.dim} of {self.shape}"
        if not 0 <= self.dim < len(self.shape):
            raise ShapeError(f"there is no {where}")
        if self.partial_gradient:
            raise ShapeError(f"{where} is divided: only whole parameters have a partial gradient")
        size = self.shape[self.dim]
        if len(self.ranges) != self.group.size:
            raise ShapeError(
                f"{len(self.ranges)} ranges {self.ranges} for {where} on {self.group.size} ranks"
            )
        every: list[Piece] = []
        for rank in range(self.group.size):
            held = sorted(piece for piece in self.pieces(rank) if piece[0] != piece[1])
            if any(not 0 <= start < stop <= size for start, stop in held):
                raise ShapeError(f"rank {rank} holds {self.ranges[rank]}: not inside {where}")
            if any(b[0] < a[1] for a, b in pairwise(held)):
                raise ShapeError(f"rank {rank} holds {self.ranges[rank]} of {where}: they overlap")
            every += held
        covered = 0
        for start, stop in sorted(every):
            if start > covered:
                break
            covered = max(covered, stop)
        if covered != size:
            raise ShapeError(f"ranges {self.ranges} do not cover {where}: nobody holds {covered}")

    @property
    def overlapping(self) -> bool:
        """Some elements are held by several ranks, though not all by all."""
        if self.dim is None:
            return False
        return sum(self._length(rank) for rank in range(self.group.size)) > self.shape[self.dim]

    @property
    def needs_reduction(self) -> bool:
        return self.group.size > 1 and (self.partial_gradient or self.overlapping)

    def pieces(self, rank: int | None = None) -> tuple[Piece, ...]:
        """What `rank` (default: this one) holds along `dim`, in order; () of a whole parameter."""
        if self.dim is None:
            return ()
        held = self.ranges[self.group.rank if rank is None else rank] or ((0, 0),)
        return (held,) if isinstance(held[0], int) else held

    def spans(self, rank: int | None = None) -> list[Span]:
        """The pieces of `rank`, cut where the ranks that hold them change; [] of a whole parameter."""
        rank = self.group.rank if rank is None else rank
        earlier = [self.pieces(before) for before in range(rank)]
        edges = {edge for pieces in earlier for piece in pieces for edge in piece}
        spans = []
        at = 0
        for start, stop in self.pieces(rank):
            cuts = sorted({start, stop, *(edge for edge in edges if start < edge < stop)})
            for low, high in pairwise(cuts):
                replica = sum(any(a <= low and high <= b for a, b in pieces) for pieces in earlier)
                spans.append(Span(low, high, at, replica))
                at += high - low
        return spans

    def owned(self, rank: int | None = None) -> tuple[Piece, ...]:
        """What of its pieces `rank` counts and saves: each element belongs to its first holder.

        () of a whole parameter, which rank 0 owns.
        """
        return tuple((span.start, span.stop) for span in self.spans(rank) if span.replica == 0)

    def owned_views(self, local: Tensor) -> list[Tensor]:
        """What this rank owns of its tensor (parameter, gradient, moment), one view per `owned` piece."""
        if self.dim is None:
            return [local] if self.group.rank == 0 else []
        spans = [span for span in self.spans() if span.replica == 0]
        return [local.narrow(self.dim, span.at, span.stop - span.start) for span in spans]

    def views(self, local: Tensor) -> list[Tensor]:
        """This rank's tensor, one view per piece."""
        if self.dim is None:
            return [local]
        return list(local.split([stop - start for start, stop in self.pieces()], self.dim))

    def local_shape(self, rank: int | None = None) -> tuple[int, ...]:
        """Shape of what `rank` (default: this one) holds."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self._length(rank), *self.shape[self.dim + 1 :])

    def slice(self, full: Tensor) -> Tensor:
        """This rank's part of the unsplit tensor; a view unless it has several pieces."""
        parts = self._parts(full)
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim or 0)

    def fill(self, full: Tensor, local: Tensor) -> None:
        """Write this rank's part into the unsplit tensor, whose other elements stay."""
        for part, view in zip(self._parts(full), self.views(local), strict=True):
            part.copy_(view)

    def gather(self, local: Tensor) -> Tensor:
        """The unsplit tensor on every rank (collective). Overlaps are taken from the first holder."""
        self.check(local)
        if self.dim is None:
            return local.detach().clone()
        rows = local.detach().movedim(self.dim, 0).contiguous()
        counts = [self._length(rank) for rank in range(self.group.size)]
        stacked = all_gather(rows, self.group, counts=counts).split(counts)
        full = rows.new_empty(self.shape[self.dim], *rows.shape[1:])
        for rank, part in enumerate(stacked):
            for start, stop, at, replica in self.spans(rank):
                if replica == 0:
                    full[start:stop] = part[at : at + stop - start]
        return full.movedim(0, self.dim).contiguous()

    def check(self, local: Tensor) -> None:
        """Raise ShapeError for a tensor that cannot be this rank's part."""
        if tuple(local.shape) != self.local_shape():
            raise ShapeError(
                f"rank {self.group.rank} of {self.group.size} holds {self.local_shape()} of the unsplit "
                f"{self.shape}; this tensor is {tuple(local.shape)}"
            )

    def _length(self, rank: int | None) -> int:
        return sum(stop - start for start, stop in self.pieces(rank))

    def _parts(self, full: Tensor) -> list[Tensor]:
        if tuple(full.shape) != self.shape:
            raise ShapeError(f"unsplit tensor is {tuple(full.shape)}, expected {self.shape}")
        if self.dim is None:
            return [full]
        return [full.narrow(self.dim, start, stop - start) for start, stop in self.pieces()]


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
    """Declare the placement of `module`'s own parameter `name`; call after nn.Module.__init__."""
    if "placements" not in module.__dict__:
        module.__dict__["placements"] = {}
        module.register_state_dict_post_hook(_record_rank)
        module.register_load_state_dict_pre_hook(_check_slices)
    module.__dict__["placements"][name] = placement


def _record_rank(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Note in the metadata of a state dict whose slices it holds."""
    metadata["tensor_parallel"] = {
        name: (place.group.rank, place.group.size)
        for name, place in module.__dict__["placements"].items()
        if place.dim is not None
    }


def _check_slices(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Before `load_state_dict`: refuse slices that are not this rank's, also where the shapes agree."""
    for name, placement in module.__dict__["placements"].items():
        value = state.get(prefix + name)
        if placement.dim is None or not isinstance(value, Tensor):
            continue
        group = placement.group
        saved = metadata.get("tensor_parallel", {}).get(name, (group.rank, group.size))
        if tuple(value.shape) == placement.local_shape() and saved == (group.rank, group.size):
            continue
        origin = "" if saved[1] == group.size == 1 else f", saved by rank {saved[0]} of {saved[1]}"
        raise ShapeError(
            f"load_state_dict: '{prefix}{name}' is {tuple(value.shape)}{origin}; rank {group.rank} of "
            f"{group.size} holds {placement.local_shape()} of the unsplit {placement.shape}. A state dict "
            "of slices fits the same rank of as many ranks only. load_full_state_dict(module, state) "
            "takes unsplit tensors, load_sharded(directory, module) what save_sharded wrote, both on any "
            "number of ranks"
        )
