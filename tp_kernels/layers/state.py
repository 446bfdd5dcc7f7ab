"""State of divided modules as unsplit tensors under stock names, for any number of ranks.

`state_dict` and `load_state_dict` stay torch's: this rank's slices, for the same rank of as many ranks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tp_kernels.comm.errors import ShapeError, TpKernelsError, UnsupportedError

from .placement import ParamPlacement, placements

_EXTRA_STATE = "_extra_state"  # torch's name of what get_extra_state returns


class LoadedKeys(NamedTuple):
    """What `load_full_state_dict` did not find, and what it did not use."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def full_tensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(stock name, unsplit value) of every entry of the state dict, one after the other (collective).

    Every rank gets all of them and has to iterate to the end. None is kept here but a tied one, until its
    last name, so that the unsplit model never exists unless the caller keeps it. Tied entries are gathered
    once and yield the same tensor. Parameters that FSDP2 divides further are gathered over both meshes.
    """
    placed = placement_by_id(module)
    state = module.state_dict(keep_vars=True)
    left = Counter(id(value) for value in state.values())
    kept: dict[int, Any] = {}
    for name, value in state.items():
        key = id(value)
        full = kept.pop(key) if key in kept else _unsplit(value, placed.get(key))
        left[key] -= 1
        if left[key]:
            kept[key] = full
        yield name, full
        del full


def full_state_dict(module: nn.Module, *, keep: bool = True) -> dict[str, Any]:
    """The stock, unsplit state dict (collective): copies on the device of `module`, tied ones shared.

    Args:
        keep: whether this rank wants it. Others return {} and never hold more than one unsplit tensor:
            `full_state_dict(model, keep=group.rank == 0)`.
    """
    return {name: value for name, value in full_tensors(module) if keep}


def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Any], strict: bool = True
) -> LoadedKeys:
    """Take this rank's part of each unsplit tensor in `state`: a dict, or a mapping that reads on demand.

    Every rank passes the same state; nothing is communicated. Of tied parameters one name is enough.
    Nothing is changed if something is wrong: shapes are looked at before the first tensor is copied.

    Raises:
        ShapeError: tensors that are not the unsplit ones, or different tensors for tied parameters.
        TpKernelsError: strict, and names are missing or unexpected.
        UnsupportedError: parameters on the meta device.
    """
    placed = placement_by_id(module)
    own = module.state_dict(keep_vars=True)
    source = _sources(own, state)
    missing = [name for name, found in source.items() if found is None]
    unexpected = [name for name in state if name not in own]
    wrong = [text for name, value in own.items() for text in _faults(name, value, state, placed)]
    given: dict[int, str] = {}
    for name, value in own.items():
        if isinstance(value, Tensor) and name in state:
            first = given.setdefault(id(value), name)
            if first != name and not _same(state[first], state[name]):
                wrong.append(f"{first} and {name} are tied, but differ in the state")
    title = f"loading a full state dict into {type(module).__name__}:\n  "
    if wrong:
        raise ShapeError(title + "\n  ".join(wrong))
    if strict and (missing or unexpected):
        lines = [f"missing: {name}" for name in missing]
        lines += [f"unexpected: {name}" for name in unexpected]
        raise TpKernelsError(title + "\n  ".join(lines))
    for name, value in own.items():
        found = source[name]
        if found is None:
            continue
        if is_extra_state(name):
            set_extra_state(module, name, state[found])
        else:
            take(value, state[found], placed.get(id(value)))
    return LoadedKeys(missing, unexpected)


def placement_by_id(module: nn.Module) -> dict[int, ParamPlacement]:
    """Placement of every placed parameter of `module`, by its id."""
    return {id(parameter): placement for _, parameter, placement in placements(module)}


def is_extra_state(name: str) -> bool:
    """Whether the entry `name` of a state dict is what a module's get_extra_state returned."""
    return name.rpartition(".")[2] == _EXTRA_STATE


def set_extra_state(module: nn.Module, name: str, value: Any) -> None:
    """Give the entry `name` of a state dict back to the module that it is the extra state of."""
    module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


def is_dtensor(value: Any) -> bool:
    """Whether `value` is a DTensor; a process that never imported them has none, and need not now."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _unsplit(value: Any, placement: ParamPlacement | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    local: Any = value.detach()
    if is_dtensor(local):
        local = local.full_tensor()
    return local.clone() if placement is None else placement.gather(local)


def _sources(own: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, str | None]:
    """For every name of the module, the name in `state` to read: its own, or that of a tied twin."""
    found: dict[int, str] = {}
    for name, value in own.items():
        if name in state and isinstance(value, Tensor):
            found.setdefault(id(value), name)
    return {name: name if name in state else found.get(id(own[name])) for name in own}


def _faults(
    name: str, value: Any, state: Mapping[str, Any], placed: Mapping[int, ParamPlacement]
) -> Iterator[str]:
    if name not in state or is_extra_state(name):
        return
    if value.is_meta:
        raise UnsupportedError(
            f"loading a full state dict: '{name}' is on the meta device; materialize(model) first"
        )
    placement = placed.get(id(value))
    expected = tuple(value.shape) if placement is None else placement.shape
    found = tuple(state[name].shape)
    if found != expected:
        yield f"{name} is {found}, the unsplit tensor is {expected}"


def _same(a: Tensor, b: Tensor) -> bool:
    one = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return one or torch.equal(a, b)  # NaN is not equal to itself, one tensor is


@torch.no_grad()
def take(value: Tensor, full: Tensor, placement: ParamPlacement | None) -> None:
    """Copy this rank's part of an unsplit tensor into `value`, a parameter or buffer."""
    part = full if placement is None else placement.slice(full)
    if is_dtensor(value):
        from torch.distributed.tensor import distribute_tensor

        dtensor: Any = value
        part = distribute_tensor(  # every rank has all of it, so nothing is sent
            part.to(value.device), dtensor.device_mesh, dtensor.placements, src_data_rank=None
        )
    value.copy_(part)
