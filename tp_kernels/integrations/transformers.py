"""Hugging Face models on several ranks: `parallelize` divides a live model, `load_parallel` reads slices.

Works for the Llama family (Llama, SmolLM, Mistral, Qwen2, Qwen3) and, with `plan=`, for models of the same
shape under other names. Parameter names, generation, KV caches, masks and attention back ends stay those
of transformers; what changes is which rows and columns of each weight a rank holds, and that the
projections run through `tp_kernels.ops`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from tp_kernels.comm.collectives import barrier
from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.group import GroupLike, ParallelGroup, as_group
from tp_kernels.layers.embedding import VocabParallelEmbedding
from tp_kernels.layers.heads import HeadShard, partition_heads
from tp_kernels.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
)
from tp_kernels.layers.lm_head import ParallelLMHead
from tp_kernels.layers.placement import ParamPlacement, Ranges, place, placements
from tp_kernels.layers.qkv import feature_ranges
from tp_kernels.layers.state import full_state_dict

from .checkpoint import SafetensorsReader, read_slices
from .llama import (
    FusedLlamaNorm,
    ParallelLlamaAttention,
    ParallelLlamaMLP,
    SequenceLayout,
)
from .weight_memory import WeightMemory


@dataclass(frozen=True)
class ParallelPlan:
    """Where a Llama-shaped model keeps its parts: dotted names from the model, or from one layer."""

    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str | None = "lm_head"
    rotary: str | None = "model.rotary_emb"
    attention: str = "self_attn"
    mlp: str = "mlp"

    def __str__(self) -> str:
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))


FAMILIES = {name: ParallelPlan() for name in ("llama", "mistral", "qwen2", "qwen3")}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def parallelize(
    model: PreTrainedModel,
    group: GroupLike = None,
    *,
    sequence_parallel: bool = False,
    plan: ParallelPlan | None = None,
) -> PreTrainedModel:
    """Divide `model` over the ranks of `group`, in place; every rank calls it with the same weights.

    Args:
        model: a stock model of the Llama family with plain nn.Linear projections.
        group: ParallelGroup, ProcessGroup, one-dimensional DeviceMesh, or None for the default group.
        sequence_parallel: between the projections each rank holds its rows of batch x sequence only.
        plan: where the parts are, for an architecture that is not listed in FAMILIES.

    Returns:
        `model`, holding this rank's slices. Its class stays an instance of the stock class;
        `save_pretrained` (called on every rank) writes the stock, unsplit checkpoint.

    After a backward, call `tp_kernels.layers.finalize_gradients(model)` before the optimizer step: it sums
    the gradients that ranks hold in parts (norms under sequence parallelism, q/k norms, shared KV heads).

    Raises:
        UnsupportedError, ShapeError: before the model is touched and before anything is sent.
    """
    parts = _find_parts(model, plan)
    group = as_group(group)
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    shards = partition_heads(heads, kv_heads, group.size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    _check_projections(parts, config, head_dim)

    layout = SequenceLayout(group) if sequence_parallel and group.size > 1 else None
    for layer in parts.layers:
        _divide_attention(parts.attention(layer), group, shards, head_dim, layout)
        _divide_mlp(parts.mlp(layer), group, layout)
    for module in [parts.norm, *parts.layers.modules()]:
        if _is_llama_norm(module):
            _become(module, FusedLlamaNorm)
    _divide_vocabulary(parts, group)
    if layout is not None:
        parts.layers[0].register_forward_pre_hook(layout.enter, with_kwargs=True)
        parts.norm.register_forward_hook(layout.leave)
        model.register_forward_pre_hook(_refuse_hidden_states, with_kwargs=True)
    _place_the_rest(parts, group, sharded_rows=layout is not None)
    model.parallel_group = group
    _become(model, _ParallelModel)
    return model


def load_parallel(
    checkpoint: str | Path,
    group: GroupLike = None,
    *,
    dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
    plan: ParallelPlan | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PreTrainedModel:
    """A model from a stock safetensors checkpoint of which each rank reads its slices only.

    The unsplit weights never exist on any rank, so the model may be larger than one rank's memory.

    Args:
        checkpoint: directory with config.json and safetensors files (`stock_checkpoint` makes one).
        progress: called with (tensors read, tensors in total).
    """
    group = as_group(group)
    config = AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    parallelize(model, group, sequence_parallel=sequence_parallel, plan=plan)
    plan = _plan_of(model, plan)
    placed = list(placements(model))
    memory = WeightMemory([(place.local_shape(), dtype) for _, _, place in placed])
    with read_slices(checkpoint) as reader:
        for done, (name, parameter, placement) in enumerate(placed, start=1):
            source = name if name in reader else _tied_name(model, name, reader)
            # A private copy: what the reader returns may be a strided view of the file.
            own = memory.take(placement.local_shape(), dtype)
            if placement.dim is None:
                own.copy_(reader.tensor(source))
            else:
                for view, piece in zip(placement.views(own), placement.pieces(), strict=True):
                    view.copy_(reader.slice(source, placement.dim, *piece))
            loaded = nn.Parameter(own, requires_grad=parameter.requires_grad)
            _replace_parameter(model, parameter, loaded)
            if progress is not None:
                progress(done, len(placed))
    if plan.rotary is not None:  # its tables are buffers that no checkpoint holds
        rotary = model.get_submodule(plan.rotary)
        _set_submodule(model, plan.rotary, type(rotary)(config))
    if (Path(checkpoint) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint)
    return model.eval()


class _ParallelModel:
    """What a divided model does differently as a whole. Mixed into the stock class."""

    parallel_group: ParallelGroup

    def full_state_dict(self: Any, *, keep: bool = True) -> dict[str, Tensor]:
        """The stock, unsplit state dict (collective): see `tp_kernels.layers.full_state_dict`."""
        return full_state_dict(self, keep=keep)

    def save_pretrained(self: Any, save_directory: str | Path, **kwargs: Any) -> None:
        """Write the stock checkpoint. Called on every rank; rank 0 writes, all return together."""
        if kwargs.pop("state_dict", None) is not None:
            raise UnsupportedError(
                "save_pretrained(state_dict=...) of a divided model: leave it out"
            )
        state = self.full_state_dict(keep=self.parallel_group.rank == 0)
        if self.parallel_group.rank == 0:
            super().save_pretrained(save_directory, state_dict=state, **kwargs)  # type: ignore[misc]
        barrier(self.parallel_group)


def _become(module: nn.Module, mixin: type) -> None:
    """Give a live module the behaviour of `mixin` in front of its stock class."""
    module.__class__ = _mixed(type(module), mixin)  # type: ignore[arg-type]  # types are hashable


@lru_cache
def _mixed(stock: type, mixin: type) -> type:
    """A subclass of `stock` whose behaviour is `mixin`'s; it keeps the stock name, which is saved."""
    return type(stock.__name__, (mixin, stock), {"__module__": stock.__module__})


@dataclass
class _Parts:
    model: PreTrainedModel
    plan: ParallelPlan
    layers: nn.ModuleList
    embedding: nn.Embedding
    norm: nn.Module
    head: nn.Linear | None

    def attention(self, layer: nn.Module) -> Any:
        return layer.get_submodule(self.plan.attention)

    def mlp(self, layer: nn.Module) -> Any:
        return layer.get_submodule(self.plan.mlp)


def _plan_of(model: PreTrainedModel, plan: ParallelPlan | None) -> ParallelPlan:
    plan = plan or FAMILIES.get(model.config.model_type)
    if plan is None:
        children = {type(module).__name__ for module in model.modules() if list(module.children())}
        raise UnsupportedError(
            f"parallelize: architecture '{model.config.model_type}' ({type(model).__name__}) is not one "
            f"of {', '.join(FAMILIES)}. Its modules: {', '.join(sorted(children))}. If it is shaped like "
            f"Llama (q_proj, k_proj, v_proj, o_proj; gate_proj, up_proj, down_proj), say where its parts "
            f"are: parallelize(model, group, plan=ParallelPlan({ParallelPlan()}))"
        )
    return plan


def _find_parts(model: PreTrainedModel, plan: ParallelPlan | None) -> _Parts:
    if isinstance(model, _ParallelModel):
        raise UnsupportedError("parallelize: this model is divided already")
    plan = _plan_of(model, plan)
    missing: list[str] = []

    def find(root: nn.Module, name: str, kind: type = nn.Module) -> Any:
        try:
            found = root.get_submodule(name)
        except AttributeError:
            found = None
        if not isinstance(found, kind):
            missing.append(f"{name} ({kind.__name__})" if found is None else f"{name} as {kind}")
        return found

    layers = find(model, plan.layers, nn.ModuleList)
    embedding = find(model, plan.embedding, nn.Embedding)
    norm = find(model, plan.norm)
    head = find(model, plan.head, nn.Linear) if plan.head else None
    for layer in layers or ():
        for block, projections in ((plan.attention, _PROJECTIONS), (plan.mlp, _MLP_PROJECTIONS)):
            for name in projections:
                find(layer, f"{block}.{name}", nn.Linear)
    if missing:
        names = sorted({name for name, _ in model.named_modules() if name.count(".") <= 4 and name})
        raise UnsupportedError(
            f"parallelize: {type(model).__name__} lacks {', '.join(dict.fromkeys(missing))}. Its modules "
            f"begin: {', '.join(names[:24])}. Pass plan=ParallelPlan(...) with the right names; now it is "
            f"ParallelPlan({plan})"
        )
    return _Parts(model, plan, layers, embedding, norm, head)


def _check_projections(parts: _Parts, config: Any, head_dim: int) -> None:
    hidden = config.hidden_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    expected = {
        "q_proj": (heads * head_dim, hidden),
        "k_proj": (kv_heads * head_dim, hidden),
        "v_proj": (kv_heads * head_dim, hidden),
        "o_proj": (hidden, heads * head_dim),
    }
    for layer in parts.layers:
        attention = parts.attention(layer)
        for name, shape in expected.items():
            found = tuple(getattr(attention, name).weight.shape)
            if found != shape:
                raise ShapeError(
                    f"parallelize: {parts.plan.attention}.{name}.weight is {found}, but the config "
                    f"({heads} heads, {kv_heads} KV heads of {head_dim}, hidden {hidden}) says {shape}"
                )


def _divide_attention(
    attention: Any,
    group: ParallelGroup,
    shards: tuple[HeadShard, ...],
    head_dim: int,
    layout: SequenceLayout | None,
) -> None:
    q_ranges, kv_ranges = feature_ranges(shards, head_dim)
    sharded = layout is not None
    column, row = ColumnParallelLinear, RowParallelLinear
    attention.q_proj = _divide(column, attention.q_proj, group, sharded, q_ranges)
    attention.k_proj = _divide(column, attention.k_proj, group, sharded, kv_ranges)
    attention.v_proj = _divide(column, attention.v_proj, group, sharded, kv_ranges)
    attention.o_proj = _divide(row, attention.o_proj, group, sharded, q_ranges)
    shard = shards[group.rank]
    places, place_of_query = shard.padded_queries()
    attention.num_key_value_groups = len(places) // shard.num_kv_heads
    for name, index in (("places", places), ("place_of_query", place_of_query)):
        buffer = None if shard.uniform else torch.tensor(index)
        attention.register_buffer(name, buffer, persistent=False)
    attention.sequence_layout = layout
    stock = sys.modules[type(attention).__module__]
    attention.eager_attention = stock.eager_attention_forward
    attention.attention_window = getattr(
        attention, "sliding_window", getattr(attention.config, "sliding_window", None)
    )
    for norm in ("q_norm", "k_norm"):  # whole weights, used for this rank's heads only
        if hasattr(attention, norm):
            for name, parameter in getattr(attention, norm).named_parameters():
                shape = tuple(parameter.shape)
                partial = ParamPlacement(group, shape, partial_gradient=True)
                place(getattr(attention, norm), name, partial)
    _become(attention, ParallelLlamaAttention)


def _is_llama_norm(module: nn.Module) -> bool:
    """The RMS norms of the families, whose arithmetic `FusedLlamaNorm` repeats."""
    name = type(module).__name__
    return name in {f"{family}RMSNorm" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")}


def _divide_mlp(mlp: Any, group: ParallelGroup, layout: SequenceLayout | None) -> None:
    sharded = layout is not None
    mlp.gate_proj = _divide(ColumnParallelLinear, mlp.gate_proj, group, sharded)
    mlp.up_proj = _divide(ColumnParallelLinear, mlp.up_proj, group, sharded)
    mlp.down_proj = _divide(RowParallelLinear, mlp.down_proj, group, sharded)
    mlp.sequence_layout = layout
    _become(mlp, ParallelLlamaMLP)


def _divide_vocabulary(parts: _Parts, group: ParallelGroup) -> None:
    old = parts.embedding
    words, width = old.weight.shape
    embedding = VocabParallelEmbedding(
        words, width, old.padding_idx, group=group, device="meta", dtype=old.weight.dtype
    )
    embedding.weight = _sliced(old.weight, embedding.placements["weight"])
    _set_submodule(parts.model, parts.plan.embedding, embedding)
    if parts.head is None or parts.plan.head is None:
        return
    head = parts.head
    out_features, in_features = head.weight.shape
    new = ParallelLMHead(
        in_features,
        out_features,
        head.bias is not None,
        group=group,
        device="meta",
        dtype=head.weight.dtype,
    )
    tied = head.weight is old.weight
    new.weight = embedding.weight if tied else _sliced(head.weight, new.placements["weight"])
    if head.bias is not None:
        new.bias = _sliced(head.bias, new.placements["bias"])
    _set_submodule(parts.model, parts.plan.head, new)


def _place_the_rest(parts: _Parts, group: ParallelGroup, sharded_rows: bool) -> None:
    """Every other parameter is whole on every rank; those used on divided rows have partial gradients."""
    inside = {id(m) for layer in parts.layers for m in layer.modules()} | {id(parts.norm)}
    for module in parts.model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name not in getattr(module, "placements", {}):
                partial = sharded_rows and id(module) in inside
                shape = tuple(parameter.shape)
                place(module, name, ParamPlacement(group, shape, partial_gradient=partial))


def _divide(
    kind: type[ColumnParallelLinear] | type[RowParallelLinear],
    linear: nn.Linear,
    group: ParallelGroup,
    sequence_parallel: bool,
    ranges: Ranges | None = None,
) -> nn.Module:
    """This rank's part of a stock linear layer, as a layer of `kind`."""
    new = kind(
        linear.in_features,
        linear.out_features,
        linear.bias is not None,
        group=group,
        sequence_parallel=sequence_parallel,
        ranges=ranges,
        device="meta",
        dtype=linear.weight.dtype,
    )
    new.weight = _sliced(linear.weight, new.placements["weight"])
    if linear.bias is not None:
        new.bias = _sliced(linear.bias, new.placements["bias"])
    return new.train(linear.training)


def _sliced(parameter: Tensor, placement: ParamPlacement) -> nn.Parameter:
    """A copy of this rank's part, so that the unsplit tensor can be freed."""
    part = placement.slice(parameter.detach()).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def _set_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put `new` wherever `old` is held, so that tied parameters stay tied."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter is old:
                setattr(module, name, new)


def _tied_name(model: PreTrainedModel, name: str, stored: SafetensorsReader) -> str:
    """The stored name of a parameter that the checkpoint keeps under the name of its twin."""
    parameter = model.get_parameter(name)
    for other, candidate in model.named_parameters(remove_duplicate=False):
        if candidate is parameter and other in stored:
            return other
    raise UnsupportedError(f"the checkpoint holds no tensor for parameter '{name}'")


def _refuse_hidden_states(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_hidden_states", getattr(module.config, "output_hidden_states", False)):
        raise UnsupportedError(
            "output_hidden_states under sequence_parallel=True: between layers each rank holds its own "
            "rows only; parallelize with sequence_parallel=False"
        )
