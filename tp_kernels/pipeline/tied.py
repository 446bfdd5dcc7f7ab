"""Weights that several stages hold, such as those of an embedding and the head: one gradient, equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from tp_kernels.comm.errors import GroupMismatchError, ShapeError
from tp_kernels.layers.gradients import gradient_of

from .communicator import PipelineCommunicator
from .gradients import set_gradient

Tie: TypeAlias = Sequence[tuple[int, str]]
"""(stage, name of a parameter in its module) of all that are one weight."""


class _Member(NamedTuple):
    stage: int
    rank: int
    name: str


class TiedWeights:
    """The tied weights of a pipeline. Made and used by all of its ranks alike.

    Equal to begin with: `check_equal` gets what `described` tells on every rank.

    Args:
        ties: equal on all ranks: [((0, "embedding.weight"), (3, "head.weight")), ...].
        modules: this rank's, by stage.

    Raises:
        ShapeError: a stage or a parameter that is not there.
    """

    def __init__(
        self,
        ties: Iterable[Tie],
        modules: Mapping[int, nn.Module],
        channel: PipelineCommunicator,
    ) -> None:
        self._channel = channel
        self._ties: list[list[_Member]] = []
        self._parameters: dict[tuple[int, str], nn.Parameter] = {}
        for tie in ties:
            members = []
            for stage, name in sorted(tie):
                if not 0 <= stage < channel.stages:
                    raise ShapeError(f"tied: {tie} names stage {stage} of {channel.stages}")
                members.append(_Member(stage, channel.stage_to_rank[stage], name))
                if stage in modules:
                    self._parameters[stage, name] = _parameter(modules[stage], stage, name)
            if len(members) < 2:
                raise ShapeError(f"tied: {tie}: a tie has two parameters or more")
            self._ties.append(members)

    def __bool__(self) -> bool:
        return bool(self._ties)

    def __str__(self) -> str:
        return str([[(m.stage, m.name) for m in members] for members in self._ties])

    def parameters(self) -> list[nn.Parameter]:
        """Those of this rank, each once."""
        return list({id(p): p for p in self._parameters.values()}.values())

    def counted_elsewhere(self) -> list[nn.Parameter]:
        """Those of this rank that are a copy of an earlier one."""
        firsts = [self._parameters.get((m[0].stage, m[0].name)) for m in self._ties]
        known = {id(p) for p in firsts if p is not None}
        return [p for p in self.parameters() if id(p) not in known]

    def sum_gradients(self) -> None:
        """Give every parameter of a tie the sum of their gradients, in the order of the stages.

        None where none of them has a gradient.
        """
        for index, members in enumerate(self._ties):
            own = [m for m in self._distinct(members) if m.rank == self._channel.rank]
            if own:
                self._sum(f"tied {index}", members, own)

    def _sum(self, tag: str, members: list[_Member], own: list[_Member]) -> None:
        channel = self._channel
        root = members[0].rank
        parts = {(m.stage, m.name): gradient_of(self._parameters[m.stage, m.name]) for m in own}
        ranks = sorted({m.rank for m in members})
        if channel.rank != root:
            channel.send_to(list(parts.items()), root, tag=tag)
            total = channel.recv_from(root, tag=tag)
        else:
            for rank in ranks:
                if rank != root:
                    parts.update(channel.recv_from(rank, tag=tag))
            total = _total([parts[at] for at in sorted(parts)])
            for rank in ranks:
                if rank != root:
                    channel.send_to(total, rank, tag=tag)
        if total is not None:
            for m in own:
                set_gradient(self._parameters[m.stage, m.name], total)

    def _distinct(self, members: list[_Member]) -> Iterator[_Member]:
        """Without stages of this rank that hold the same object: its gradient is the sum already."""
        seen: set[int] = set()
        for m in members:
            p = self._parameters.get((m.stage, m.name))
            if p is None or id(p) not in seen:
                yield m
            if p is not None:
                seen.add(id(p))

    def described(self) -> dict[str, list[object]]:
        """Shape, dtype and content of those of this rank, for `check_equal`."""
        return {
            f"stage {stage}'s {name}": _description(p)
            for (stage, name), p in self._parameters.items()
        }

    def check_equal(self, described: Iterable[dict[str, list[object]]]) -> None:
        """Raise GroupMismatchError unless tied weights are equal; `described` is of all ranks."""
        found: dict[str, list[object]] = {}
        for told in described:
            found.update(told)
        for members in self._ties:
            first, *others = (f"stage {m.stage}'s {m.name}" for m in members)
            for other in others:
                if found[other] != found[first]:
                    raise GroupMismatchError(
                        f"tied weights are not equal: {first} is {_shown(found[first])}, {other} "
                        f"{_shown(found[other])}; copy one to the other before the runner is made"
                    )


def _parameter(module: nn.Module, stage: int, name: str) -> nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError as error:
        raise ShapeError(f"tied: stage {stage} has no parameter {name!r}: {error}") from None


def _description(p: Tensor) -> list[object]:
    content = p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    digest = hashlib.sha256(content.tobytes()).hexdigest()[:16]
    return [list(p.shape), str(p.dtype), p.requires_grad, digest]


def _shown(description: list[object]) -> str:
    shape, dtype, trained, digest = description
    return f"{shape} {dtype}{'' if trained else ' (frozen)'} of digest {digest}"


def _total(parts: Sequence[Tensor | None]) -> Tensor | None:
    """In the order given, in fp32 or wider, rounded once."""
    there = [part for part in parts if part is not None]
    if not there:
        return None
    wide = torch.promote_types(there[0].dtype, torch.float32)
    total = there[0].to(wide)
    for part in there[1:]:
        total = total + part.to(wide)
    return total.to(there[0].dtype)
