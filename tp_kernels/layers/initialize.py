"""Initial values that do not depend on the number of ranks, for models made on the meta device and others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from tp_kernels.comm.errors import UnsupportedError

from .state import is_dtensor, placement_by_id, take

Rule = Callable[[Tensor, torch.Generator], object]
"""Fills an unsplit tensor in place with the generator given, as functions of `torch.nn.init` do."""


def materialize(
    model: nn.Module, device: torch.device | str = "cpu", seed: int | None = None
) -> nn.Module:
    """Give a model made under `torch.device("meta")` memory and initial values, in place.

    The values are those of direct construction on `device` with the same seed, on any number of ranks:
    each module draws its unsplit parameters and keeps this rank's part, so that at most one unsplit layer
    exists at a time. That holds for modules constructed in the order in which they are registered, which
    is the order of `model.modules()`; of tied parameters, the values of the first remain.

    Args:
        seed: the same on all ranks; torch's generators are as before afterwards. None: they are used, and
            advance, as in direct construction.

    What is not on the meta device keeps its values. Tied parameters stay tied; buffers are filled by
    `reset_parameters` of their module.

    Raises:
        UnsupportedError: modules with meta tensors of their own, but without reset_parameters(); DTensors;
            meta tensors with hooks or attributes; before anything is changed. Tensors that nothing fills.
    """
    device = torch.device(device)
    mine = [
        (name, module)
        for name, module in model.named_modules()
        if any(tensor.is_meta for tensor in _own(module).values())
    ]
    for name, module in mine:
        for key, tensor in _own(module).items():
            if is_dtensor(tensor):
                raise UnsupportedError(
                    f"materialize: '{key}' of {_shown(name, module)} is a DTensor; materialize "
                    "before fully_shard"
                )
            if tensor.__dict__ or tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                raise UnsupportedError(
                    f"materialize: '{key}' of {_shown(name, module)} has hooks or attributes "
                    f"({', '.join(tensor.__dict__)}), which would be lost; add them afterwards"
                )
    lost = [
        f"{_shown(name, module)}: {', '.join(_own(module))}"
        for name, module in mine
        if not callable(getattr(module, "reset_parameters", None))
    ]
    if lost:
        raise UnsupportedError(
            f"materialize: no reset_parameters() in {'; '.join(lost)}. Add it (it fills the module's own "
            "parameters and buffers), or give these modules tensors before"
        )
    made: dict[int, Tensor] = {}
    with _seeded(seed, device):
        for name, module in mine:
            fresh = _allocate(module, device, made)
            kept = {k: t.detach().clone() for k, t in _own(module).items() if k not in fresh}
            module.reset_parameters()
            own = _own(module)
            with torch.no_grad():
                for key, value in kept.items():
                    own[key].copy_(value)
            for key in fresh:
                if own[key].is_floating_point() and bool(own[key].isnan().any()):
                    raise UnsupportedError(
                        f"materialize: reset_parameters() of {_shown(name, module)} does not "
                        f"fill '{key}'"
                    )
    return model


def initialize_(model: nn.Module, rules: Mapping[str, Rule], *, seed: int) -> nn.Module:
    """Fill the parameters of `model` by name, in place; each draws with a generator of its own.

    The unsplit values depend on the seed and the parameter's name only, not on the number of ranks, the
    device, or the order of modules. One unsplit parameter exists at a time.

    Args:
        rules: name pattern (as in fnmatch; the first that matches counts) -> function of the unsplit
            tensor, on the CPU, and the generator to use:
            `{"*.bias": lambda b, g: b.zero_(), "*": lambda w, g: nn.init.normal_(w, 0, 0.02, generator=g)}`.

    Raises:
        UnsupportedError: before anything is changed: parameters that no rule matches, rules that match
            none, parameters on the meta device.
    """
    placed = placement_by_id(model)
    chosen: list[tuple[str, nn.Parameter, str]] = []
    unmatched = []
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UnsupportedError(
                f"initialize_: '{name}' is on the meta device; materialize first"
            )
        pattern = next((pattern for pattern in rules if fnmatchcase(name, pattern)), None)
        if pattern is None:
            unmatched.append(name)
        else:
            chosen.append((name, parameter, pattern))
    unused = rules.keys() - {pattern for _, _, pattern in chosen}
    if unmatched or unused:
        raise UnsupportedError(
            f"initialize_: no rule for {unmatched}, nothing left for the rules {sorted(unused)}"
        )
    for name, parameter, pattern in chosen:
        placement = placed.get(id(parameter))
        shape = parameter.shape if placement is None else placement.shape
        full = torch.empty(shape, dtype=parameter.dtype)
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        with torch.no_grad():
            rules[pattern](full, generator)
            take(parameter, full, placement)
    return model


def _shown(name: str, module: nn.Module) -> str:
    return f"{name or 'the model itself'} ({type(module).__name__})"


def _own(module: nn.Module) -> dict[str, Tensor]:
    """The module's own parameters and buffers by name."""
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    return own | dict(module.named_buffers(recurse=False, remove_duplicate=False))


def _allocate(module: nn.Module, device: torch.device, made: dict[int, Tensor]) -> list[str]:
    """Exchange the module's own meta tensors for real ones, tied ones for the same; names of new ones.

    NaN shows what nobody fills.
    """
    fresh = []
    for name, old in _own(module).items():
        if not old.is_meta:
            continue
        if id(old) not in made:
            new = torch.empty_like(old, device=device, requires_grad=False)
            if new.is_floating_point():
                new.fill_(torch.nan)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
            made[id(old)] = new
            fresh.append(name)
        held = module._parameters if name in module._parameters else module._buffers
        held[name] = made[id(old)]  # type: ignore[assignment]  # of the kind that was there
    return fresh


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """torch's generators with `seed`; afterwards they are as before. None: nothing of that."""
    if seed is None:
        yield
        return
    others = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(others, device_type=device.type):
        torch.manual_seed(seed)
        yield
