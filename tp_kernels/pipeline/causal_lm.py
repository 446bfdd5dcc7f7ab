"""Stages of a Hugging Face causal language model: stock layers, loaded for one stage only.

A model is a row of units: the embedding, each decoder layer, and the head with its norm; a stage holds some
consecutive ones. It is the stock model without the rest, so masks, rotary embedding, attention back ends and
parameter names stay those of transformers; what lies outside of a stage has never been in its memory.

The parts are found by their structure: `get_input_embeddings`, the `ModuleList` of `num_hidden_layers`, the
norm beside it, `get_output_embeddings`. Whether the model adds something to what it is given (positions,
scales) is tried out, and a model that cannot be cut so is refused by name.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
)

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.group import GroupLike, as_group
from tp_kernels.integrations.checkpoint import read_slices
from tp_kernels.integrations.transformers import parallelize
from tp_kernels.integrations.weight_memory import WeightMemory
from tp_kernels.layers.placement import ParamPlacement, placements

from .plan import Plan

Cut = Plan | int | Sequence[int]
"""A plan over the units, a number of stages (as many layers each as possible), or bounds over the units."""


class CausalLMStage(nn.Module):
    """Units `bounds[stage]` to `bounds[stage + 1]` - 1 of a causal language model.

    Made by `load_stage` or `split_layers`, for `PipelinedDecoder` and `PipelineRunner`. A mask travels with
    the hidden states: `runner.step(input_ids, attention_mask, target=labels)`.

    Attributes:
        lm: the stock model without the other units. Its parameters have the stock names, so the state
            dicts of all stages of a model together are the stock one.
        first, last: whether it has the embedding, and the head.
        layers: the indices of its decoder layers in the whole model.
        ties: the weights that embedding and head share, for `PipelineRunner(tied=)`; the same in all stages.
    """

    def __init__(self, model: PreTrainedModel, bounds: Sequence[int], stage: int) -> None:
        super().__init__()
        parts = _Parts.of(model)
        units = parts.count + 2
        begin, end = bounds[stage], bounds[stage + 1]
        self.stage, self.stages = stage, len(bounds) - 1
        self.first, self.last = begin == 0, end == units
        self.layers = range(max(begin - 1, 0), min(end - 1, parts.count))
        self.config = model.config
        self.lm = model
        self._layers_name, self._cache_name = parts.layers, parts.cache_name
        self.ties = parts.ties(self.stages)
        parts.keep(self.layers, self.first, self.last)
        self.generation_config = model.generation_config

    def forward(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        cache: DynamicCache | None = None,
        last_token: bool = False,
    ) -> Any:
        """One step of this stage.

        Args:
            inputs: of the first stage token ids [batch, sequence], of the others what the stage before
                returned [batch, sequence, hidden].
            attention_mask: [batch, tokens so far], 1 where a token is.
            position_ids: [batch, sequence] or [1, sequence]; default: counted from the start.
            cache: from `new_cache`, extended by this call; None: none is used.
            last_token: the last stage returns the logits of the last position only.

        Returns the logits [batch, sequence, vocabulary] on the last stage. On others what the next one takes:
        its input, and with a mask or positions a dict of all arguments.
        """
        options: dict[str, Any] = {"input_ids" if self.first else "inputs_embeds": inputs}
        if self.layers:
            options |= {"attention_mask": attention_mask, "position_ids": position_ids}
            options |= {self._cache_name: cache, "use_cache": cache is not None}
        else:  # nothing looks at the tokens before these, so nothing but positions is needed
            if cache is not None and position_ids is None:
                raise UnsupportedError(
                    f"stage {self.stage} has no layer whose cache tells where the new tokens are: "
                    "pass position_ids"
                )
            options |= {"position_ids": position_ids, "use_cache": False}
        if self.last:
            return self.lm(**options, logits_to_keep=1 if last_token else 0).logits
        hidden = self.lm.base_model(**options).last_hidden_state
        if attention_mask is None and position_ids is None:
            return hidden
        return {"inputs": hidden, "attention_mask": attention_mask, "position_ids": position_ids}

    def new_cache(self) -> DynamicCache:
        """An empty KV cache for the layers of this stage."""
        return _StageCache(self.lm.base_model.config, self.layers.start)

    def only_layer(self) -> nn.Module | None:
        """Its decoder layer if it has one, None if it has none.

        Raises ShapeError if it holds more than one unit.
        """
        units = len(self.layers) + self.first + self.last
        if units != 1:
            raise ShapeError(f"stage {self.stage} holds {units} units; cut one per stage")
        return getattr(self.lm.base_model, self._layers_name)[0] if self.layers else None

    def extra_repr(self) -> str:
        parts = ["embedding"] * self.first
        if self.layers:
            parts.append(f"layers {self.layers.start} to {self.layers.stop - 1}")
        parts += ["norm and head"] * self.last
        return f"stage {self.stage} of {self.stages}: {', '.join(parts)}"


class _StageCache(DynamicCache):
    """Holds the layers of one stage, which keep the numbers they have in the whole model."""

    def __init__(self, config: Any, first_layer: int) -> None:
        super().__init__(config=config)
        self._first_layer = first_layer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer_idx -= self._first_layer
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def load_stage(
    checkpoint: str | Path,
    cut: Cut,
    stage: int,
    *,
    group: GroupLike = None,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[int, int], None] | None = None,
) -> CausalLMStage:
    """One stage of a stock safetensors checkpoint, of which only its tensors are read.

    Args:
        checkpoint: directory with config.json and safetensors (`stock_checkpoint` makes one).
        cut: of the whole model; the same for all stages.
        group: divide the stage over these ranks as well (tensor parallelism; the Llama family). None: no.
        progress: called with (tensors read, tensors in total).

    Returns the stage in evaluation mode.
    """
    config = AutoConfig.from_pretrained(checkpoint)
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if (Path(checkpoint) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint)
    names = _names_by_parameter(model)
    divided: dict[str, ParamPlacement] = {}
    if group is not None:
        parallelize(model, as_group(group))
        names = _names_by_parameter(model)
        divided = {name: placement for name, _, placement in placements(model)}
    result = CausalLMStage(model, bounds_of(model, cut), stage)
    own = {id(parameter): parameter for parameter in model.parameters()}
    shapes = {
        key: divided[names[key][0]].local_shape() if divided else tuple(parameter.shape)
        for key, parameter in own.items()
    }
    memory = WeightMemory([(shape, dtype) for shape in shapes.values()])
    with read_slices(checkpoint) as reader:
        for done, (key, parameter) in enumerate(own.items(), start=1):
            stored = next((name for name in names[key] if name in reader), None)
            if stored is None:
                raise UnsupportedError(
                    f"{checkpoint} holds no tensor for '{names[key][0]}' of {type(model).__name__}"
                )
            values = memory.take(shapes[key], dtype)
            placement = divided.get(names[key][0])
            if placement is None or placement.dim is None:
                values.copy_(reader.tensor(stored))
            else:
                for view, piece in zip(placement.views(values), placement.pieces(), strict=True):
                    view.copy_(reader.slice(stored, placement.dim, *piece))
            _replace(model, parameter, nn.Parameter(values))
            if progress is not None:
                progress(done, len(own))
    return result.eval()


def split_layers(model: nn.Module | Sequence[nn.Module], cut: Cut) -> list[nn.Module]:
    """The stages of a model that is here as a whole; they share its parameters.

    Args:
        model: a causal language model of transformers, also one that `parallelize` has divided, and then
            `cut` counts its units; or an nn.Sequential or list of modules, of which it counts the modules.

    Returns CausalLMStage or nn.Sequential modules. The model itself stays as it is.
    """
    if isinstance(model, PreTrainedModel):
        bounds = bounds_of(model, cut)
        return [
            CausalLMStage(_shared_copy(model), bounds, stage) for stage in range(len(bounds) - 1)
        ]
    if isinstance(model, nn.Module) and not isinstance(model, (nn.Sequential, nn.ModuleList)):
        raise UnsupportedError(
            f"split_layers: {type(model).__name__} is neither a causal language model of transformers nor an "
            "nn.Sequential or list of modules; pass its layers as a list"
        )
    layers: list[nn.Module] = list(model)
    bounds = _bounds(cut, len(layers), "layers")
    return [nn.Sequential(*layers[a:b]) for a, b in pairwise(bounds)]


def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropies of the next tokens, for `PipelineRunner(loss_fn=, scale="token")`.

    Args:
        logits: [batch, sequence, vocabulary].
        labels: [batch, sequence], the input ids; -100 where a token is not to be predicted.
    """
    rows, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(rows, targets, ignore_index=-100, reduction="sum")


def count_labels(labels: Tensor) -> int:
    """The number of tokens that `causal_lm_loss` sums over, for `PipelineRunner(count=)`."""
    return int((labels[:, 1:] != -100).sum())


def units_of(model: PreTrainedModel) -> list[str]:
    """Names of the units that a cut of this model counts."""
    return ["embedding", *(f"layer {i}" for i in range(_Parts.of(model).count)), "head"]


def bounds_of(model: PreTrainedModel, cut: Cut) -> tuple[int, ...]:
    """[stages + 1]: `cut` as bounds over the units of `model`.

    A number of stages cuts the layers as evenly as possible; embedding and head join the outer ones.
    """
    count = _Parts.of(model).count
    if isinstance(cut, int):
        inner = _bounds(cut, count, "decoder layers")[1:-1]
        return (0, *(1 + bound for bound in inner), count + 2)
    return _bounds(cut, count + 2, "units (embedding, decoder layers, head)")


def _bounds(cut: Cut, count: int, what: str) -> tuple[int, ...]:
    if isinstance(cut, int):
        if not 1 <= cut <= count:
            raise ShapeError(f"{cut} stages for {count} {what}: use 1 to {count}")
        return tuple(stage * count // cut for stage in range(cut + 1))
    bounds = tuple(cut.bounds if isinstance(cut, Plan) else cut)
    rises = all(a < b for a, b in pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != count or not rises:
        raise ShapeError(f"bounds {list(bounds)}: they must rise from 0 to {count}, the {what}")
    return bounds


@dataclass
class _Parts:
    """Where a model keeps its units."""

    model: PreTrainedModel
    base: Any
    layers: str
    embedding: str
    norm: str
    head: str

    @staticmethod
    def of(model: PreTrainedModel) -> _Parts:
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
        return _Parts(model, base, layers[0], embedding, norms[0], head)

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
        base = _shared_copy(self.base).eval()
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


def _names_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter: tied ones have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is old:
                module.register_parameter(name, new)


def _shared_copy(module: Any) -> Any:
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
def _parameters_on_meta() -> Iterator[None]:
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
