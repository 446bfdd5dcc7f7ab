"""Sends and receives as cells of a schedule."""

from __future__ import annotations

from dataclasses import replace

from .schedule import Action, Kind, Schedule, ScheduleError, sources

# By the kind of a computation: what its message is called, and where it goes.
_MESSAGES = {
    Kind.F: (Kind.SEND_F, Kind.RECV_F, +1),
    Kind.B: (Kind.SEND_B, Kind.RECV_B, -1),
    Kind.I: (Kind.SEND_B, Kind.RECV_B, -1),
}


def message_of(action: Action, schedule: Schedule) -> tuple[Action, Action] | None:
    """(send, receive) of what `action` computes; None if nothing leaves the rank."""
    if action.kind not in _MESSAGES:
        return None
    send, receive, hop = _MESSAGES[action.kind]
    target = action.stage + hop
    if not 0 <= target < schedule.stages:
        return None
    if schedule.stage_to_rank[target] == schedule.stage_to_rank[action.stage]:
        return None
    return (
        Action(action.stage, send, action.micro_batch),
        Action(target, receive, action.micro_batch),
    )


def with_communication(schedule: Schedule) -> Schedule:
    """`schedule` with a cell for every message, placed as `Schedule.with_communication` says."""
    if schedule.communicates:
        return schedule
    left = [[cell for cell in row if cell is not None] for row in schedule.actions]
    rows: list[list[Action | None]] = [[] for _ in left]
    done: list[set[Action]] = [set() for _ in left]
    heads = [0] * len(left)
    while any(head < len(row) for head, row in zip(heads, left, strict=True)):
        moved = False
        for rank, row in enumerate(left):
            if heads[rank] == len(row):
                continue
            cell = row[heads[rank]]
            if not all(_arrived(part, schedule, done[rank]) for part in cell.unpacked()):
                continue
            heads[rank] += 1
            moved = True
            rows[rank].append(cell)
            for part in cell.unpacked():
                done[rank].add(part)
                if (pair := message_of(part, schedule)) is not None:
                    send, receive = pair
                    target = schedule.stage_to_rank[receive.stage]
                    rows[rank].append(send)
                    rows[target].append(receive)
                    done[target].add(receive)
        if not moved:
            rank = next(r for r, row in enumerate(left) if heads[r] < len(row))
            cell = left[rank][heads[rank]]
            raise ScheduleError("its inputs never arrive", rank, action=cell)
    length = max(map(len, rows))
    padded = tuple((*row, *[None] * (length - len(row))) for row in rows)
    return replace(schedule, actions=padded)


def _arrived(action: Action, schedule: Schedule, done: set[Action]) -> bool:
    needs = sources(action, schedule.stages)
    if not needs:
        return True
    receive = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
    return Action(action.stage, receive, action.micro_batch) in done or any(
        n in done for n in needs
    )
