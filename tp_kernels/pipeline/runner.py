"""PipelineRunner: runs any schedule on the stages of this rank, for training, evaluation and inference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from tp_kernels.comm.errors import (
    CollectiveTimeoutError,
    GroupMismatchError,
    PeerLostError,
    UnsupportedError,
)
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.objects import all_gather_object
from tp_kernels.layers.gradients import finalize_gradients
from tp_kernels.layers.placement import placements
from tp_kernels.layers.random import RandomStreams

from . import gradients, scaling
from .agreement import agree, from_last
from .communicator import PipelineCommunicator
from .gradients import SetAside, sum_over_replicas
from .micro_batches import join
from .preparation import Schedules, Work, check_room, check_rows, make_stages, prepare
from .scaling import Losses, loss_of
from .schedule import Action, Kind, Schedule
from .stage import PipelineError, Stage
from .tied import Tie, TiedWeights
from .timeline import Recorder

T = TypeVar("T")

_DOING = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward (input gradient)",
    Kind.W: "backward (weight gradients)",
}


class PipelineRunner:
    """Runs a schedule on the stages of this rank. Made, and called, by all ranks of the pipeline alike.

    Construction is collective: it raises on all ranks if one cannot (PipelineError), or if they disagree
    about `scale`, `tied` or `checkpoint`, or weights that are tied differ (GroupMismatchError).

    The value of a stage is the input of the next: a tuple as positional arguments, a dict as keyword
    arguments, anything else as one argument. Tensors, None, numbers and strings travel; gradients come back
    for the tensors that require one.

    Args:
        stages: the module of this rank's stage, or those of its stages in their order.
        schedule: a name in SCHEDULES or a function of the number of micro-batches, called for every
            number that occurs, or a Schedule, which has one number.
        channel: between the ranks; its `stage_to_rank` is that of the schedule.
        loss_fn: loss_fn(output, target) -> tensor of one element, on the rank of the last stage. None: the
            output of the last stage is the loss, and `target`, if given, is its keyword argument.
        micro_batches: of a call that does not say.
        scale: what the gradient is of. "micro_batch": the mean of the losses of micro-batches. "token": their
            sum divided by the number of tokens, exact for micro-batches of any sizes; loss_fn returns a sum
            over tokens. "sum": their sum.
        count: count(target of a micro-batch) -> its number of tokens, for scale="token". Default: elements
            of an integer tensor that are not -100.
        tied: weights that several stages hold, each as ((stage, parameter name), ...), the same on all ranks.
        data_parallel: ranks that hold the same stages and get other batches. Means are over all of them.
        checkpoint: stages (True: all) that compute their forward again in the backward and keep their
            inputs only. Buffers that a forward changes (of BatchNorm) change twice then.
        streams: random streams of checkpointed stages, whose dropout is replayed.
        recorder: of what is computed when. Default: that of the channel.
        optimizer: of this rank's parameters, for schedules that update them after every micro-batch
            ("pipedream"); others leave `optimizer.step()` to the caller, after `step`, when all gradients
            are there.

    A step leaves complete gradients in the parameters, added to those that were there: summed over tied
    weights, over replicas, and where tensor-parallel ranks hold parts (`finalize_gradients`). Equal to one
    process that accumulates micro-batch by micro-batch, in fp64 with the same bits where the schedule runs
    the backwards of a stage in order.

    An overlapped pair of a schedule runs one after the other. Schedules without a bubble end with a flush
    like others: they do not begin the next step before the optimizer, and validate nothing afterwards.

    Errors of a stage or of the channel are for good: all ranks raise, and so does every later call.
    """

    def __init__(
        self,
        stages: nn.Module | Sequence[nn.Module],
        schedule: Schedule | str | Callable[[int], Schedule],
        channel: PipelineCommunicator,
        loss_fn: Callable[..., Tensor] | None = None,
        *,
        micro_batches: int | None = None,
        scale: str = "micro_batch",
        count: Callable[[Any], int] | None = None,
        tied: Iterable[Tie] = (),
        data_parallel: ParallelGroup | None = None,
        checkpoint: bool | Collection[int] = False,
        streams: RandomStreams | None = None,
        recorder: Recorder | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.channel, self.loss_fn, self.scale = channel, loss_fn, scale
        self.micro_batches, self.optimizer = micro_batches, optimizer
        self.recorder = recorder if recorder is not None else channel.recorder
        self._count = count or scaling.count_tokens
        self._data = data_parallel if data_parallel is not None and data_parallel.size > 1 else None
        self._broken = ""  # why nothing more is possible
        self._doing = ""  # for errors
        call = "PipelineRunner"
        described: dict[str, list[object]] = {}
        problem: Exception | None = None
        try:
            call, described = self._set_up(stages, schedule, count, tied, checkpoint, streams)
        except Exception as error:  # raised once the others know
            problem = error
        agree(call, described, channel, self._data, problem, lambda f: self._tied.check_equal(f))

    def _set_up(
        self,
        stages: nn.Module | Sequence[nn.Module],
        schedule: Schedule | str | Callable[[int], Schedule],
        count: Callable[[Any], int] | None,
        tied: Iterable[Tie],
        checkpoint: bool | Collection[int],
        streams: RandomStreams | None,
    ) -> tuple[str, dict[str, list[object]]]:
        """What has to be the same on all ranks, and what this rank's tied weights are."""
        scaling.check(self.scale, count)
        channel, optimizer = self.channel, self.optimizer
        self._schedules = Schedules(schedule, channel, optimizer is not None)
        chosen = set(range(channel.stages) if checkpoint is True else checkpoint or ())
        measured = self.recorder is not None
        self._stages = make_stages(
            stages, channel, self.loss_fn, optimizer, chosen, streams, measured
        )
        modules = {index: stage.module for index, stage in self._stages.items()}
        self._tied = TiedWeights(tied, modules, channel)
        if self._tied and optimizer is not None:
            raise UnsupportedError(
                "tied weights change together, after a flush; a schedule that updates every stage after "
                "every micro-batch (pipedream) cannot keep them equal: use one_f_one_b, or untie them"
            )
        self._placements = [
            (parameter, placement)
            for module in modules.values()
            for _, parameter, placement in placements(module)
        ]
        call = (
            f"PipelineRunner(scale={self.scale!r}, tied={self._tied}, checkpoint={sorted(chosen)})"
        )
        return call, self._tied.described()

    def step(
        self, *args: Any, target: Any = None, micro_batches: int | None = None, **kwargs: Any
    ) -> Losses:
        """Losses and gradients of one batch, which is cut along the first dimension (see `cut`).

        Args:
            args: input of the first stage; looked at on its rank only.
            target: looked at on the rank of the last stage only.
            micro_batches: into how many; default: as constructed.
            kwargs: keyword arguments of every stage of this rank.

        Raises:
            ShapeError, UnsupportedError: a batch that cannot be cut, a missing target, inference mode. The
                other ranks raise PipelineError, and all can go on with another call.
            ShapeError, on all ranks: batch and target of different numbers of rows. Likewise.
            GroupMismatchError: ranks that make other calls, or with other schedules or numbers of
                micro-batches. Likewise.
            PipelineError: a stage raised. PeerLostError, CollectiveTimeoutError: a rank is gone, failed, or
                late. The runner and its channel are of no more use.
        """
        work, factors = self._begin("step", args, kwargs, target, micro_batches)
        return self._guarded(self._step, work, factors)

    def eval(
        self, *args: Any, target: Any = None, micro_batches: int | None = None, **kwargs: Any
    ) -> Losses:
        """Losses as of `step`, no gradients. Modules are not switched to `eval()`."""
        work, factors = self._begin("eval", args, kwargs, target, micro_batches)
        losses = self._guarded(self._forwards, work, partial(loss_of, self.loss_fn))
        return self._guarded(self._tell, losses, work, factors)

    def forward(
        self,
        *args: Any,
        micro_batches: int | None = None,
        broadcast: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Outputs of the last stage, joined (see `join`), on its rank or on all (`broadcast`), else None."""
        told = f", broadcast={bool(broadcast)}"
        work, _ = self._begin("forward", args, kwargs, None, micro_batches, told)
        outputs = self._guarded(self._forwards, work, lambda output, target: output)
        return self._guarded(self._joined, outputs, broadcast)

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients so that their norm over all stages is at most `max_norm`. Collective.

        Every element of the unsplit model counts once: tied weights, what tensor-parallel ranks share.
        Returns the norm before, float64 [], the same bits on all ranks of the pipeline.
        """
        return gradients.clip_grad_norm_(
            [stage.module for stage in self._stages.values()],
            max_norm,
            self.channel.group,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
            counted_elsewhere=self._tied.counted_elsewhere(),
        )

    def explain(self) -> str:
        """What is checkpointed, and which weight gradients a split backward puts off, by stage of this rank.

        Of other modules than those with `delay_wgrad=True`, known after the first step that splits.
        """
        lines = []
        for index, stage in self._stages.items():
            how = "checkpointed" if stage.checkpointed else "keeps its activations"
            stashed = ", stashes weights" if stage.stash is not None else ""
            lines.append(f"stage {index} on rank {self.channel.rank}: {how}{stashed}")
            lines += [f"  {line}" for line in stage.split.explain()]
        return "\n".join(lines)

    def _begin(
        self,
        mode: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        micro_batches: int | None,
        settings: str = "",
    ) -> tuple[Work, list[float]]:
        """What to do, and the factor of every loss, once all ranks agree."""
        if self._broken:
            raise PipelineError(
                f"{mode}: this runner is of no more use since {self._broken}; make new groups, channel and "
                "runner, and load the last checkpoint"
            )
        asked = self.micro_batches if micro_batches is None else micro_batches
        fingerprint, count = 0, asked or 0
        tokens: list[int] = []
        problem: Exception | None = None
        work: Work | None = None
        rows: dict[str, int | None] = {}
        needs_target = mode != "forward" and self.loss_fn is not None
        try:
            schedule, fingerprint = self._schedules.get(asked)
            count = schedule.micro_batches
            work = prepare(mode, self.channel, schedule, args, kwargs, target, needs_target)
            rows = work.rows
            if self.scale == "token" and mode != "forward":
                tokens = [int(self._count(each)) for each in work.targets]
        except Exception as error:  # raised once the others know
            problem = error
        call = (
            f"{mode} with {count} micro-batches of a schedule of digest {fingerprint:08x}{settings}"
        )

        def settle(found: list[Any]) -> list[int]:
            check_rows([rows for rows, _ in found])
            return next((tokens for _, tokens in found if tokens), [0] * count)

        try:
            replicas = agree(call, (rows, tokens), self.channel, self._data, problem, settle)
        except (PeerLostError, CollectiveTimeoutError) as error:
            self._doing = f"agreement about {mode}"
            self._fail(error)
        assert work is not None
        tokens = [sum(counts) for counts in zip(*replicas, strict=True)]
        flush = work.schedule.flush
        return work, scaling.factors(self.scale, count, len(replicas), tokens, flush)

    def _order(self, work: Work) -> tuple[Action, ...]:
        return work.schedule.order(self.channel.rank)

    def _step(self, work: Work, factors: list[float]) -> Losses:
        self._doing = "gradients before the step"
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        aside = SetAside(self._shared_parameters())
        split = {(a.stage, a.micro_batch) for a in self._order(work) if a.kind is Kind.I}
        losses: dict[int, Tensor] = {}
        with torch.enable_grad():
            for action in self._order(work):
                self._doing = _name(action)
                at = action.stage, action.micro_batch
                self._do(action, work, factors, at in split, losses)
        self._doing = "gradients of all stages"
        self._finish(work, aside)
        return self._tell(losses, work, factors)

    def _do(
        self,
        action: Action,
        work: Work,
        factors: list[float],
        split: bool,
        losses: dict[int, Tensor],
    ) -> None:
        """One action of a step, with its messages."""
        index, kind, k = action.stage, action.kind, action.micro_batch
        assert k is not None
        stage, last = self._stages[index], self.channel.stages - 1
        if kind is Kind.F:
            received, args, kwargs = self._inputs(index, k, work)
            after = None
            if index == last:
                after = partial(loss_of, self.loss_fn, target=work.targets[k])
            start = perf_counter()
            output = stage.forward(k, args, kwargs, split=split, received=received, after=after)
            self._record(action, start)
            if index == last:
                if not output.requires_grad and stage.trains(received):
                    raise PipelineError(
                        "the loss requires no gradient, though parameters or inputs of the last stage do: "
                        "was it detached, or computed under no_grad or inference_mode?"
                    )
                losses[k] = output.detach()
            else:
                self._check_room(output, index, index + 1)
                self.channel.send_forward(output, micro_batch=k, stage=index)
            return
        if kind is Kind.W:
            start = perf_counter()
            stage.weight_gradients(k)
            self._record(action, start)
            self.channel.progress()  # nothing of this rank moves while it computes
            return
        incoming: list[Tensor | None] = []
        if stage.wants_gradients(k):
            if index == last:
                incoming = [torch.full_like(losses[k], factors[k])]
            else:
                incoming = self.channel.recv_backward(micro_batch=k, stage=index)
        start = perf_counter()
        outgoing = stage.backward(k, incoming, split=split, whole=kind is Kind.B)
        self._record(action, start)
        if outgoing is not None and index > 0:
            self._check_room(outgoing, index, index - 1)
            self.channel.send_backward(outgoing, micro_batch=k, stage=index)
        if not work.schedule.flush:
            self._update(stage)

    def _forwards(self, work: Work, after: Callable[[Any, Any], Any]) -> dict[int, Any]:
        """The forwards of a schedule alone; what `after` makes of the last outputs, by micro-batch."""
        results: dict[int, Any] = {}
        with torch.no_grad():
            for action in self._order(work):
                if action.kind is Kind.F:
                    self._doing = _name(action)
                    self._do_forward(action, work, after, results)
        return results

    def _do_forward(
        self,
        action: Action,
        work: Work,
        after: Callable[[Any, Any], Any],
        results: dict[int, Any],
    ) -> None:
        index, k = action.stage, action.micro_batch
        assert k is not None
        _, args, kwargs = self._inputs(index, k, work)
        start = perf_counter()
        output = self._stages[index].module(*args, **kwargs)
        if index == self.channel.stages - 1:
            results[k] = after(output, work.targets[k])
            self._record(action, start)
        else:
            self._record(action, start)
            self._check_room(output, index, index + 1)
            self.channel.send_forward(output, micro_batch=k, stage=index)

    def _check_room(self, value: Any, stage: int, other: int) -> None:
        if any(place.group.size > 1 for _, place in self._placements):
            check_room(self.channel, value, stage, other)

    def _inputs(self, index: int, k: int, work: Work) -> tuple[Any, Sequence[Any], dict[str, Any]]:
        """Received value, positional and keyword arguments of a stage."""
        received = (
            work.args[k] if index == 0 else self.channel.recv_forward(micro_batch=k, stage=index)
        )
        kwargs = dict(work.kwargs[k])
        loss_inside = index == self.channel.stages - 1 and self.loss_fn is None
        if loss_inside and work.targets[k] is not None:
            kwargs["target"] = work.targets[k]
        if isinstance(received, dict):
            twice = received.keys() & kwargs.keys()
            if twice:
                raise PipelineError(
                    f"{sorted(twice)} come from the stage before and as keyword arguments"
                )
            return received, (), {**received, **kwargs}
        args = received if isinstance(received, tuple) else (received,)
        return () if index == 0 else received, args, kwargs

    def _shared_parameters(self) -> list[nn.Parameter]:
        """Those whose gradients are summed over ranks, each once."""
        found = self._parameters() if self._data is not None else self._tied.parameters()
        found = found + [p for p, placement in self._placements if placement.needs_reduction]
        return list({id(p): p for p in found}.values())

    def _parameters(self) -> list[nn.Parameter]:
        modules = [stage.module for stage in self._stages.values()]
        unique = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
        return list(unique.values())

    def _finish(self, work: Work, aside: SetAside) -> None:
        """What gradients lack when all backwards have run."""
        self.channel.flush()
        if work.schedule.flush:
            for stage in self._stages.values():
                finalize_gradients(stage.module)
            self._tied.sum_gradients()
            if self._data is not None:
                sum_over_replicas(self._parameters(), self._data)
        aside.put_back()

    def _update(self, stage: Stage) -> None:
        """Of a schedule without flush: new weights, of the gradients of one micro-batch."""
        assert self.optimizer is not None and stage.stash is not None
        start = perf_counter()
        finalize_gradients(stage.module)
        if self._data is not None:
            sum_over_replicas(self._parameters(), self._data)
        stage.stash.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.recorder is not None:
            self.recorder.record("OPT", stage.index, None, start, perf_counter())

    def _tell(self, losses: dict[int, Tensor], work: Work, factors: list[float]) -> Losses:
        """The losses of all micro-batches, from the rank that has them to all."""
        self._doing = "losses"
        told: Any = None
        if losses:
            each = [float(losses[k]) for k in range(work.micro_batches)]
            total = sum(loss * factor for loss, factor in zip(each, factors, strict=True))
            total = total if work.schedule.flush else total / work.micro_batches
            if self._data is not None:
                self.channel.flush()
                total = sum(all_gather_object(total, self._data))
            told = total, tuple(each)
        return Losses(*from_last(self.channel, told, "losses"))

    def _joined(self, outputs: dict[int, Any], broadcast: bool) -> Any:
        self._doing = "outputs"
        result = join([outputs[k] for k in sorted(outputs)]) if outputs else None
        if broadcast:
            return from_last(self.channel, result, "outputs")
        self.channel.flush()
        return result

    def _record(self, action: Action, start: float) -> None:
        if self.recorder is not None:
            at = action.stage, action.micro_batch
            self.recorder.record(action.kind, *at, start, perf_counter())
            kept = self._stages[action.stage].kept_bytes
            self.recorder.memory(action.stage, sum(kept.values()))

    def _guarded(self, function: Callable[..., T], *args: Any) -> T:
        try:
            return function(*args)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> NoReturn:
        """Tell everyone who may wait for this rank, and raise what says where it happened."""
        what = f"{self._doing} on rank {self.channel.rank}"
        reason = f"{what}: {type(error).__name__}: {error}"
        self._broken = reason
        for stage in self._stages.values():
            stage.clear()
        self.channel.fail(reason)  # and its group
        places = {id(place.group): place.group for _, place in self._placements}
        for group in (self._data, *places.values()):
            if group is not None:
                group.fail(reason)
        if not isinstance(error, Exception):
            raise error
        known = (PeerLostError, CollectiveTimeoutError, GroupMismatchError)
        kind = type(error) if type(error) in known else PipelineError
        raise kind(reason if kind is PipelineError else f"{what}: {error}") from error


def _name(action: Action) -> str:
    return f"{_DOING[action.kind]} of micro-batch {action.micro_batch} in stage {action.stage}"
