"""Text generation by a pipeline: several requests under way, so that no stage waits for another.

A token needs the token before it, so one request keeps one stage busy at a time. `PipelinedDecoder` lets
groups of requests follow each other around the ring of stages: the last stage picks the tokens of a group and
returns them to the first, which sends the group around again, and puts a new one in the place of one that has
ended. Every stage keeps the KV caches of its own layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import index
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tp_kernels.comm.errors import ShapeError, UnsupportedError

from .causal_lm import CausalLMStage
from .communicator import PipelineCommunicator
from .timeline import Recorder

Prompt = Sequence[int] | Tensor


@dataclass(frozen=True)
class Sampling:
    """How the last stage picks a token: the likeliest, or with `temperature` at random.

    A request draws from a generator of its own, seeded with `seed` and its number: which other requests are
    under way, and how many stages there are, does not matter.
    """

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf") or not isinstance(self.seed, int):
            raise ShapeError(
                f"{self}: a temperature is finite and not negative, a seed a whole number"
            )


class PipelinedDecoder:
    """Generates with one stage of a causal language model on each rank of `channel`.

    Args:
        stage: of this rank; one per rank, in order. With tensor parallelism inside the stages every
            tensor rank has a decoder and a channel of its own, which do the same.
        channel: a communicator with `ring=True`; None for a model in one stage.
        in_flight: groups that are under way at once; default: the stages and one.
        batch: requests in a group, which prefill and decode as one batch, padded on the left. A larger one
            reads the weights less often per token.
        recorder: told when this stage computes (F) and waits (WAIT_F), with the step as micro-batch.
    """

    def __init__(
        self,
        stage: CausalLMStage,
        channel: PipelineCommunicator | None = None,
        *,
        in_flight: int | None = None,
        batch: int = 1,
        recorder: Recorder | None = None,
    ) -> None:
        self.stage, self.channel, self.recorder = stage, channel, recorder
        self.in_flight = stage.stages + 1 if in_flight is None else in_flight
        self.batch = batch
        self._caches: dict[int, Any] = {}
        self._generators: dict[int, torch.Generator] = {}
        self._temperature = 0.0
        self._broken = ""
        self._check()

    def _check(self) -> None:
        stage, channel = self.stage, self.channel
        if self.in_flight < 1 or self.batch < 1:
            raise ShapeError(f"in_flight={self.in_flight}, batch={self.batch}: use 1 or more")
        if channel is None:
            if stage.stages > 1:
                raise UnsupportedError(f"{stage.stages} stages need a channel, with ring=True")
            return
        if channel.stages != stage.stages or channel.my_stages != (stage.stage,):
            raise ShapeError(
                f"this rank has stage {stage.stage} of {stage.stages}, but its channel has stages "
                f"{list(channel.my_stages)} of {channel.stages}: a decoder needs one stage per rank"
            )
        if not channel.ring and stage.stages > 1:
            raise UnsupportedError("tokens return to stage 0: make the channel with ring=True")
        if self.in_flight > channel.credits * stage.stages:
            raise UnsupportedError(
                f"in_flight={self.in_flight}: the channel holds {channel.credits} messages per stage, "
                f"{channel.credits * stage.stages} in all; make it with credits="
                f"{-(-self.in_flight // stage.stages)}"
            )

    def generate(
        self,
        prompts: Iterable[Prompt] = (),
        max_new_tokens: int | Sequence[int] = 64,
        *,
        eos: int | Sequence[int] | None = None,
        sampling: Sampling | None = None,
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """The new tokens of every prompt, on every rank. Every rank calls it; arguments count on stage 0.

        Args:
            prompts: token ids of each request, taken when there is room for another one: an iterator may
                make them while others are under way.
            max_new_tokens: of all requests, or of each.
            eos: tokens that end a request (and are part of its answer). Default: those of the model's
                generation config; () for none.
            sampling: default: greedy, the same tokens as from the model in one process.
            on_token: called on stage 0 with (number of the request, token) as tokens come back.

        Raises:
            ShapeError: on all ranks, for a prompt without tokens, with tokens outside of the vocabulary, or
                too long for the model; requests before it are lost.
            PeerLostError, CollectiveTimeoutError: a stage failed or did not answer in time; its own error
                says on which stage and for which requests. The decoder cannot be used after that.
        """
        if self._broken:
            raise UnsupportedError(
                f"this decoder failed before ({self._broken}): make a new channel"
            )
        try:
            with torch.inference_mode():
                if not self.stage.first:
                    return self._follow()
                queue = _Requests(self.stage, prompts, max_new_tokens, eos, self.batch)
                return self._lead(queue, sampling or Sampling(), on_token)
        finally:
            self._caches.clear()
            self._generators.clear()

    def _lead(
        self, queue: _Requests, sampling: Sampling, on_token: Callable[[int, int], None] | None
    ) -> list[list[int]]:
        """Stage 0: send groups around, take their tokens, and refill."""
        under_way: deque[tuple[int, _Group, Tensor | None]] = deque()
        free = list(range(self.in_flight - 1, -1, -1))
        answers: dict[int, list[int]] = {}
        count, refusal = 0, ""
        picking = {"temperature": sampling.temperature, "seed": sampling.seed}
        while True:
            while free and not refusal:
                with self._told(count, ()):
                    group, refusal = queue.next_group(free[-1])
                if group is None:
                    break
                free.pop()
                tokens = self._step(count, group.prefill() | {"picking": picking})
                under_way.append((count, group, tokens))
                count += 1
            if not under_way:
                break
            step, group, tokens = under_way.popleft()
            with self._told(step, group.numbers):
                if tokens is None:
                    tokens = self._receive(step)["tokens"]
                for request, token in zip(group.requests, tokens.tolist(), strict=True):
                    answers.setdefault(request.number, request.tokens).append(token)
                    if on_token is not None:
                        on_token(request.number, token)
            if group.go_on(tokens):
                under_way.append((count, group, self._step(count, group.decode())))
                count += 1
            else:
                free.append(group.slot)
        results = [answers[number] for number in sorted(answers)]
        if self.stage.stages > 1:
            with self._told(count, ()):
                self._send(count, {"end": True, "refusal": refusal} | _packed(results))
                self._receive(count)  # all stages have seen it
        if refusal:
            raise ShapeError(refusal)
        return results

    def _follow(self) -> list[list[int]]:
        """The other stages: do what arrives, in that order."""
        step = 0
        while True:
            with self._told(step, ()):
                message = self._receive(step)
                ends = "end" in message
                if ends:
                    self._send(step, message)
            if not ends:
                self._step(step, message)
                step += 1
            elif message["refusal"]:
                raise ShapeError(message["refusal"])
            else:
                return _unpacked(message)

    def _step(self, step: int, message: dict[str, Any]) -> Tensor | None:
        """Run this stage on a group and send the result on; the tokens if this is the only stage."""
        with self._told(step, message["numbers"]):
            slot = message["slot"]
            if message["new"]:
                self._caches[slot] = self.stage.new_cache()
            cache = self._caches[slot]
            if (rows := message["rows"]) is not None:
                cache.batch_select_indices(rows)
            start = perf_counter()
            inputs = message.pop("arguments")
            out = self.stage(**inputs, cache=cache, last_token=True)
            if self.stage.last:
                tokens = self._pick(out[:, -1], message)
            if self.recorder is not None:
                self.recorder.record("F", self.stage.stage, step, start, perf_counter())
            if not self.stage.last:
                self._send(step, message | {"arguments": out})
            elif self.stage.first:
                return tokens
            else:
                self._send(step, {"tokens": tokens})
            return None

    def _pick(self, logits: Tensor, message: dict[str, Any]) -> Tensor:
        """[rows] tokens for logits [rows, vocabulary]."""
        if (picking := message.get("picking")) is not None:
            for number in message["numbers"]:
                if picking["temperature"] > 0:
                    seed = 1_000_003 * picking["seed"] + number
                    self._generators[number] = torch.Generator().manual_seed(seed)
            self._temperature = picking["temperature"]
        if self._temperature <= 0:
            return logits.argmax(-1)
        chances = (logits.float().cpu() / self._temperature).softmax(-1)
        drawn = [
            torch.multinomial(row, 1, generator=self._generators[number])
            for row, number in zip(chances, message["numbers"], strict=True)
        ]
        return torch.cat(drawn)

    def _send(self, step: int, value: dict[str, Any]) -> None:
        assert self.channel is not None
        self.channel.send_forward(value, micro_batch=step)

    def _receive(self, step: int) -> Any:
        assert self.channel is not None
        start = perf_counter()
        value = self.channel.recv_forward(micro_batch=step)
        if self.recorder is not None:
            self.recorder.record("WAIT_F", self.stage.stage, step, start, perf_counter())
        return value

    @contextmanager
    def _told(self, step: int, numbers: Sequence[int]) -> Iterator[None]:
        """An error inside says where it happened, and reaches the other stages."""
        try:
            yield
        except BaseException as error:
            about = f"of requests {', '.join(map(str, numbers))}" if numbers else "of a message"
            self._broken = f"stage {self.stage.stage}, step {step} {about}: {error}"
            if self.channel is not None:
                self.channel.fail(f"{type(error).__name__} in {self._broken}")
            error.add_note(
                f"in stage {self.stage.stage} of {self.stage.stages}, step {step} {about}"
            )
            raise


@dataclass
class _Request:
    number: int
    prompt: Tensor
    left: int  # tokens that it may still get
    tokens: list[int] = field(default_factory=list)


class _Requests:
    """Prompts that wait, checked when they are taken."""

    def __init__(
        self,
        stage: CausalLMStage,
        prompts: Iterable[Prompt],
        max_new_tokens: int | Sequence[int],
        eos: int | Sequence[int] | None,
        batch: int,
    ) -> None:
        self._limits: Any = max_new_tokens
        self._batch = batch
        self._config = stage.config.get_text_config()
        if eos is None:
            eos = getattr(stage.generation_config, "eos_token_id", None)
        self._wrong = ""  # what is refused before anything is sent
        self._eos: frozenset[int] = frozenset()
        self._prompts: Iterator[tuple[int, Prompt]] = iter(())
        try:
            self._eos = frozenset(_whole_numbers(() if eos is None else eos))
            limits = _whole_numbers(max_new_tokens)
            if not isinstance(max_new_tokens, int):
                self._limits = limits
            self._prompts = enumerate(prompts)
        except (TypeError, ValueError, RuntimeError):
            self._wrong = (
                f"max_new_tokens={max_new_tokens!r}, eos={eos!r}, prompts of type "
                f"{type(prompts).__name__}: use whole numbers or lists of them, and lists of token ids"
            )
            return
        if isinstance(prompts, Sequence) and not isinstance(max_new_tokens, int):
            counts = len(limits), len(prompts)
            if counts[0] != counts[1]:
                self._wrong = f"max_new_tokens has {counts[0]} values for {counts[1]} prompts"

    def next_group(self, slot: int) -> tuple[_Group | None, str]:
        """The next requests that run as one batch, if any wait; or why one is refused."""
        taken: list[_Request] = []
        if self._wrong:
            return None, self._wrong
        for number, prompt in self._prompts:
            try:
                taken.append(self._checked(number, prompt))
            except ShapeError as error:
                return None, str(error)
            if len(taken) == self._batch:
                break
        return (_Group(slot, taken, self._eos) if taken else None), ""

    def _checked(self, number: int, prompt: Prompt) -> _Request:
        try:
            tokens = torch.as_tensor(prompt).cpu().reshape(-1)
        except (TypeError, ValueError, RuntimeError):
            raise ShapeError(
                f"prompt {number} is {prompt!r}: use token ids, as a tokenizer makes them"
            ) from None
        limits = self._limits
        if not isinstance(limits, int) and number >= len(limits):
            raise ShapeError(f"max_new_tokens has {len(limits)} values, and there are more prompts")
        limit = limits if isinstance(limits, int) else int(limits[number])
        words = self._config.vocab_size
        room = getattr(self._config, "max_position_embeddings", None)
        what = f"prompt {number} of {len(tokens)} tokens"
        if not len(tokens) or tokens.is_floating_point():
            raise ShapeError(f"{what}: give at least one token id")
        if limit < 1:
            raise ShapeError(f"{what}: max_new_tokens={limit}, use 1 or more")
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < words:
            raise ShapeError(f"{what}: token ids must be from 0 to {words - 1}")
        if room is not None and len(tokens) + limit > room:
            raise ShapeError(
                f"{what} and {limit} new ones: the model has {room} positions; shorten the prompt or "
                "max_new_tokens"
            )
        return _Request(number, tokens.long(), limit)


class _Group:
    """Requests that go around as one batch."""

    def __init__(self, slot: int, requests: list[_Request], eos: frozenset[int]) -> None:
        self.slot, self.requests, self._eos = slot, requests, eos
        lengths = [len(request.prompt) for request in requests]
        longest = max(lengths)
        self._ids = torch.zeros(len(requests), longest, dtype=torch.long)
        mask = torch.zeros(len(requests), longest, dtype=torch.long)
        for row, request in enumerate(requests):
            self._ids[row, longest - lengths[row] :] = request.prompt
            mask[row, longest - lengths[row] :] = 1
        self._positions = (mask.cumsum(1) - 1).clamp(min=0)
        self._mask = mask if min(lengths) < longest else None
        self._rows: Tensor | None = None

    @property
    def numbers(self) -> list[int]:
        return [request.number for request in self.requests]

    def prefill(self) -> dict[str, Any]:
        return self._message(new=True)

    def decode(self) -> dict[str, Any]:
        return self._message(new=False)

    def _message(self, new: bool) -> dict[str, Any]:
        arguments = {
            "inputs": self._ids,
            "attention_mask": self._mask,
            "position_ids": self._positions,
        }
        return {
            "slot": self.slot,
            "numbers": self.numbers,
            "new": new,
            "rows": self._rows,
            "arguments": arguments,
        }

    def go_on(self, tokens: Tensor) -> bool:
        """Take the next tokens [rows]; requests that end leave. Whether any is left."""
        stays = []
        for row, (request, token) in enumerate(zip(self.requests, tokens.tolist(), strict=True)):
            request.left -= 1
            if request.left and token not in self._eos:
                stays.append(row)
        kept = torch.tensor(stays, dtype=torch.long)
        self._rows = kept if len(stays) < len(self.requests) else None
        self.requests = [self.requests[row] for row in stays]
        self._ids = tokens[kept][:, None]
        self._positions = self._positions[kept, -1:] + 1
        if self._mask is not None:
            mask = self._mask[kept]
            self._mask = torch.cat([mask, mask.new_ones(len(stays), 1)], 1)
        return bool(stays)


def _whole_numbers(given: Any) -> list[int]:
    """A number or several, as a list; TypeError if they are not whole numbers."""
    if isinstance(given, Tensor):
        given = given.tolist()
    several: Iterable[Any] = [given] if isinstance(given, (int, float)) else given
    return [index(number) for number in several]


def _packed(answers: list[list[int]]) -> dict[str, Tensor]:
    """Lists of tokens as two tensors, which travel at the cost of their bytes."""
    flat = [token for answer in answers for token in answer]
    return {
        "tokens": torch.tensor(flat, dtype=torch.long),
        "lengths": torch.tensor([*map(len, answers)], dtype=torch.long),
    }


def _unpacked(message: dict[str, Any]) -> list[list[int]]:
    return [part.tolist() for part in message["tokens"].split(message["lengths"].tolist())]
