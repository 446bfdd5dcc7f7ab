"""Schedules as data: which rank runs which part of the work of which micro-batch, in which order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from tp_kernels.comm.errors import TpKernelsError

if TYPE_CHECKING:
    from .simulate import Costs
    from .timeline import Timeline


class ScheduleError(TpKernelsError):
    """A schedule that cannot run, or would compute something else.

    `rank`, `step` and `action` say where; `step` and `action` are None where something is missing as a whole.
    """

    def __init__(
        self, what: str, rank: int | None = None, step: int | None = None, action: object = None
    ) -> None:
        self.rank, self.step, self.action = rank, step, action
        place = [f"rank {rank}"] if rank is not None else []
        place += [f"step {step}"] if step is not None else []
        place += [str(action)] if action is not None else []
        super().__init__(f"{', '.join(place)}: {what}" if place else what)


class Kind(StrEnum):
    """What an action does; the values are those of torch.distributed.pipelining's tables."""

    F = "F"  # forward
    I = "I"  # noqa: E741  # backward: gradient of the stage's input
    W = "W"  # backward: gradients of the stage's parameters
    B = "B"  # I and W in one go
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    OVERLAP_F_B = "OVERLAP_F_B"  # a forward and a backward of two stages of one rank, side by side


COMPUTE = frozenset({Kind.F, Kind.I, Kind.W, Kind.B})
# What an action adds to the activations that its stage keeps; the last part of a backward frees them.
KEEPS = {Kind.F: 1, Kind.W: -1, Kind.B: -1}
# Cells of torch's tables that tell FSDP when to move parameters and gradients.
_OF_FSDP = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|I|W|B)(\d+)")
_OVERLAP = re.compile(r"\((.+)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One cell of a schedule. `str()` is torch's notation: stage, kind, micro-batch, such as 2F0 or 1SEND_B3.

    An OVERLAP_F_B has stage -1 and no micro-batch of its own; what it does is in `parts`.
    """

    stage: int
    kind: Kind
    micro_batch: int | None = None
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.micro_batch is None else self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of `str()`; ScheduleError if `text` is not an action."""
        if found := _OVERLAP.fullmatch(text.strip()):
            return overlap(*map(cls.parse, found[1].split(";")))
        found = _ACTION.fullmatch(text.strip())
        if not found:
            raise ScheduleError(f"{text!r} is not an action: write stage, kind, micro-batch: 2F0")
        return cls(int(found[1]), Kind(found[2]), int(found[3]))

    def unpacked(self) -> tuple[Action, ...]:
        """The parts of an overlapped pair in their order, or the action itself."""
        return self.parts or (self,)


def overlap(*parts: Action) -> Action:
    """The action that runs `parts` side by side."""
    return Action(-1, Kind.OVERLAP_F_B, None, parts)


Row = tuple[Action | None, ...]


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, as a table of cells: `actions[rank][step]`, None where the rank is idle.

    A step is a unit of time in which every action ends, so the table is what papers draw; ranks are not
    in step when it runs: only the order on each rank and the messages between stages hold. Nothing is
    checked here: `validate` does.
    """

    name: str
    ranks: int
    stages: int
    micro_batches: int
    stage_to_rank: tuple[int, ...]
    actions: tuple[Row, ...]
    flush: bool = True  # False: parameters are updated after every micro-batch (PipeDream)

    def order(self, rank: int) -> tuple[Action, ...]:
        """What `rank` computes, in order: no idle cells, no messages, overlapped pairs unpacked."""
        return self._orders[rank]

    @cached_property
    def _orders(self) -> tuple[tuple[Action, ...], ...]:
        return tuple(
            tuple(part for _, part in self.steps(rank) if part.kind in COMPUTE)
            for rank in range(len(self.actions))
        )

    def steps(self, rank: int) -> Iterator[tuple[int, Action]]:
        """(step, action) of `rank`, idle cells left out, overlapped pairs unpacked."""
        for step, cell in enumerate(self.actions[rank]):
            for part in cell.unpacked() if cell else ():
                yield step, part

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on `rank`, first to last."""
        return tuple(s for s, owner in enumerate(self.stage_to_rank) if owner == rank)

    @cached_property
    def splits(self) -> bool:
        """Whether some backward is in two parts, I and W."""
        return any(action.kind is Kind.I for order in self._orders for action in order)

    @cached_property
    def trains(self) -> bool:
        """Whether there is any backward."""
        return any(action.kind is not Kind.F for order in self._orders for action in order)

    @cached_property
    def communicates(self) -> bool:
        """Whether sends and receives are cells of the table; else they are implied by the computation."""
        return any(
            part.kind not in COMPUTE
            for rank in range(len(self.actions))
            for _, part in self.steps(rank)
        )

    def with_communication(self) -> Schedule:
        """This schedule with a cell for every message.

        A send follows its computation. A receive stands where the sender sends, as in torch: all ranks
        agree on one order of messages, so even sends that wait for their receive cannot deadlock.
        """
        from .communicate import with_communication

        return with_communication(self)

    def validate(self, credits: int | None = None, memory: int | None = None) -> Schedule:
        """This schedule, if it can run; ScheduleError with rank, step and action if not.

        Every forward and backward happens once, on its rank, in an order that the data allows; no rank waits
        forever when a stage boundary holds up to `credits` messages per direction (None: any number; 0: a
        send waits for its receive); no rank keeps more than `memory` activations (one of each micro-batch
        and stage whose forward ran and whose backward has not ended).
        """
        from .validate import validate

        validate(self, credits=credits, memory=memory)
        return self

    def simulate(self, costs: Costs | None = None) -> Timeline:
        """When everything happens if actions take as long as `costs` says (default: one second each)."""
        from .simulate import Costs, simulate

        return simulate(self, costs or Costs())

    def to_csv(self) -> str:
        """One line per rank, one field per step, in torch's notation; idle cells are empty."""
        return "".join(
            ",".join("" if cell is None else str(cell) for cell in row) + "\n"
            for row in self.actions
        )

    @classmethod
    def from_csv(
        cls,
        text: str,
        *,
        name: str = "csv",
        stage_to_rank: Sequence[int] | None = None,
        flush: bool = True,
    ) -> Schedule:
        """The schedule of a table as `to_csv` or torch's `_dump_csv` writes it.

        Stages are placed where the table computes them unless `stage_to_rank` says so. Cells that tell
        torch's FSDP when to move parameters are left out. ScheduleError names a cell that is no action.
        """
        rows: list[Row] = []
        for rank, line in enumerate(text.strip("\n").split("\n")):
            row: list[Action | None] = []
            for step, field in enumerate(map(str.strip, line.split(","))):
                if _OF_FSDP.fullmatch(field):
                    continue
                try:
                    row.append(Action.parse(field) if field else None)
                except ScheduleError as error:
                    raise ScheduleError(str(error), rank, step) from None
            rows.append(tuple(row))
        found = [
            (part, rank)
            for rank, row in enumerate(rows)
            for cell in row
            if cell is not None
            for part in cell.unpacked()
            if part.kind in COMPUTE
        ]
        if not found:
            raise ScheduleError("the table computes nothing")
        owners = {part.stage: rank for part, rank in found}
        stages = max(owners) + 1
        if stage_to_rank is None:
            if missing := set(range(stages)) - set(owners):
                raise ScheduleError(f"no rank computes stage {min(missing)}")
            stage_to_rank = [owners[stage] for stage in range(stages)]
        return cls(
            name,
            len(rows),
            len(stage_to_rank),
            max(part.micro_batch or 0 for part, _ in found) + 1,
            tuple(stage_to_rank),
            tuple(rows),
            flush,
        )

    def __str__(self) -> str:
        """The table: a line per rank, a column per step, in blocks of at most 100 characters."""
        cells = [["." if cell is None else str(cell) for cell in row] for row in self.actions]
        width = max((len(cell) for row in cells for cell in row), default=1)
        label = len(f"rank {self.ranks - 1}")
        columns = max(1, (100 - label) // (width + 1))
        steps = max(map(len, cells), default=0)
        blocks = []
        for start in range(0, steps, columns):
            block = range(start, min(start + columns, steps))
            lines = [" ".join([" " * label, *(f"{step:<{width}}" for step in block)])]
            for rank, row in enumerate(cells):
                shown = row[start : block.stop]
                lines.append(
                    " ".join([f"{f'rank {rank}':<{label}}", *(f"{c:<{width}}" for c in shown)])
                )
            blocks.append("\n".join(line.rstrip() for line in lines))
        title = f"{self.name}: {self.ranks} ranks, {self.stages} stages, {self.micro_batches} micro-batches"
        return "\n\n".join([title, *blocks])

    def renamed(self, name: str) -> Schedule:
        """The same schedule under another name."""
        return replace(self, name=name)


def sources(action: Action, stages: int) -> tuple[Action, ...]:
    """The actions of a neighbouring stage, any one of which brings what `action` needs; () if none does.

    A forward needs the forward of the stage before, a backward that of the stage after; either kind of
    backward brings the gradient.
    """
    stage, kind, micro_batch = action.stage, action.kind, action.micro_batch
    if kind is Kind.F and stage > 0:
        return (Action(stage - 1, Kind.F, micro_batch),)
    if kind in (Kind.B, Kind.I) and stage < stages - 1:
        return Action(stage + 1, Kind.B, micro_batch), Action(stage + 1, Kind.I, micro_batch)
    return ()


def lay_out(
    name: str,
    orders: Mapping[int, Sequence[Action]] | Sequence[Sequence[Action]],
    stage_to_rank: Sequence[int],
    micro_batches: int,
    *,
    flush: bool = True,
) -> Schedule:
    """The schedule of `orders`, every action at the first step at which its inputs are there.

    An order that can never run is laid out as it stands from where it gets stuck, so that `validate` can
    name the cell.
    """
    ranks, stages = len(orders), len(stage_to_rank)
    rows: list[list[Action | None]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    heads = [0] * ranks
    while any(heads[rank] < len(orders[rank]) for rank in range(ranks)):
        ended: list[Action] = []
        stuck = True
        for rank in range(ranks):
            cell = orders[rank][heads[rank]] if heads[rank] < len(orders[rank]) else None
            if cell is not None and _ready(cell, done, stages):
                heads[rank] += 1
                ended += cell.unpacked()
                stuck = False
            else:
                cell = None
            rows[rank].append(cell)
        done.update(ended)
        if stuck:
            for rank in range(ranks):
                rows[rank][-1:] = orders[rank][heads[rank] :]
            break
    length = max(map(len, rows))
    return Schedule(
        name,
        ranks,
        stages,
        micro_batches,
        tuple(stage_to_rank),
        tuple((*row, *[None] * (length - len(row))) for row in rows),
        flush,
    )


def _ready(cell: Action, done: set[Action], stages: int) -> bool:
    needs = [sources(part, stages) for part in cell.unpacked()]
    return all(not need or any(source in done for source in need) for need in needs)
