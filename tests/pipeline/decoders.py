"""What ranks do in the tests of pipelined decoding."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tp_kernels.comm import ParallelGroup, ShapeError, UnsupportedError
from tp_kernels.integrations.checkpoint import SafetensorsReader
from tp_kernels.integrations.transformers import parallelize
from tp_kernels.pipeline import PipelineCommunicator
from tp_kernels.pipeline.causal_lm import causal_lm_loss, count_labels, load_stage, split_layers
from tp_kernels.pipeline.decode import PipelinedDecoder
from tp_kernels.pipeline.runner import PipelineRunner

SIZES: dict[str, dict[str, Any]] = {
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8},
    "mistral": {"num_key_value_heads": 2, "head_dim": 8},
    "llama": {"num_key_value_heads": 2, "head_dim": 8},
    "qwen2": {"num_key_value_heads": 3, "head_dim": 8},
}


def tiny(kind: str, layers: int = 4, **changes: Any) -> PreTrainedModel:
    """A random model whose tokens depend on everything before them; the same in every process."""
    sizes = {
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 70,
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind == "gpt2":
        sizes["n_inner"] = sizes.pop("intermediate_size")
    config = AutoConfig.for_model(kind, **(sizes | SIZES.get(kind, {}) | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=draw) * 0.2
            parameter.copy_(values + (parameter.dim() == 1))
    return model.eval()


def trained(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A step of the runner on stages of a model: losses, and the gradients of this rank by stock name."""
    results = []
    with one_thread(), ParallelGroup(timeout=30) as group, PipelineCommunicator(group) as channel:
        for case in cases:
            model = tiny(case["kind"], **case.get("changes", {})).double()
            stage = split_layers(model, case.get("cut", group.size))[group.rank]
            # Each rank has weights of its own, as if it had loaded its stage only.
            runner = PipelineRunner(
                stage,
                "one_f_one_b",
                channel,
                causal_lm_loss,
                scale="token",
                count=count_labels,
                tied=stage.ties,
                micro_batches=3,
            )
            ids, labels, mask = training_batch()
            losses = runner.step(*([ids, mask] if case.get("mask") else [ids]), target=labels)
            gradients = {
                name.removeprefix("lm."): parameter.grad.clone()
                for name, parameter in stage.named_parameters()
            }
            results.append({"loss": losses.total, "gradients": gradients})
    return results


def training_batch() -> tuple[Tensor, Tensor, Tensor]:
    """5 x 8 tokens, some rows padded on the right."""
    ids = torch.randint(3, 101, (5, 8), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 6:] = mask[4, 3:] = 0
    return ids, ids.masked_fill(mask == 0, -100), mask


def prompts(count: int) -> list[list[int]]:
    """Of 1 to 9 tokens."""
    draw = torch.Generator().manual_seed(5)
    lengths = [1 + (3 * number) % 9 for number in range(count)]
    return [torch.randint(3, 101, (n,), generator=draw).tolist() for n in lengths]


def stock(model: PreTrainedModel, prompt: list[int], new: int, eos: Any = None) -> list[int]:
    """Greedy tokens of one process."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=eos,
        )
    return out[0, len(prompt) :].tolist()


@contextmanager
def one_thread() -> Iterator[None]:
    """Threads of one rank that wait for each other crawl on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def answers(cases: list[dict[str, Any]]) -> list[Any]:
    """By case, what this rank returns or raises."""
    results: list[Any] = []
    with (
        one_thread(),
        ParallelGroup(timeout=30) as group,
        PipelineCommunicator(group, ring=True) as channel,
    ):
        leads = group.rank == 0
        for case in cases:
            model = tiny(case["kind"], **case.get("changes", {}))
            stage = split_layers(model, case.get("cut", group.size))[group.rank]
            decoder = PipelinedDecoder(stage, channel, **case.get("decoder", {}))
            texts = (
                case["prompts"] if isinstance(case["prompts"], list) else prompts(case["prompts"])
            )
            arguments = (iter(texts), case.get("new", 12)) if leads else ()
            try:
                answer = decoder.generate(*arguments, **(case.get("options", {}) if leads else {}))
            except ShapeError as error:
                answer = str(error)
            results.append(answer)
    return results


def answers_of_grid(kind: str, count: int, batch: int) -> list[list[int]]:
    """Two stages, each divided over two ranks: rank = 2 * stage + tensor rank."""
    rank = dist.get_rank()
    tensors = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pipelines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with (
        one_thread(),
        ParallelGroup(tensors[rank // 2], timeout=30) as tensor,
        ParallelGroup(pipelines[rank % 2], timeout=30) as pipeline,
        PipelineCommunicator(pipeline, ring=True) as channel,
    ):
        stage = split_layers(parallelize(tiny(kind), tensor), 2)[pipeline.rank]
        held = sum(parameter.numel() for parameter in stage.parameters())
        assert held < 0.4 * sum(parameter.numel() for parameter in tiny(kind).parameters())
        return PipelinedDecoder(stage, channel, batch=batch).generate(prompts(count), 8)


def failing(how: str, at: int) -> str:
    """A stage that raises, dies or sleeps in its `at`-th step: what this rank raises."""
    timeout = 3.0 if how == "sleep" else 30.0
    text = "nothing was raised"
    try:
        with (
            one_thread(),
            ParallelGroup(timeout=timeout) as group,
            PipelineCommunicator(group, ring=True) as channel,
        ):
            stage = split_layers(tiny("llama"), group.size)[group.rank]
            calls = 0

            def hook(*_: Any) -> None:
                nonlocal calls
                calls += 1
                if group.rank == 1 and calls == at:
                    if how == "die":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if how == "sleep":
                        sleep(6.0)
                    raise ArithmeticError("the sum is wrong")

            stage.register_forward_pre_hook(hook)
            decoder = PipelinedDecoder(stage, channel)
            try:
                decoder.generate(prompts(5), 12)
            except Exception as error:
                text = f"{type(error).__name__}: {error} {' '.join(error.__notes__)}"
                raise decoder_error(decoder) from error
    except UnsupportedError as error:
        return f"{text} | {error}"
    return text


def decoder_error(decoder: PipelinedDecoder) -> Exception:
    """What a decoder says when it is used after a failure."""
    try:
        decoder.generate(prompts(1), 1)
    except UnsupportedError as error:
        return error
    return AssertionError("a broken decoder was used")


def refill(batch: int) -> list[tuple[int, int]]:
    """(prompts taken, requests that have ended) at every token, on stage 0."""
    taken, ended, seen = 0, 0, []

    def source() -> Iterator[list[int]]:
        nonlocal taken
        for prompt in prompts(8):
            taken += 1
            yield prompt

    limits = [2, 9, 3, 4, 1, 5, 2, 6]
    got = [0] * 8

    def on_token(number: int, token: int) -> None:
        nonlocal ended
        got[number] += 1
        ended += got[number] == limits[number]
        seen.append((taken, ended))

    with (
        one_thread(),
        ParallelGroup(timeout=30) as group,
        PipelineCommunicator(group, ring=True) as channel,
    ):
        stage = split_layers(tiny("llama"), group.size)[group.rank]
        decoder = PipelinedDecoder(stage, channel, in_flight=2, batch=batch)
        leads = group.rank == 0
        decoder.generate(source() if leads else (), limits, eos=(), on_token=on_token)
    return seen


def loaded(checkpoint: Path, cut: tuple[int, ...]) -> dict[str, Any]:
    """A stage divided over two ranks, read from a file: bytes read, and its output for a batch."""
    tensor = dist.new_group([0, 1])
    read = 0
    tensor_of, slice_of = SafetensorsReader.tensor, SafetensorsReader.slice

    def counted(function: Any) -> Any:
        def call(*args: Any) -> Tensor:
            nonlocal read
            found = function(*args)
            read += found.numel()
            return found

        return call

    SafetensorsReader.tensor, SafetensorsReader.slice = counted(tensor_of), counted(slice_of)
    try:
        with one_thread(), ParallelGroup(tensor, timeout=30) as group, torch.inference_mode():
            stages = [load_stage(checkpoint, cut, s, group=group) for s in range(len(cut) - 1)]
            value = torch.tensor(prompts(1))
            for stage in stages:
                value = stage(value)
    finally:
        SafetensorsReader.tensor, SafetensorsReader.slice = tensor_of, slice_of
    return {"read": read, "logits": value.clone()}


def smollm(checkpoint: Path, texts: list[list[int]], new: int) -> tuple[list[list[int]], int]:
    """Tokens from the real model, loaded by stages; and how many weights this rank holds."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with ParallelGroup(timeout=60) as group, PipelineCommunicator(group, ring=True) as channel:
        stage = load_stage(checkpoint, group.size, group.rank)
        held = sum(parameter.numel() for parameter in stage.parameters())
        return PipelinedDecoder(stage, channel).generate(texts, new), held
