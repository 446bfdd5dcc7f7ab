"""`tp-kernels bench compare`: the same cases in two reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from tp_kernels.comm.errors import UnsupportedError

from .environment import differences
from .report import new_table, spread
from .timing import describe


@dataclass(frozen=True)
class Change:
    """One contestant in one case, before and after."""

    case: str
    contestant: str
    old: Mapping[str, Any]
    new: Mapping[str, Any]

    @property
    def ratio(self) -> float:
        """New time over old: below one is faster."""
        return self.new["median_us"] / self.old["median_us"]

    @property
    def verdict(self) -> str:
        """ "faster" or "slower" when each median is outside the other's p10..p90; else nothing."""
        if _within(self.new["median_us"], self.old) or _within(self.old["median_us"], self.new):
            return ""
        return "faster" if self.ratio < 1 else "slower"


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """What both reports measured, in the order of the new one.

    Raises:
        UnsupportedError: they are of different kinds, or have nothing in common.
    """
    if old["kind"] != new["kind"]:
        raise UnsupportedError(f"a report of {old['kind']} and one of {new['kind']} share no rows")
    before = {
        (describe(row["case"]), name): sample
        for row in old["results"]
        for name, sample in row["contestants"].items()
    }
    found = [
        Change(describe(row["case"]), name, before[describe(row["case"]), name], sample)
        for row in new["results"]
        for name, sample in row["contestants"].items()
        if (describe(row["case"]), name) in before
    ]
    if not found:
        raise UnsupportedError("the two reports have no case in common")
    return found


def show(console: Console, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Print every common row, and what differs between the machines."""
    for line in differences(old["environment"], new["environment"]):
        console.print(f"[yellow]environments differ:[/] {escape(line)}", highlight=False)
    for line in differences(old["settings"], new["settings"], "settings"):
        console.print(f"[yellow]settings differ:[/] {escape(line)}", highlight=False)
    table = new_table("case", "contestant", "old", "new", "new / old", "", left=2)
    found = changes(old, new)
    before = None
    for change in found:
        colour = {"faster": "green", "slower": "red"}.get(change.verdict, "default")
        table.add_row(
            change.case if change.case != before else "",
            change.contestant,
            spread(change.old),
            spread(change.new),
            f"[{colour}]{change.ratio:.2f}[/]",
            f"[{colour}]{change.verdict}[/]",
        )
        before = change.case
    console.print(
        "Microseconds, median (p10..p90). Flagged: each median outside the other's spread."
    )
    console.print(table)
    counts = [sum(change.verdict == word for change in found) for word in ("faster", "slower")]
    console.print(f"{len(found)} rows: {counts[0]} faster, {counts[1]} slower", highlight=False)


def _within(value: float, sample: Mapping[str, Any]) -> bool:
    return bool(sample["p10_us"] <= value <= sample["p90_us"])
