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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tp_kernels.comm import ParallelGroup, ShapeError, UnsupportedError
from tp_kernels.integrations.transformers import parallelize
from tp_kernels.pipeline import PipelineCommunicator
from tp_kernels.pipeline.causal_lm import load_stage, split_layers
from tp_kernels.pipeline.decode import PipelinedDecoder

SIZES = {
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


def smollm(checkpoint: Path, texts: list[list[int]], new: int) -> tuple[list[list[int]], int]:
    """Tokens from the real model, loaded by stages; and how many weights this rank holds."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with ParallelGroup(timeout=60) as group, PipelineCommunicator(group, ring=True) as channel:
        stage = load_stage(checkpoint, group.size, group.rank)
        held = sum(parameter.numel() for parameter in stage.parameters())
        return PipelinedDecoder(stage, channel).generate(texts, new), held
