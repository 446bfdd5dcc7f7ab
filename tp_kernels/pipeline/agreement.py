"""What the ranks of a pipeline tell each other around a call of the runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tp_kernels.comm.errors import GroupMismatchError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.objects import all_gather_object

from .communicator import PipelineCommunicator
from .stage import PipelineError


def agree(
    channel: PipelineCommunicator,
    data: ParallelGroup | None,
    mode: str,
    fingerprint: int,
    micro_batches: int,
    problem: Exception | None,
    tokens: Sequence[int],
) -> list[int]:
    """Tokens of each micro-batch over all replicas, once all ranks are known to do the same.

    A rank that cannot, or that does something else, is found out here, before anything is sent, so that all
    ranks raise and can go on.
    """
    told = problem and f"{type(problem).__name__}: {problem}"
    rank = channel.rank
    found = all_gather_object((mode, micro_batches, fingerprint, told, list(tokens)), channel.group)
    calls = [tuple(call[:3]) for call in found]
    error: Exception | None = problem
    if error is None:
        error = _refusal(found, rank)
    if error is None and len(set(calls)) > 1:
        other = next(r for r, call in enumerate(calls) if call != calls[rank])
        error = GroupMismatchError(
            f"rank {rank} calls {_shown(calls[rank])}, rank {other} {_shown(calls[other])}; all ranks of "
            "a pipeline make the same calls with the same schedule"
        )
    counted = next((call[4] for call in found if call[4]), [0] * micro_batches)
    if data is not None:
        text = error and f"{type(error).__name__}: {error}"
        replicas = all_gather_object((text, micro_batches, counted), data)
        for replica, (text, number, _) in enumerate(replicas):
            if error is None and text:
                error = PipelineError(f"replica {replica} cannot go on: {text}")
            if error is None and number != micro_batches:
                error = GroupMismatchError(
                    f"replica {data.rank} runs {micro_batches} micro-batches, replica {replica} {number}; "
                    "replicas run equally many"
                )
        if error is None:
            counted = [sum(counts) for counts in zip(*(r[2] for r in replicas), strict=True)]
    if error is not None:
        raise error
    return counted


def _refusal(found: Sequence[Any], rank: int) -> Exception | None:
    for other, call in enumerate(found):
        if call[3]:
            return PipelineError(f"rank {rank} cannot go on, since rank {other} cannot: {call[3]}")
    return None


def _shown(call: tuple[Any, ...]) -> str:
    mode, micro_batches, fingerprint = call
    return f"{mode} with {micro_batches} micro-batches of a schedule of digest {fingerprint:08x}"


def from_last(channel: PipelineCommunicator, value: Any, tag: str) -> Any:
    """`value` of the rank of the last stage, on all ranks, when all have come here.

    Through the channel, which knows who has failed, where a process group would wait for its deadline.
    """
    source = channel.stage_to_rank[-1]
    others = [rank for rank in range(channel.group.size) if rank != source]
    if channel.rank != source:
        channel.send_to(None, source, tag="done")
        value = channel.recv_from(source, tag=tag)
    else:
        for rank in others:
            channel.recv_from(rank, tag="done")
        for rank in others:
            channel.send_to(value, rank, tag=tag)
    channel.flush()
    return value
