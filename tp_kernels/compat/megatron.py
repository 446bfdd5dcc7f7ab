"""Megatron-core's names for tensor parallelism, on this package's ops: an import is what changes.

Regions, layers, the loss and random states take the arguments of `megatron.core.tensor_parallel` where they
mean the same here. What has no counterpart is refused with a way out. `config` is any object; attributes that
it lacks count as unset. There is no state of the process: the group is `tp_group=` (or `group=`), None the
default group. Differences are listed in docs/megatron.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.group import GroupLike, ParallelGroup, as_group
from tp_kernels.comm.layout import split_range, split_sizes
from tp_kernels.layers import linear
from tp_kernels.layers.embedding import VocabParallelEmbedding as _Embedding
from tp_kernels.layers.random import RandomStreams
from tp_kernels.ops import (
    copy_to_ranks,
    gather_features,
    gather_rows,
    reduce_from_ranks,
    reduce_scatter_rows,
    scatter_features,
    scatter_rows,
)
from tp_kernels.ops import vocab_parallel_cross_entropy as _cross_entropy

Init = Callable[[Tensor], Any]


def copy_to_tensor_model_parallel_region(input_: Tensor, group: GroupLike = None) -> Tensor:
    """The input; backward: all-reduce."""
    return copy_to_ranks(input_, group=as_group(group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: GroupLike = None) -> Tensor:
    """All-reduce; backward: the gradient."""
    return reduce_from_ranks(input_, group=as_group(group))


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: GroupLike = None) -> Tensor:
    """This rank's part of the last dimension, divided by split_sizes; backward: all-gather."""
    return scatter_features(input_, group=as_group(group))


def gather_from_tensor_model_parallel_region(
    input_: Tensor, group: GroupLike = None, *, output_split_sizes: Sequence[int] | None = None
) -> Tensor:
    """All-gather of the last dimension; backward: this rank's part.

    output_split_sizes: features of every rank, if they are not equally many.
    """
    group = as_group(group)
    sizes = output_split_sizes or [input_.shape[-1]] * group.size
    return gather_features(input_, sizes, group=group)


def scatter_to_sequence_parallel_region(input_: Tensor, group: GroupLike = None) -> Tensor:
    """This rank's rows of the first dimension; backward: all-gather."""
    return scatter_rows(input_, group=as_group(group))


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: GroupLike = None,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """All-gather of rows; backward: reduce-scatter, or this rank's rows.

    tensor_parallel_output_grad: False where what follows is the same on all ranks.
    output_split_sizes: rows of every rank; default: equally many.
    """
    group = as_group(group)
    rows = _rows(group, output_split_sizes, use_global_buffer)
    gradient = "reduce_scatter" if tensor_parallel_output_grad else "slice"
    return gather_rows(input_, group=group, rows=rows, gradient=gradient)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: GroupLike = None,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Reduce-scatter of rows; backward: all-gather."""
    group = as_group(group)
    _rows(group, input_split_sizes, use_global_buffer)
    return reduce_scatter_rows(input_, group=group)


def _rows(group: ParallelGroup, sizes: Sequence[int] | None, use_global_buffer: bool) -> int | None:
    if use_global_buffer:
        raise UnsupportedError(
            "use_global_buffer=True: buffers are those of the ParallelGroup; leave it out"
        )
    if sizes is None:
        return None
    if list(sizes) != split_sizes(sum(sizes), group.size):
        raise UnsupportedError(
            f"split sizes {list(sizes)}: rows are divided as evenly as they can be, here "
            f"{split_sizes(sum(sizes), group.size)}"
        )
    return sum(sizes)


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: GroupLike = None,
    *,
    vocab_size: int | None = None,
) -> Tensor:
    """The loss of every token, fp32 [...] of logits [..., V_r].

    label_smoothing: share that the other words get together, spread over all of them.
    vocab_size: V, if the ranks do not have equally many words or the last ones are padding.
    """
    group = as_group(tp_group)
    width = vocab_parallel_logits.shape[-1]
    words = width * group.size if vocab_size is None else vocab_size
    first, last = split_range(words, group.size, group.rank)
    start = first if last - first == width else group.rank * width  # equal shards, the last padded
    smoothing = label_smoothing * words / (words - 1) if label_smoothing else 0.0
    return _cross_entropy(
        vocab_parallel_logits,
        target,
        group=group,
        vocab_size=words,
        start=start,
        label_smoothing=smoothing,
        reduction="none",
    )


class ColumnParallelLinear(linear.ColumnParallelLinear):
    """forward(input_ [s, b, K], weight=None, runtime_gather_output=None) -> (output, bias or None)."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Init,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[Tensor] | None = None,
        grad_output_buffer: list[Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,  # unused there as well
        disable_grad_reduce: bool = False,
        tp_group: GroupLike = None,
        name: str | None = None,
        output_dtype: torch.dtype | None = None,
        pg_collection: Any = None,
    ) -> None:
        _refuse(
            "ColumnParallelLinear",
            config,
            is_expert=is_expert,
            pg_collection=pg_collection,
            keep_master_weight_for_test=keep_master_weight_for_test,
            embedding_activation_buffer=embedding_activation_buffer,
            grad_output_buffer=grad_output_buffer,
            disable_grad_reduce=disable_grad_reduce,
        )
        group = as_group(tp_group)
        super().__init__(
            input_size,
            output_size,
            bias,
            group=group,
            sequence_parallel=_flag(config, "sequence_parallel"),
            skip_bias_add=skip_bias_add,
            gather_output=gather_output,
            out_dtype=output_dtype,
            ranges=_strided(output_size, stride, group.size),
            **_memory(config),
        )
        self.config, self.name = config, name
        self.input_size, self.output_size = input_size, output_size
        self.output_size_per_partition = self.weight.shape[0]
        _initialise(self, init_method, stride)
        if skip_weight_param_allocation:
            self.register_parameter("weight", None)

    def forward(  # type: ignore[override]
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if weight is None and self.weight is None:
            raise UnsupportedError(
                "ColumnParallelLinear(skip_weight_param_allocation=True): pass weight= at call"
            )
        if runtime_gather_output not in (None, self.gather_output):
            raise UnsupportedError(
                f"runtime_gather_output={runtime_gather_output} of a layer with gather_output="
                f"{self.gather_output}; build it as it is used, or gather with "
                "gather_from_tensor_model_parallel_region"
            )
        _check_fusion(self, self.weight if weight is None else weight)
        return _pair(self, super().forward(input_, weight=weight))


class RowParallelLinear(linear.RowParallelLinear):
    """forward(input_ [s, b, K_r]) -> (output, bias or None)."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Init,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,  # unused there as well
        tp_group: GroupLike = None,
        name: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        _refuse(
            "RowParallelLinear",
            config,
            is_expert=is_expert,
            pg_collection=pg_collection,
            keep_master_weight_for_test=keep_master_weight_for_test,
        )
        group = as_group(tp_group)
        super().__init__(
            input_size,
            output_size,
            bias,
            group=group,
            sequence_parallel=_flag(config, "sequence_parallel"),
            input_is_parallel=input_is_parallel,
            skip_bias_add=skip_bias_add,
            ranges=_strided(input_size, stride, group.size),
            **_memory(config),
        )
        self.config, self.name = config, name
        self.input_size, self.output_size = input_size, output_size
        self.input_size_per_partition = self.weight.shape[1]
        _initialise(self, init_method, stride)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        _check_fusion(self, self.weight)
        return _pair(self, super().forward(input_))


class VocabParallelEmbedding(_Embedding):
    """forward(input_ [b, s]) -> [b, s, H]; with reduce_scatter_embeddings [s_r, b, H]."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: Init,
        reduce_scatter_embeddings: bool = False,
        config: Any,
        tp_group: GroupLike = None,
        pg_collection: Any = None,
    ) -> None:
        _refuse("VocabParallelEmbedding", config, pg_collection=pg_collection)
        super().__init__(
            num_embeddings,
            embedding_dim,
            group=tp_group,
            sequence_parallel=reduce_scatter_embeddings,
            **_memory(config),
        )
        self.config = config
        self.vocab_start_index, self.vocab_end_index = self.ranges[self.group.rank]
        _initialise(self, init_method, 1)

    def forward(self, input_: Tensor) -> Tensor:
        return super().forward(input_.transpose(0, 1) if self.sequence_parallel else input_)


class RNGStatesTracker(RandomStreams):
    """Named states of torch's generators: in place of get_cuda_rng_tracker(), an object that you make once.

    "model-parallel-rng", the default of `fork`, is different on every rank; "data-parallel-rng" the same.
    `add(name, per_rank)` makes more. seed: what model_parallel_cuda_manual_seed was given.
    """

    def __init__(self, seed: int, *, tp_group: GroupLike = None) -> None:
        super().__init__(seed, group=tp_group)
        self.add("model-parallel-rng", per_rank=True)
        self.add("data-parallel-rng")

    def fork(self, name: str = "model-parallel-rng") -> Any:
        return super().fork(name)

    def get_states(self) -> dict[str, Any]:
        return self.state_dict()

    def set_states(self, states: dict[str, Any]) -> None:
        self.load_state_dict(states)


# Attributes of a config that ask for something else, and the way out.
_UNKNOWN = {
    "defer_embedding_wgrad_compute": "use delay_wgrad=True and backward_dw() of tp_kernels.layers",
    "cpu_offloading": "use torch.autograd.graph.save_on_cpu",
    "init_model_with_meta_device": 'build under torch.device("meta"), then to_empty() and load',
}
# Arguments likewise.
_OTHERWISE = {
    "is_expert": "experts are not divided here; use torch.nn.Linear for each",
    "pg_collection": "pass the tensor-parallel group as tp_group=",
    "keep_master_weight_for_test": 'layer.placements["weight"].gather(layer.weight) is the unsplit weight',
    "embedding_activation_buffer": _UNKNOWN["defer_embedding_wgrad_compute"],
    "grad_output_buffer": _UNKNOWN["defer_embedding_wgrad_compute"],
    "disable_grad_reduce": "call torch.nn.functional.linear on layer.weight, which reduces nothing",
}


def _refuse(where: str, config: Any, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise UnsupportedError(
                f"{where}: {name}={value!r} is not supported; {_OTHERWISE[name]}"
            )
    for name, way_out in _UNKNOWN.items():
        if _flag(config, name):
            raise UnsupportedError(f"{where}: config.{name} is not supported; {way_out}")


def _flag(config: Any, name: str) -> bool:
    return bool(getattr(config, name, False))


def _memory(config: Any) -> dict[str, Any]:
    """Where weights lie, and in which dtype."""
    cpu = _flag(config, "use_cpu_initialization") or not torch.cuda.is_available()
    device = None if cpu else torch.device("cuda", torch.cuda.current_device())
    return {"device": device, "dtype": getattr(config, "params_dtype", None)}


def _strided(size: int, stride: int, world: int) -> Any:
    """Ranges of a packed weight of `stride` blocks (gate and up), each of which is divided."""
    if stride == 1:
        return None
    if stride < 1 or size % stride:
        raise ShapeError(f"stride={stride} does not divide {size} features into blocks")
    block = size // stride
    parts = [split_range(block, world, rank) for rank in range(world)]
    return [
        tuple((i * block + start, i * block + stop) for i in range(stride)) for start, stop in parts
    ]


@torch.no_grad()
def _initialise(layer: Any, init_method: Init, stride: int) -> None:
    """Weight by `init_method` of the unsplit tensor, bias zero; attributes that optimizers there read."""
    weight, placement = layer.weight, layer.placements["weight"]
    if not weight.is_meta and getattr(layer.config, "perform_initialization", True):
        wide = torch.promote_types(weight.dtype, torch.float32)
        full = torch.empty(placement.shape, dtype=wide, device=weight.device)
        init_method(full)
        weight.copy_(placement.slice(full))
    if getattr(layer, "bias", None) is not None and not layer.bias.is_meta:
        layer.bias.zero_()
    for name, place in layer.placements.items():
        parameter = getattr(layer, name)
        parameter.tensor_model_parallel = place.dim is not None
        parameter.partition_dim = -1 if place.dim is None else place.dim
        parameter.partition_stride = stride if place.dim is not None else 1
        # There, such gradients are parts. Here, only those that finalize_gradients completes.
        parameter.sequence_parallel = place.partial_gradient


def _check_fusion(layer: nn.Module, weight: Tensor) -> None:
    fused = getattr(layer.config, "gradient_accumulation_fusion", True)
    if not fused and getattr(weight, "main_grad", None) is not None:
        raise UnsupportedError(
            f"{type(layer).__name__}: weight.main_grad with gradient_accumulation_fusion=False; gradients "
            "are always added to main_grad where there is one: set it to True, or remove main_grad"
        )


def _pair(layer: Any, y: Any) -> tuple[Tensor, Tensor | None]:
    return y if layer.skip_bias_add else (y, None)
