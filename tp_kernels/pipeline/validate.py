"""Whether a schedule can run, and computes every micro-batch once; the cell at fault is named if not."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from tp_kernels.comm.errors import ShapeError

from .communicate import message_of
from .schedule import COMPUTE, KEEPS, Action, Kind, Schedule, ScheduleError, sources

_SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
_BACKWARDS = frozenset({Kind.B, Kind.I, Kind.W})
_EARLIER = {Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}  # of the same stage and micro-batch
_SAME_WORK = {Kind.B: (Kind.B, Kind.I, Kind.W), Kind.I: (Kind.I, Kind.B), Kind.W: (Kind.W, Kind.B)}


def validate(schedule: Schedule, *, credits: int | None = None, memory: int | None = None) -> None:
    """Raise ScheduleError unless `schedule` can run; `Schedule.validate` says what is checked."""
    if (credits is not None and credits < 0) or (memory is not None and memory < 1):
        raise ShapeError(f"credits is {credits}, memory is {memory}: use at least 0 and 1")
    _check_table(schedule)
    where = _check_cells(schedule)
    _check_complete(schedule, where)
    _check_local_order(schedule, where)
    _check_overlaps(schedule)
    if schedule.communicates:
        _check_messages(schedule, where)
    _Run(schedule, credits).to_the_end()
    if memory is not None:
        _check_memory(schedule, memory)


def _check_table(schedule: Schedule) -> None:
    if schedule.micro_batches < 1:
        raise ScheduleError(f"{schedule.micro_batches} micro-batches: there is nothing to do")
    if len(schedule.actions) != schedule.ranks:
        raise ScheduleError(f"{len(schedule.actions)} rows of actions for {schedule.ranks} ranks")
    if len(schedule.stage_to_rank) != schedule.stages:
        raise ScheduleError(f"{len(schedule.stage_to_rank)} stages are placed of {schedule.stages}")
    for stage, rank in enumerate(schedule.stage_to_rank):
        if not 0 <= rank < schedule.ranks:
            raise ScheduleError(f"stage {stage} is placed on rank {rank} of {schedule.ranks}")


class _Place(NamedTuple):
    rank: int
    at: int  # counts the actions of the rank: parts of one cell have one step and differ in this
    step: int


def _check_cells(schedule: Schedule) -> dict[Action, _Place]:
    """Where every action is; each exists, is on its rank, and is there once."""
    where: dict[Action, _Place] = {}
    for rank in range(schedule.ranks):
        for at, (step, action) in enumerate(schedule.steps(rank)):
            stage, kind, k, _ = action
            if kind is Kind.OVERLAP_F_B:
                raise ScheduleError("an overlapped pair without parts", rank, step, action)
            if not 0 <= stage < schedule.stages:
                raise ScheduleError(f"there are {schedule.stages} stages", rank, step, action)
            if k is None or not 0 <= k < schedule.micro_batches:
                what = f"there are {schedule.micro_batches} micro-batches"
                raise ScheduleError(what, rank, step, action)
            if (owner := schedule.stage_to_rank[stage]) != rank:
                raise ScheduleError(f"stage {stage} is on rank {owner}", rank, step, action)
            for twin in (Action(stage, same, k) for same in _SAME_WORK.get(kind, (kind,))):
                if twin in where:
                    first = where[twin].step
                    what = f"happens twice: {twin} is at step {first} already"
                    raise ScheduleError(what, rank, step, action)
            where[action] = _Place(rank, at, step)
    return where


def _check_complete(schedule: Schedule, where: dict[Action, _Place]) -> None:
    for stage, rank in enumerate(schedule.stage_to_rank):
        for k in range(schedule.micro_batches):
            has = {kind for kind in (Kind.F, *_BACKWARDS) if Action(stage, kind, k) in where}
            missing = {Kind.F} - has
            if schedule.trains and Kind.B not in has:
                missing |= {Kind.I, Kind.W} - has if has & {Kind.I, Kind.W} else {Kind.B}
            if missing:
                action = Action(stage, min(missing), k)
                raise ScheduleError("is missing", rank, action=action)


def _check_local_order(schedule: Schedule, where: dict[Action, _Place]) -> None:
    for action, place in where.items():
        if action.kind not in _EARLIER:
            continue
        first = Action(action.stage, _EARLIER[action.kind], action.micro_batch)
        if where[first].at > place.at:
            what = f"comes before {first}, which is at step {where[first].step}"
            raise ScheduleError(what, place.rank, place.step, action)


def _check_overlaps(schedule: Schedule) -> None:
    """Parts that run side by side cannot wait for each other."""
    for rank, row in enumerate(schedule.actions):
        for step, cell in enumerate(row):
            if cell is None or not cell.parts:
                continue
            for part in cell.parts:
                needs = [*sources(part, schedule.stages)]
                if part.kind in _EARLIER:
                    needs.append(part._replace(kind=_EARLIER[part.kind]))
                if found := [need for need in needs if need in cell.parts]:
                    raise ScheduleError(
                        f"{part} needs {found[0]}, which runs beside it", rank, step, cell
                    )


def _check_messages(schedule: Schedule, where: dict[Action, _Place]) -> None:
    """Sends follow what they send, receives precede what they bring, and none is missing or too many."""
    wanted: set[Action] = set()
    for action, place in list(where.items()):
        if (pair := message_of(action, schedule)) is None:
            continue
        send, receive = pair
        target = schedule.stage_to_rank[receive.stage]
        kinds = (Kind.F,) if action.kind is Kind.F else (Kind.B, Kind.I)
        user = next(a for kind in kinds if (a := receive._replace(kind=kind)) in where)
        for message, rank in ((send, place.rank), (receive, target)):
            if message not in where:
                raise ScheduleError(f"is missing: {user} needs it", rank, action=message)
        if where[send].at < place.at:
            what = f"comes before {action}, which is at step {place.step}"
            raise ScheduleError(what, place.rank, where[send].step, send)
        if where[receive].at > where[user].at:
            what = f"comes before {receive}, which is at step {where[receive].step}"
            raise ScheduleError(what, target, where[user].step, user)
        wanted |= {send, receive}
    for action, place in where.items():
        if action.kind not in COMPUTE and action not in wanted:
            what = "no other rank takes part in this message"
            raise ScheduleError(what, place.rank, place.step, action)


class _Step(NamedTuple):
    step: int
    cell: Action  # as it stands in the table
    action: Action  # what is done: the cell, or a message that it implies


class _Run:
    """Runs all ranks as far as they come, with messages and their credits but without time."""

    def __init__(self, schedule: Schedule, credits: int | None) -> None:
        self.schedule, self.credits = schedule, credits
        self.orders = [self._steps(rank) for rank in range(schedule.ranks)]
        self.heads = [0] * schedule.ranks
        self.done: set[Action] = set()
        self.in_flight: Counter[tuple[int, Kind]] = Counter()

    def _steps(self, rank: int) -> list[_Step]:
        """What `rank` does; a receive right before its use and a send right after, where they are implied."""
        found: list[_Step] = []
        for step, cell in self.schedule.steps(rank):
            if self.schedule.communicates:
                found.append(_Step(step, cell, cell))
                continue
            needs = sources(cell, self.schedule.stages)
            if needs and self.schedule.stage_to_rank[needs[0].stage] != rank:
                kind = Kind.RECV_F if cell.kind is Kind.F else Kind.RECV_B
                found.append(_Step(step, cell, Action(cell.stage, kind, cell.micro_batch)))
            found.append(_Step(step, cell, cell))
            if pair := message_of(cell, self.schedule):
                found.append(_Step(step, cell, pair[0]))
        return found

    def to_the_end(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(self.orders):
                while self.heads[rank] < len(order) and self._do(
                    order[self.heads[rank]].action, rank
                ):
                    self.heads[rank] += 1
                    moved = True
        stuck = [rank for rank, order in enumerate(self.orders) if self.heads[rank] < len(order)]
        if stuck:
            raise self._deadlock(stuck[0])

    def _head(self, rank: int) -> _Step | None:
        order = self.orders[rank]
        return order[self.heads[rank]] if self.heads[rank] < len(order) else None

    def _do(self, action: Action, rank: int) -> bool:
        """Whether `action` could be done; then it is."""
        if action in self.done:  # a send that its receiver took from this rank
            return True
        if action.kind in _SENDS:
            if self.credits == 0:
                return False
            if self.credits is not None and self.in_flight[_lane(action)] >= self.credits:
                return False
            self.in_flight[_lane(action)] += 1
        elif action.kind not in COMPUTE:
            send = _send_of(action)
            if send not in self.done:
                # Without credits sender and receiver meet.
                sender = self.schedule.stage_to_rank[send.stage]
                head = self._head(sender)
                if self.credits != 0 or head is None or head.action != send:
                    return False
                self.done.add(send)
            else:
                self.in_flight[_lane(send)] -= 1
        elif needs := sources(action, self.schedule.stages):
            # What comes from another rank has been received: receives precede their use.
            local = self.schedule.stage_to_rank[needs[0].stage] == rank
            if local and not any(need in self.done for need in needs):
                return False
        self.done.add(action)
        return True

    def _deadlock(self, rank: int) -> ScheduleError:
        seen: list[int] = []
        story: list[str] = []
        at = rank
        while at not in seen and (head := self._head(at)) is not None:
            seen.append(at)
            what, other = self._waits_for(head.action, at)
            who = "" if at == rank else f"rank {at} at step {head.step}, {head.cell}, "
            story.append(f"{who}waits for {what}")
            at = other
        first = self._head(rank)
        assert first is not None
        return ScheduleError("deadlock: " + "; ".join(story), rank, first.step, first.cell)

    def _waits_for(self, action: Action, rank: int) -> tuple[str, int]:
        """What `action` waits for, and the rank that would have to do it."""
        if action.kind in _SENDS:
            target = action.stage + (1 if action.kind is Kind.SEND_F else -1)
            other = self.schedule.stage_to_rank[target]
            if self.credits == 0:
                return f"rank {other} to receive {action}", other
            return f"rank {other} to receive one of {self.credits} messages before {action}", other
        if action.kind not in COMPUTE:
            send = _send_of(action)
            other = self.schedule.stage_to_rank[send.stage]
            return f"{send} of rank {other}", other
        need = sources(action, self.schedule.stages)[0]
        kinds = {a.action for a in self.orders[rank]}
        need = need if need in kinds else need._replace(kind=Kind.I)
        return f"{need}, which comes later on this rank", rank


def _lane(send: Action) -> tuple[int, Kind]:
    return send.stage, send.kind


def _send_of(receive: Action) -> Action:
    if receive.kind is Kind.RECV_F:
        return Action(receive.stage - 1, Kind.SEND_F, receive.micro_batch)
    return Action(receive.stage + 1, Kind.SEND_B, receive.micro_batch)


def _check_memory(schedule: Schedule, limit: int) -> None:
    if not schedule.trains:
        return
    for rank in range(schedule.ranks):
        held = 0
        for step, action in schedule.steps(rank):
            held += KEEPS.get(action.kind, 0)
            if held > limit:
                what = f"keeps {held} activations, the limit is {limit}"
                raise ScheduleError(what, rank, step, action)
