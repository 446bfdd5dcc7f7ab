"""This rank's tensors with their offsets in the unsplit ones: what torch.distributed.checkpoint takes.

DTensor divides as torch.chunk does and knows no packed or overlapping parts, so every placement is told by
explicit offsets here; `as_dtensor` is for those that DTensor can express.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from tp_kernels.comm.errors import ShapeError, UnsupportedError

from .placement import ParamPlacement
from .state import is_dtensor, placement_by_id

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class Region(NamedTuple):
    """A box of a rank's tensor: where it lies in the unsplit tensor, and how many ranks hold it before."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]
    replica: int


class ShardedTensor(torch.Tensor):
    """This rank's part of an unsplit tensor, which torch.distributed.checkpoint saves and loads as such.

    Its `shape` is the unsplit one. It is no operand: computing with it raises UnsupportedError.

    Attributes:
        local: the rank's tensor itself; loading writes into it.
        regions: where its elements lie in the unsplit tensor. Regions with replica 0 are saved, all are
            loaded, so that every element is stored once however many ranks hold it.
    """

    local: Tensor
    regions: tuple[Region, ...]

    @staticmethod
    def __new__(
        cls, local: Tensor, shape: tuple[int, ...], regions: tuple[Region, ...]
    ) -> ShardedTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        self.local, self.regions = local.detach(), regions
        return self

    @property
    def chunks(self) -> list[tuple[Region, Tensor]]:
        """Every region with the view of `local` that it is."""
        return [(region, self._view(region)) for region in self.regions]

    def _view(self, region: Region) -> Tensor:
        view = self.local
        for dim, (start, length) in enumerate(zip(region.local_offsets, region.sizes, strict=True)):
            view = view.narrow(dim, start, length)
        return view

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch passes one of its own
        return f"ShardedTensor(shape={tuple(self.shape)}, regions={self.regions})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aten = torch.ops.aten
        old = args[0]
        local = None
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            local = func(old.local, *args[1:], **(kwargs or {}))
        elif func is aten.new_empty.default and tuple(args[1]) == tuple(old.shape):  # async_save
            local = func(old.local, old.local.shape, **(kwargs or {}))
        if local is not None:
            return cls(local, tuple(old.shape), old.regions)
        raise UnsupportedError(
            f"{func} of a ShardedTensor, which only says where a rank's tensor belongs; compute with its "
            "`.local`"
        )

    # What torch.distributed.checkpoint asks of tensors with a layout of their own.

    def __create_write_items__(self, name: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk, region in zip(self.__create_chunk_list__(), self.regions, strict=True)
            if region.replica == 0
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.sizes))
            for region in self.regions
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for region in self.regions:
            if torch.Size(region.offsets) == index.offset:
                return self._view(region)
        raise ShapeError(
            f"this rank holds nothing of '{index.fqn}' at {index.offset}: {self.regions}"
        )


def sharded(tensor: Tensor, placement: ParamPlacement) -> ShardedTensor:
    """A parameter, or a tensor shaped like it (a moment, a gradient), with its place in the unsplit tensor.

    Shares memory with `tensor`, which may be a DTensor that FSDP2 divides along one mesh dimension.

    Raises:
        ShapeError: `tensor` is not this rank's part.
        UnsupportedError: a DTensor that is divided otherwise.
    """
    placement.check(tensor)
    local, start = tensor.detach(), (0,) * tensor.dim()
    if is_dtensor(local):
        local, start = _local_box(local)
    return ShardedTensor(local, placement.shape, tuple(_regions(placement, local.shape, start)))


def sharded_state_dict(module: nn.Module) -> dict[str, Any]:
    """{stock name: ShardedTensor} for torch.distributed.checkpoint; shares memory with `module`.

    Values that have no placement (buffers, extra state) are what `state_dict` has, the same on all ranks.
    Tied parameters appear under each of their names. Nothing is communicated.
    """
    placed = placement_by_id(module)
    state: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) in placed:
            state[name] = sharded(value, placed[id(value)])
        else:
            state[name] = value.detach() if isinstance(value, Tensor) else value
    return state


def as_dtensor(
    tensor: Tensor, placement: ParamPlacement, mesh: DeviceMesh | None = None
) -> DTensor:
    """A parameter, or a tensor shaped like it, as a DTensor over the ranks of its group; shares memory.

    `for name, parameter, placement in placements(model): as_dtensor(parameter, placement)`

    Args:
        mesh: the one-dimensional DeviceMesh of the group; default: a new one.

    Raises:
        UnsupportedError: DTensor has no such division: ranks hold the same part, several pieces, or not what
            torch.chunk gives (a size that the ranks do not divide). Use `sharded_state_dict` for these.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placement.check(tensor)
    group = placement.group
    if group.process_group is None:
        raise UnsupportedError("as_dtensor needs torch.distributed to be initialised")
    if mesh is None:
        mesh = DeviceMesh.from_group(group.process_group, tensor.device.type)
    elif mesh.mesh.tolist() != group.ranks:
        raise UnsupportedError(f"as_dtensor: {mesh} is not over the ranks {group.ranks}")
    if placement.dim is not None:
        size = placement.shape[placement.dim]
        each = -(-size // group.size)
        for rank in range(group.size):
            chunk = (min(rank * each, size), min((rank + 1) * each, size))
            held = placement.pieces(rank)
            if held != (chunk,) and (
                chunk[0] != chunk[1] or placement.local_shape(rank)[placement.dim]
            ):
                raise UnsupportedError(
                    f"as_dtensor: rank {rank} of {group.size} holds {held} of dimension {placement.dim} of "
                    f"{placement.shape}, a DTensor would hold {chunk}; sharded_state_dict(model) says where "
                    "every part belongs"
                )
    return DTensor.from_local(
        tensor.detach(),
        mesh,
        [Replicate() if placement.dim is None else Shard(placement.dim)],
        run_check=False,
        shape=torch.Size(placement.shape),
        stride=torch.empty(placement.shape, device="meta").stride(),
    )


def _regions(
    placement: ParamPlacement, sizes: tuple[int, ...], start: tuple[int, ...]
) -> Iterator[Region]:
    """Regions of the box of `sizes` that begins at `start` of this rank's part."""
    nowhere = (0,) * len(sizes)
    if 0 in sizes:
        return
    dim = placement.dim
    if dim is None:
        yield Region(start, tuple(sizes), nowhere, placement.group.rank)
        return
    for span in placement.spans():
        low = max(span.at, start[dim])
        high = min(span.at + span.stop - span.start, start[dim] + sizes[dim])
        if low < high:
            yield Region(
                _with(start, dim, span.start + low - span.at),
                _with(tuple(sizes), dim, high - low),
                _with(nowhere, dim, low - start[dim]),
                span.replica,
            )


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _local_box(tensor: Any) -> tuple[Tensor, tuple[int, ...]]:
    """What this process holds of a DTensor, and where it begins in it."""
    from torch.distributed.tensor import Shard

    divided = [(i, place) for i, place in enumerate(tensor.placements) if not place.is_replicate()]
    start = (0,) * tensor.dim()
    local: Tensor = tensor.to_local()
    if not divided:
        return local, start
    (index, place), *more = divided
    if more or type(place) is not Shard:
        raise UnsupportedError(
            f"a DTensor with the placements {tensor.placements} has no simple offsets; gather it with "
            "full_state_dict(model)"
        )
    size = tensor.shape[place.dim]
    each = -(-size // tensor.device_mesh.size(index))  # as torch.chunk divides
    begin = min(tensor.device_mesh.get_local_rank(index) * each, size)
    return local, _with(start, place.dim, begin)
