"""Stages of a Hugging Face causal language model: stock layers, loaded for one stage only.

A model is a row of units: the embedding, each decoder layer, and the head with its norm; a stage holds some
consecutive ones. It is the stock model without the rest, so masks, rotary embedding, attention back ends and
parameter names stay those of transformers; what lies outside of a stage has never been in its memory.

The parts are found by their structure: `get_input_embeddings`, the `ModuleList` of `num_hidden_layers`, the
norm beside it, `get_output_embeddings`. Whether the model adds something to what it is given (positions,
scales) is tried out, and a model that cannot be cut so is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
)

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.group import GroupLike, as_group
from tp_kernels.integrations.checkpoint import SafetensorsReader, is_stock, read_slices
from tp_kernels.integrations.transformers import parallelize
from tp_kernels.integrations.weight_memory import WeightMemory
from tp_kernels.layers.placement import ParamPlacement, placements

from .parts import Parts, parameters_on_meta, shared_copy
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
        parts = Parts.of(model)
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
    model, names, divided = _skeleton(checkpoint, group, dtype)
    result = CausalLMStage(model, bounds_of(model, cut), stage)
    with read_slices(checkpoint) as reader:
        _read_weights(result.lm, names, divided, dtype, reader, progress)
    return result.eval()


def load_units(
    checkpoint: str | Path, *, dtype: torch.dtype = torch.float32
) -> Iterator[CausalLMStage]:
    """Stages of one unit each, one after the other: only what is still used of them stays in memory.

    Where the directory has a config.json and no weights, they are random: enough to measure.
    """
    model, names, _ = _skeleton(checkpoint, None, dtype)
    bounds = range(Parts.of(model).count + 3)
    for unit in bounds[:-1]:
        stage = CausalLMStage(shared_copy(model), bounds, unit)
        if is_stock(Path(checkpoint)):
            with read_slices(checkpoint) as reader:
                _read_weights(stage.lm, names, {}, dtype, reader, None)
        else:
            for parameter in list(stage.parameters()):
                values = torch.empty(parameter.shape, dtype=dtype).normal_(std=0.02)
                _replace(stage, parameter, nn.Parameter(values))
        yield stage.eval()


def _skeleton(
    checkpoint: str | Path, group: GroupLike, dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[int, list[str]], dict[str, ParamPlacement]]:
    """A model whose parameters take no memory, their names by id, and the placements of divided ones."""
    config = AutoConfig.from_pretrained(checkpoint)
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if (Path(checkpoint) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint)
    divided: dict[str, ParamPlacement] = {}
    if group is not None:
        parallelize(model, as_group(group))
        divided = {name: placement for name, _, placement in placements(model)}
    return model, _names_by_parameter(model), divided


def _read_weights(
    model: nn.Module,
    names: dict[int, list[str]],
    divided: dict[str, ParamPlacement],
    dtype: torch.dtype,
    reader: SafetensorsReader,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Read the parameters of `model`, or this rank's parts of them, in the place of those on meta."""
    own = list(model.parameters())
    shapes = [tuple(parameter.shape) for parameter in own]
    memory = WeightMemory([(shape, dtype) for shape in shapes])
    for done, (parameter, shape) in enumerate(zip(own, shapes, strict=True), start=1):
        called = names[id(parameter)]
        stored = next((name for name in called if name in reader), None)
        if stored is None:
            raise UnsupportedError(f"the checkpoint holds no tensor for '{called[0]}'")
        # A private copy: what the reader returns may be a strided view of the file.
        values = memory.take(shape, dtype)
        placement = divided.get(called[0])
        if placement is None or placement.dim is None:
            values.copy_(reader.tensor(stored))
        else:
            for view, piece in zip(placement.views(values), placement.pieces(), strict=True):
                view.copy_(reader.slice(stored, placement.dim, *piece))
        _replace(model, parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))
        if progress is not None:
            progress(done, len(own))


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
            CausalLMStage(shared_copy(model), bounds, stage) for stage in range(len(bounds) - 1)
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
    return ["embedding", *(f"layer {i}" for i in range(Parts.of(model).count)), "head"]


def bounds_of(model: PreTrainedModel, cut: Cut) -> tuple[int, ...]:
    """[stages + 1]: `cut` as bounds over the units of `model`.

    A number of stages cuts the layers as evenly as possible; embedding and head join the outer ones.
    """
    count = Parts.of(model).count
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
