"""Sharded checkpoints in two lines: any number of ranks writes, any other number reads.

A thin layer over torch.distributed.checkpoint. It pickles parts of what it writes: load what you trust.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tp_kernels.comm.errors import ShapeError, TpKernelsError, UnsupportedError

from .placement import ParamPlacement
from .sharded import sharded, sharded_state_dict
from .state import is_extra_state, placement_by_id, set_extra_state

_GROUPS = "optimizer.param_groups"
_STATE = "optimizer.state."  # then the optimizer's own key, a dot, and the name of the parameter


def save_sharded(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write `model` and the state of `optimizer` into a new checkpoint; every rank writes a part.

    Collective. Elements that several ranks hold are written once. The metadata, without which nothing
    loads, is written last: a save that failed or was killed leaves no checkpoint, and may be repeated.

    Args:
        directory: that all ranks see; made if it is not there.
        optimizer: its tensors of a parameter's shape are divided as the parameter is.
        process_group: all ranks that hold a part of the model; default: all.

    Raises:
        TpKernelsError: on all ranks, if `directory` holds a checkpoint already, or writing failed somewhere.
        UnsupportedError: an optimizer's tensor for a divided parameter that is neither of its shape nor a
            scalar, or a parameter that is not of `model`.
    """
    from torch.distributed.checkpoint import FileSystemWriter, save

    state = _model_state(model)
    if optimizer is not None:
        state |= _optimizer_state(model, optimizer)
    # Overwriting would leave old metadata beside new data for a while.
    writer = FileSystemWriter(directory, overwrite=False)
    title = f"save_sharded({os.fspath(directory)!r})"
    _run(title, process_group, lambda **where: save(state, storage_writer=writer, **where))


def load_sharded(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Read a checkpoint of `save_sharded` into `model` and `optimizer`, on any number of ranks. Collective.

    Every rank reads the parts that it holds. Of tied parameters one name is enough. `optimizer` has the
    same parameters in the same groups; what it held before is replaced, hyperparameters included.

    Args:
        strict: names that the checkpoint or the model lacks are an error.

    Raises:
        UnsupportedError: `directory` holds no complete checkpoint, or none of an optimizer.
        ShapeError: unsplit shapes that differ.
        TpKernelsError: strict, and names differ; groups of other parameters; or reading failed. Except for
            the last, nothing has been changed.
    """
    from torch.distributed.checkpoint import FileSystemReader, load

    title = f"load_sharded({os.fspath(directory)!r})"
    if not (Path(directory) / ".metadata").is_file():
        raise UnsupportedError(
            f"{title}: no complete checkpoint: it has no .metadata, which is written last. The save was "
            "interrupted, or this is another directory"
        )
    reader = FileSystemReader(directory)
    stored = reader.read_metadata().state_dict_metadata

    def read(state: dict[str, Any]) -> None:
        _run(title, process_group, lambda **where: load(state, storage_reader=reader, **where))

    state = _wanted(title, model, stored, strict)
    if optimizer is None:
        read(state)
    else:
        groups = _stored_groups(title, model, optimizer, stored, read)
        moments, targets = _empty_moments(model, optimizer, stored)
        state |= targets
        read(state)  # tensors in their place, objects as entries of `state`
        _give(model, optimizer, groups, {name: moments.get(name, state[name]) for name in targets})
    for name, value in state.items():
        if name.startswith("model.") and is_extra_state(name):
            set_extra_state(model, name.removeprefix("model."), value[0])


def _run(title: str, group: dist.ProcessGroup | None, function: Callable[..., object]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    alone = not dist.is_available() or not dist.is_initialized()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")  # alone: as intended
            function(process_group=group, no_dist=alone)
    except CheckpointException as failure:  # not an Exception to torch
        causes = {rank: f"{type(e[0]).__name__}: {e[0]}" for rank, e in failure.failures.items()}
        raise TpKernelsError(f"{title} failed on ranks {causes}") from failure


def _model_state(model: nn.Module) -> dict[str, Any]:
    # A tuple is one object to torch.distributed.checkpoint; dicts and lists are one per element.
    return {
        f"model.{name}": (value,) if is_extra_state(name) else value
        for name, value in sharded_state_dict(model).items()
    }


def _wanted(title: str, model: nn.Module, stored: dict[str, Any], strict: bool) -> dict[str, Any]:
    """What to read for the model, after checking names and shapes."""
    own = model.state_dict(keep_vars=True)
    shards = _model_state(model)
    found = {id(value) for name, value in own.items() if f"model.{name}" in stored}
    missing = [n for n, v in own.items() if f"model.{n}" not in stored and id(v) not in found]
    unexpected = [n for n in stored if n.startswith("model.") and n not in shards]
    if strict and (missing or unexpected):
        raise TpKernelsError(f"{title}: missing {missing}, unexpected {unexpected}")
    wanted = {name: value for name, value in shards.items() if name in stored}
    for name, value in wanted.items():
        size = getattr(stored[name], "size", None)
        if isinstance(value, Tensor) and size is not None and size != value.shape:
            raise ShapeError(
                f"{title}: {name} is {tuple(size)}, the unsplit tensor of this model is "
                f"{tuple(value.shape)}"
            )
    return wanted


def _named(
    model: nn.Module, optimizer: Optimizer
) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
    """(name, parameter, group) of everything that `optimizer` updates."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise UnsupportedError(
                    f"an optimizer's parameter of shape {tuple(parameter.shape)} is not of the model"
                )
            yield names[id(parameter)], parameter, group


def _group_values(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Hyperparameters of each group as plain values, with the names of its parameters."""
    names = {id(parameter): name for name, parameter, _ in _named(model, optimizer)}
    groups = []
    for group in optimizer.param_groups:
        plain = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items()}
        groups.append(plain | {"params": [names[id(p)] for p in group["params"]]})
    return groups


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    placed = placement_by_id(model)
    state: dict[str, Any] = {_GROUPS: tuple(_group_values(model, optimizer))}
    for name, parameter, _ in _named(model, optimizer):
        placement = placed.get(id(parameter))
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and placement is not None:
                value = _divided_like(name, key, value, parameter, placement)
            state[f"{_STATE}{key}.{name}"] = value
    return state


def _divided_like(
    name: str, key: str, value: Tensor, parameter: Tensor, placement: ParamPlacement
) -> Tensor:
    if value.shape == parameter.shape and key != "step":
        return sharded(value, placement)
    if value.numel() > 1 and placement.dim is not None:
        raise UnsupportedError(
            f"save_sharded: the optimizer keeps '{key}' of shape {tuple(value.shape)} for {name}, of "
            f"which this rank holds {tuple(parameter.shape)}: how it is divided is not known"
        )
    return value


def _stored_groups(
    title: str,
    model: nn.Module,
    optimizer: Optimizer,
    stored: dict[str, Any],
    read: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """The saved hyperparameters, after checking that the groups hold the same parameters."""
    if _GROUPS not in stored:
        raise UnsupportedError(f"{title}: it was saved without an optimizer")
    state: dict[str, Any] = {_GROUPS: None}
    read(state)
    groups = list(state[_GROUPS])
    saved = [group["params"] for group in groups]
    own = [group["params"] for group in _group_values(model, optimizer)]
    if saved != own:
        raise TpKernelsError(
            f"{title}: the optimizer's groups hold {own}, those of the checkpoint {saved}"
        )
    return groups


def _empty_moments(
    model: nn.Module, optimizer: Optimizer, stored: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Room for the tensors that the optimizer will hold, by stored name; and what to read into."""
    placed = placement_by_id(model)
    named = {name: (parameter, group) for name, parameter, group in _named(model, optimizer)}
    moments: dict[str, Tensor] = {}
    targets: dict[str, Any] = {}
    for full_name, what in stored.items():
        if not full_name.startswith(_STATE):
            continue
        key, name = full_name.removeprefix(_STATE).split(".", 1)
        parameter, group = named[name]
        placement = placed.get(id(parameter))
        size = getattr(what, "size", None)
        if size is None:  # not a tensor
            targets[full_name] = None
            continue
        dtype = what.properties.dtype
        whole = tuple(parameter.shape) if placement is None else placement.shape
        if tuple(size) == whole and key != "step":
            moments[full_name] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        else:
            on_device = group.get("capturable") or group.get("fused")  # torch keeps others here
            device = parameter.device if on_device else "cpu"
            moments[full_name] = torch.empty(size, dtype=dtype, device=device)
            placement = None
        value = moments[full_name]
        targets[full_name] = value if placement is None else sharded(value, placement)
    return moments, targets


def _give(
    model: nn.Module,
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    moments: dict[str, Any],
) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), Tensor):  # a captured step holds this very tensor
                group[key].fill_(value)
            elif key != "params":
                group[key] = value
    by_name: dict[str, dict[str, Any]] = {}
    for full_name, value in moments.items():
        key, name = full_name.removeprefix(_STATE).split(".", 1)
        by_name.setdefault(name, {})[key] = value
    for name, parameter, _ in _named(model, optimizer):
        optimizer.state.pop(parameter, None)
        if name in by_name:
            optimizer.state[parameter] = by_name[name]
