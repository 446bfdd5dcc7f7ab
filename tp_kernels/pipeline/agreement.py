"""What the ranks of a pipeline tell each other around a call of the runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tp_kernels.comm.errors import CollectiveTimeoutError, GroupMismatchError, PeerLostError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.objects import all_gather_object

from .communicator import PipelineCommunicator
from .stage import PipelineError


def gather(
    call: str,
    value: Any,
    group: ParallelGroup,
    problem: Exception | None = None,
    who: str = "rank",
) -> list[Any]:
    """`value` of every rank of the group, once all are known to make the same call.

    Args:
        call: what this rank does, with all that has to be equal: "step with 4 micro-batches".
        problem: why this rank cannot; raised here, and told to the others.
        who: what the ranks of the group are called.

    Raises on all ranks:
        PipelineError: another rank cannot.
        GroupMismatchError: ranks make other calls, as when one steps and one clips gradients.
    """
    told = problem and f"{type(problem).__name__}: {problem}"
    found = all_gather_object((call, told, value), group)
    if problem is not None:
        raise problem
    me = f"{who} {group.rank}"
    for other, (_, text, _) in enumerate(found):
        if text:
            raise PipelineError(f"{me} cannot go on, since {who} {other} cannot: {text}")
    for other, (theirs, _, _) in enumerate(found):
        if theirs != call:
            raise GroupMismatchError(
                f"{me} calls {call}, {who} {other} {theirs}; all ranks of a pipeline make the same calls "
                "with the same schedule and settings, and so do its replicas"
            )
    return [value for _, _, value in found]


def agree(
    call: str,
    value: Any,
    channel: PipelineCommunicator,
    data: ParallelGroup | None,
    problem: Exception | None,
    settle: Callable[[list[Any]], Any],
) -> list[Any]:
    """What `settle` makes of the values of the ranks of a pipeline, of every replica. See `gather`.

    A rank that cannot, or that does something else, is found out here, before anything is sent, so that all
    ranks raise and can go on.
    """
    settled: Any = None
    try:
        settled = settle(gather(call, value, channel.group, problem))
    except (PeerLostError, CollectiveTimeoutError):
        raise
    except Exception as error:  # raised once the replicas know
        problem = error
    if data is not None:
        return gather(call, settled, data, problem, "replica")
    if problem is not None:
        raise problem
    return [settled]


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
