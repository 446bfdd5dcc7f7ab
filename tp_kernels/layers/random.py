"""Random numbers of layers that are divided over ranks: named streams, and keys for `ops.dropout`.

A stream is a state of torch's generators of its own, so that what one part of a model draws does not depend
on what others do. On a stream that is the same on all ranks, replicated work draws the same numbers; on one
per rank, divided work draws different ones. `RandomStreams.checkpoint` recomputes with the numbers of the
forward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tp_kernels.comm.errors import GroupMismatchError, UnsupportedError
from tp_kernels.comm.group import GroupLike, ParallelGroup, as_group
from tp_kernels.comm.objects import all_gather_object
from tp_kernels.ops.regions import _gather_op

# By kind of device; states as of Generator.get_state().
Generators = dict[str, torch.Generator]
States = dict[str, Tensor]


def draw_key(device: torch.device | str, group: ParallelGroup | None = None) -> Tensor:
    """A key for `ops.dropout`, int64 [] in [0, 2^63), from the default generator of the device.

    Ordinary torch checkpointing therefore draws it again. With a group, all ranks get the one that rank 0
    drew (collective), so that generators which have gone different ways do not matter.
    """
    key = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=device)
    if group is not None and group.size > 1:
        key = _gather_op(key, [1] * group.size, False, group.name)
    return key[0]


class RandomStreams:
    """Named streams of random numbers; "same" gives the same on all ranks, "own" different ones on each.

    Args:
        seed: equal on all ranks of the group; another one for each data-parallel replica.
        group: ParallelGroup, ProcessGroup, one-dimensional DeviceMesh, or None for the default group.

    Made collectively. Of devices, the CPU and the current CUDA device have streams.

    Raises:
        GroupMismatchError: the ranks were given different seeds.
    """

    def __init__(self, seed: int, *, group: GroupLike = None) -> None:
        self.group: ParallelGroup = as_group(group)
        self.seed = int(seed)
        seeds = all_gather_object(self.seed, self.group)
        if any(other != self.seed for other in seeds):
            raise GroupMismatchError(
                f"RandomStreams: rank {self.group.rank} of {self.group.size} was given seed {self.seed}; "
                f"by rank they are {seeds}, and must be equal"
            )
        self._states: dict[str, States] = {}
        self._per_rank: dict[str, bool] = {}
        self._active: tuple[str, ...] = ()  # of nested forks, the innermost last
        self._replaying = False
        self.add("same")
        self.add("own", per_rank=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> RandomStreams:
        """Itself: layers copied from one that draws from these streams must not draw the same."""
        return self

    def add(self, name: str, per_rank: bool = False) -> None:
        """A stream of this name, seeded by seed and name, and by the rank if `per_rank`."""
        if name in self._states:
            raise UnsupportedError(f"RandomStreams: there is a stream {name!r} already")
        self._per_rank[name] = per_rank
        self._states[name] = {}

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Draw from this stream instead of torch's default generators, and leave those as they were.

        Raises:
            UnsupportedError: there is no such stream, or this is a recomputation by torch.utils.checkpoint,
                which would draw other numbers than the forward did.
        """
        if name not in self._states:
            raise UnsupportedError(
                f"RandomStreams: no stream {name!r}; there are {', '.join(self._states)}; use add()"
            )
        if torch._C._current_graph_task_id() != -1 and not self._replaying:
            raise UnsupportedError(
                f"RandomStreams: stream {name!r} in a recomputation by torch.utils.checkpoint, which does "
                "not know streams; use the checkpoint() of these streams instead"
            )
        generators = _generators()
        outside, outer = _get(generators), self._active
        if outer:
            self._states[outer[-1]] = outside
        self._active = (*outer, name)
        try:
            self._resume(name, generators)
            yield
        finally:
            self._states[name] = _get(generators)
            self._active = outer
            _set(generators, self._states[outer[-1]] if outer else outside)

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """function(*args, **kwargs) without keeping what its backward needs, which is computed again then.

        torch's activation checkpointing, with the streams as they were at the call.
        """
        return checkpoint(function, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[Any, Any]:
        return nullcontext(), _Replay(self)

    def _resume(self, name: str, generators: Generators) -> None:
        states = self._states[name]
        for device, generator in generators.items():
            if device in states:
                generator.set_state(states[device])
            else:
                generator.manual_seed(self._seed_of(name))

    def _seed_of(self, name: str) -> int:
        rank = self.group.rank if self._per_rank[name] else -1
        text = f"{self.seed}/{rank}/{name}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")

    def state_dict(self) -> dict[str, Any]:
        """What continues all streams: numbers, texts and tensors. Each rank has its own."""
        if self._active:
            raise UnsupportedError("RandomStreams: state_dict() inside of fork()")
        return {
            "seed": self.seed,
            "rank": self.group.rank,
            "size": self.group.size,
            "per_rank": dict(self._per_rank),
            "states": {name: dict(states) for name, states in self._states.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict()` was taken, on a group of the same size; collective.

        Raises:
            GroupMismatchError: the state is of another rank, or those of the ranks do not belong together.
            UnsupportedError: it lacks a stream that is here, or this is inside of fork().
        """
        if self._active:
            raise UnsupportedError("RandomStreams: load_state_dict() inside of fork()")
        here = self.group.rank, self.group.size
        digests = all_gather_object(_digest_of(state), self.group)
        if (state["rank"], state["size"]) != here:
            raise GroupMismatchError(
                f"RandomStreams: the state is of rank {state['rank']} of {state['size']}, this is rank "
                f"{here[0]} of {here[1]}; every rank loads its own, and other numbers of ranks start anew: "
                "RandomStreams(another seed)"
            )
        if any(digest != digests[0] for digest in digests):
            raise GroupMismatchError(
                f"RandomStreams on rank {here[0]} of {here[1]}: the ranks load states of different runs or "
                "steps, in which streams that are the same on all ranks differ"
            )
        missing = self._states.keys() - state["states"].keys()
        if missing:
            raise UnsupportedError(f"RandomStreams: the state has no streams {sorted(missing)}")
        self.seed = state["seed"]
        self._per_rank = dict(state["per_rank"])
        self._states = {name: dict(states) for name, states in state["states"].items()}


class _Replay:
    """The streams as they were when this was made; entered for every backward of a graph that is kept."""

    def __init__(self, streams: RandomStreams) -> None:
        self._streams = streams
        self._then = dict(streams._states), streams._active
        self._now: list[Any] = []

    def __enter__(self) -> None:
        streams, (states, active) = self._streams, self._then
        self._now.append((streams._states, streams._active, streams._replaying))
        streams._states, streams._active, streams._replaying = dict(states), active, True

    def __exit__(self, *_: object) -> None:
        streams = self._streams
        streams._states, streams._active, streams._replaying = self._now.pop()


def _digest_of(state: dict[str, Any]) -> str:
    """Of the seed and of the streams that have to be the same on all ranks."""
    digest = hashlib.sha256(str(state["seed"]).encode())
    for name, per_rank in sorted(state["per_rank"].items()):
        digest.update(f"/{name}/{per_rank}".encode())
        for _, tensor in sorted(({} if per_rank else state["states"][name]).items()):
            digest.update(bytes(tensor.tolist()))
    return digest.hexdigest()


def _generators() -> Generators:
    """torch's default generators that layers may draw from: of the CPU and of the current CUDA device."""
    generators = {"cpu": torch.default_generator}
    if torch.cuda.is_available():
        generators["cuda"] = torch.cuda.default_generators[torch.cuda.current_device()]
    return generators


def _get(generators: Generators) -> States:
    return {device: generator.get_state() for device, generator in generators.items()}


def _set(generators: Generators, states: States) -> None:
    for device, generator in generators.items():
        if device in states:
            generator.set_state(states[device])
