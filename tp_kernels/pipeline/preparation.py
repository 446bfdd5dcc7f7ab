"""Before anything runs: what a runner is given is checked and cut."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from inspect import signature
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import nn

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.layers.random import RandomStreams

from .communicator import PipelineCommunicator
from .generators import SCHEDULES
from .micro_batches import cut, rows_of, tensors_of
from .schedule import Schedule
from .stage import Stage, load_checkpointing

BESIDE_TENSORS = (
    32 << 10
)  # bytes of a message in a ring: its description, and what is left of a cell


class Work(NamedTuple):
    """One call, as this rank sees it: what its stages get, by micro-batch."""

    schedule: Schedule
    args: list[Any]  # of the first stage, on its rank
    kwargs: list[dict[str, Any]]
    targets: list[Any]  # of the last stage, on its rank; None: there is no target
    rows: dict[str, int | None]  # of what was cut here

    @property
    def micro_batches(self) -> int:
        return self.schedule.micro_batches


class Schedules:
    """The schedule of every number of micro-batches, checked when it is made."""

    def __init__(
        self,
        source: Schedule | str | Callable[[int], Schedule],
        channel: PipelineCommunicator,
        updates: bool,
    ) -> None:
        """updates: there is an optimizer for schedules that update after every micro-batch."""
        self._channel, self._updates = channel, updates
        self._made: dict[int, tuple[Schedule, int]] = {}
        self._fixed = source if isinstance(source, Schedule) else None
        if isinstance(source, str):
            source = _by_name(source, channel)
        if isinstance(source, Schedule):
            self._add(source)
        else:
            self._make = source

    def get(self, micro_batches: int | None) -> tuple[Schedule, int]:
        """The schedule, and a number that differs where schedules differ."""
        if self._fixed is not None and micro_batches in (None, self._fixed.micro_batches):
            micro_batches = self._fixed.micro_batches
        if micro_batches is None:
            raise UnsupportedError(
                "into how many micro-batches? pass micro_batches= to the runner or to the call"
            )
        if micro_batches not in self._made:
            if self._fixed is not None:
                raise UnsupportedError(
                    f"{micro_batches} micro-batches, but the schedule {self._fixed.name} is of "
                    f"{self._fixed.micro_batches}; give the runner a name or a function that makes one"
                )
            if micro_batches < 1:
                raise ShapeError(f"{micro_batches} micro-batches: there is at least one")
            made = self._make(micro_batches)
            if made.micro_batches != micro_batches:
                raise UnsupportedError(
                    f"schedule({micro_batches}) made {made.name} of {made.micro_batches} micro-batches"
                )
            self._add(made)
        return self._made[micro_batches]

    def _add(self, schedule: Schedule) -> None:
        channel = self._channel
        if schedule.stage_to_rank != channel.stage_to_rank or schedule.ranks != channel.group.size:
            raise UnsupportedError(
                f"the schedule {schedule.name} is for {schedule.ranks} ranks, stages on "
                f"{schedule.stage_to_rank}; the channel connects {channel.group.size}, stages on "
                f"{channel.stage_to_rank}: make it with PipelineCommunicator(group, "
                "stage_to_rank=schedule.stage_to_rank)"
            )
        if schedule.flush == self._updates:
            raise UnsupportedError(
                f"optimizer= has no effect with {schedule.name}, which ends with all gradients in place: "
                "call optimizer.step() after step()"
                if schedule.flush
                else f"{schedule.name} updates parameters after every micro-batch: pass optimizer="
            )
        # As many may be sent and not received, and as many be queued by their sender.
        schedule.validate(credits=2 * channel.credits)
        table = f"{schedule.micro_batches} {schedule.stage_to_rank} {schedule.to_csv()}"
        self._made[schedule.micro_batches] = schedule, crc32(table.encode())


def _by_name(name: str, channel: PipelineCommunicator) -> Callable[[int], Schedule]:
    make = SCHEDULES.get(name)
    if make is None:
        raise UnsupportedError(f"there is no schedule {name!r}; there are {', '.join(SCHEDULES)}")
    ranks = channel.group.size
    chunks = {"chunks": channel.stages // ranks} if "chunks" in signature(make).parameters else {}
    return lambda micro_batches: make(ranks, micro_batches, **chunks)


def check_room(channel: PipelineCommunicator, value: Any, stage: int, other: int) -> None:
    """Refuse a message between tensor-parallel stages that may not leave at once.

    While a rank waits in a collective of its tensor group it moves no messages. One that does not fit into
    the ring would stay half sent: ranks of two stages could then wait for each other in a circle.
    """
    ranks = channel.stage_to_rank
    pair = ranks[stage], ranks[other]
    if channel.memory is None or pair[0] == pair[1]:
        return
    steps = [(s, s + 1) for s in range(channel.stages - 1)]
    lanes = [(a, b) for a, b in steps + [(b, a) for a, b in steps] if (ranks[a], ranks[b]) == pair]
    under_way = channel.credits * len(lanes)
    nbytes = sum(channel.bytes_in_ring(tensor, pair[1]) for tensor in tensors_of(value))
    needed = under_way * (nbytes + BESIDE_TENSORS)
    if needed > channel.buffer_bytes:
        raise UnsupportedError(
            f"pass buffer_bytes={needed} to PipelineCommunicator: {under_way} messages of "
            f"{nbytes} bytes may be under way from stage {stage} to stage {other}, both tensor parallel, "
            f"and there is room for {channel.buffer_bytes} bytes (fewer credits= need less)"
        )


def make_stages(
    stages: nn.Module | Sequence[nn.Module],
    channel: PipelineCommunicator,
    loss_fn: Any,
    optimizer: torch.optim.Optimizer | None,
    checkpointed: Collection[int],
    streams: RandomStreams | None,
    measured: bool,
) -> dict[int, Stage]:
    """The stages of this rank, by their index. Other arguments are those of the runner and of `Stage`."""
    single = isinstance(stages, nn.Module) and not isinstance(stages, nn.ModuleList)
    modules: list[Any] = [stages] if single else list(stages)  # type: ignore[arg-type]
    check_modules(modules, channel, optimizer, loss_fn)
    unknown = [s for s in checkpointed if not 0 <= s < channel.stages]
    if unknown:
        raise UnsupportedError(f"checkpoint: stages {unknown} of {channel.stages}")
    if streams is not None and not checkpointed:
        raise UnsupportedError("streams= has no effect without checkpoint=")
    if checkpointed:
        load_checkpointing()  # on all ranks, which then agree that the runner is made
    return {
        index: Stage(
            module,
            index,
            checkpointed=index in checkpointed,
            streams=streams,
            stashed=optimizer is not None,
            measured=measured,
        )
        for index, module in zip(channel.my_stages, modules, strict=True)
    }


def check_modules(
    modules: Sequence[nn.Module],
    channel: PipelineCommunicator,
    optimizer: torch.optim.Optimizer | None,
    loss_fn: Any,
) -> None:
    """Refuse stages that the runner cannot run, with the way out."""
    if isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
        raise UnsupportedError(
            f"loss_fn {type(loss_fn).__name__} has parameters, which belong to no stage: make it a part of "
            "the last stage, which then returns the loss (loss_fn=None; target= is its keyword argument)"
        )
    if len(modules) != len(channel.my_stages):
        raise UnsupportedError(
            f"{len(modules)} modules for stages {channel.my_stages} of rank {channel.rank}: pass one each"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for index, module in zip(channel.my_stages, modules, strict=True):
        for layer in module.modules():
            wrapped = isinstance(layer, nn.parallel.DistributedDataParallel) or (
                fsdp is not None
                and isinstance(layer, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))
            )
            if wrapped:
                raise UnsupportedError(
                    f"stage {index} has a {type(layer).__name__}, which exchanges gradients in every "
                    "backward, that is, for every micro-batch: pass the plain module, and data_parallel=group"
                )
        if optimizer is None:
            continue
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        lacks = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in known]
        if lacks:
            raise UnsupportedError(f"stage {index}: optimizer= does not update {', '.join(lacks)}")


def prepare(
    mode: str,
    channel: PipelineCommunicator,
    schedule: Schedule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    needs_target: bool,
) -> Work:
    """The inputs of this rank's stages, cut."""
    if mode == "step" and torch.is_inference_mode_enabled():
        raise UnsupportedError(
            "step: torch.inference_mode is on, in which nothing has a gradient: call step outside of it "
            "(eval and forward need no gradients)"
        )
    if mode == "step" and not schedule.trains:
        raise UnsupportedError(
            f"step: {schedule.name} has no backward; use eval or forward, or a schedule that trains"
        )
    count = schedule.micro_batches
    first, last = 0 in channel.my_stages, channel.stages - 1 in channel.my_stages
    if first and not args and not kwargs:
        raise UnsupportedError(
            f"{mode}: rank {channel.rank} has stage 0 and got no batch; pass it on this rank at least"
        )
    if last and needs_target and target is None:
        raise UnsupportedError(
            f"{mode}: rank {channel.rank} has the last stage and got no target=, which loss_fn(output, "
            "target) needs; without one, pass MicroBatches([None] * micro_batches)"
        )
    rows: dict[str, int | None] = {}
    if first:
        rows["batch"] = rows_of(args)
    rows["keyword arguments"] = rows_of(kwargs, "keyword arguments")
    if last:
        rows["target"] = rows_of(target, "target")
    return Work(
        schedule,
        cut(args, count) if first else [],
        cut(kwargs, count, "keyword arguments"),
        cut(target, count, "target") if last else [],
        rows,
    )


def check_rows(found: Sequence[dict[str, int | None]]) -> None:
    """Refuse parts of one batch that are cut differently: row k of each belongs to row k of the others.

    Args:
        found: `Work.rows` of every rank.
    """
    told = [
        (rows, f"the {what} on rank {rank}")
        for rank, parts in enumerate(found)
        for what, rows in parts.items()
        if rows is not None
    ]
    for rows, where in told[1:]:
        if rows != told[0][0]:
            raise ShapeError(
                f"{told[0][0]} rows in {told[0][1]}, {rows} in {where}: what belongs together is cut alike "
                "along its first dimension (MicroBatches([...]) are cut by you, Whole(value) is not cut)"
            )
