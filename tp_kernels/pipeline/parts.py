"""Where a Hugging Face causal language model keeps its units, and the model without some of them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel

from tp_kernels.comm.errors import UnsupportedError


@dataclass
class Parts:
    """Where a model keeps its units."""

    model: PreTrainedModel
    base: Any
    layers: str
    embedding: str
    norm: str
    head: str

    @staticmethod
    def of(model: PreTrainedModel) -> Parts:
        base = model.base_model
        wanted = model.config.get_text_config().num_hidden_layers
        children = dict(base.named_children())
        layers = [
            name
            for name, child in children.items()
            if isinstance(child, nn.ModuleList) and len(child) == wanted
        ]
        norms = [name for name, child in children.items() if "norm" in type(child).__name__.lower()]
        embedding = _name_of(base, model.get_input_embeddings())
        head = _name_of(model, model.get_output_embeddings())
        lacks = [
            text
            for found, text in (
                (len(layers) == 1, f"one ModuleList of {wanted} layers"),
                (len(norms) == 1, "one norm beside it"),
                (embedding in children, "an input embedding beside it"),
                (head is not None, "an output embedding"),
                (not model.config.is_encoder_decoder, "a decoder only"),
            )
            if not found
        ]
        if lacks:
            raise UnsupportedError(
                f"{type(model).__name__} cannot be cut into stages: its {type(base).__name__} has not "
                f"{', '.join(lacks)} but {', '.join(f'{n}: {type(c).__name__}' for n, c in children.items())}"
            )
        assert embedding is not None and head is not None
        return Parts(model, base, layers[0], embedding, norms[0], head)

    @property
    def count(self) -> int:
        return len(getattr(self.base, self.layers))

    @property
    def cache_name(self) -> str:
        """transformers 5 renamed the argument."""
        names = inspect.signature(type(self.base).forward).parameters
        return "cache" if "cache" in names else "past_key_values"

    def ties(self, stages: int) -> list[tuple[tuple[int, str], ...]]:
        """Parameters that the first and the last stage both hold, as (stage, name) in the stage."""
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if stages == 1 or embedding.weight is not head.weight:
            return []
        first, last = (f"lm.{_name_of(self.model, module)}.weight" for module in (embedding, head))
        return [((0, first), (stages - 1, last))]

    def keep(self, layers: range, first: bool, last: bool) -> None:
        """Let go of all other units."""
        base, model = self.base, self.model
        setattr(base, self.layers, _Layers(getattr(base, self.layers), layers))
        base.config = model.config = _config_of(model.config, layers)
        if not last:
            setattr(base, self.norm, nn.Identity())
            _set(model, self.head, None)
        if not first:
            setattr(base, self.embedding, None)
            for name, child in list(base.named_children()):
                if name in (self.layers, self.norm):
                    continue
                if isinstance(child, nn.Embedding):
                    setattr(base, name, _Nothing())
                elif isinstance(child, nn.Dropout):
                    setattr(base, name, nn.Identity())
            self._check_that_inputs_pass()

    def _check_that_inputs_pass(self) -> None:
        """Without layers and norm, hidden states must come out as they went in."""
        base = shared_copy(self.base).eval()
        setattr(base, self.layers, _Layers(nn.ModuleList(), range(0)))
        setattr(base, self.norm, nn.Identity())
        base.config = _config_of(base.config, range(0))
        hidden = torch.linspace(-1, 1, 2 * base.config.hidden_size).view(1, 2, -1)
        try:
            with torch.no_grad():
                passed = base(inputs_embeds=hidden, use_cache=False).last_hidden_state
            same = torch.equal(passed, hidden)
            why = "changes hidden states that come from a stage before"
        except Exception as error:
            same, why = False, f"does not take hidden states ({type(error).__name__}: {error})"
        if not same:
            raise UnsupportedError(
                f"{type(self.model).__name__} cannot be cut into stages: outside of its layers "
                f"{type(base).__name__} {why}"
            )


class _Layers(nn.ModuleList):
    """Some layers of a list, under the names they have there."""

    def __init__(self, layers: nn.ModuleList, kept: range) -> None:
        super().__init__()
        for index in kept:
            self.add_module(str(index), layers[index])

    def __getitem__(self, index: Any) -> Any:
        return list(self._modules.values())[index]


class _Nothing(nn.Module):
    """In the place of an embedding that an earlier stage has added."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())


def _config_of(config: Any, layers: range) -> Any:
    """`config` for these layers only, from which masks and caches are made."""
    own = copy.deepcopy(config)
    own.num_hidden_layers = len(layers)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        unknown = set(kinds) - {"full_attention", "sliding_attention", "chunked_attention"}
        if unknown:
            raise UnsupportedError(
                f"architecture '{config.model_type}' cannot be cut into stages: layers of type "
                f"{', '.join(sorted(unknown))} keep states that a stage's cache does not know"
            )
        own.layer_types = [kinds[index] for index in layers]
    return own


def _name_of(root: nn.Module, module: nn.Module | None) -> str | None:
    return next((name for name, found in root.named_modules() if found is module), None)


def _set(root: nn.Module, name: str, module: nn.Module | None) -> None:
    parent, _, child = name.rpartition(".")
    setattr(root.get_submodule(parent), child, module)


def shared_copy(module: Any) -> Any:
    """Modules of their own with the parameters and buffers of `module`."""
    copies: dict[int, Any] = {}

    def share(module: nn.Module | None) -> Any:
        if module is None:
            return None
        if id(module) not in copies:
            new = copies[id(module)] = copy.copy(module)
            new._parameters = dict(module._parameters)
            new._buffers = dict(module._buffers)
            new._modules = {name: share(child) for name, child in module._modules.items()}
        return copies[id(module)]

    return share(module)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside get parameters without memory, and real buffers."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        hook.remove()
