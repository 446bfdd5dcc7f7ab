"""The table of tilings that all ranks of a group go by.

Rank 0 reads the file and tells the others. Ranks that looked for themselves could find different files, or
one file before and after somebody wrote it, and then cut their products differently: they would wait for
tiles that nobody sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from tp_kernels.comm.errors import GroupMismatchError, UnsupportedError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.comm.objects import broadcast_object
from tp_kernels.kernels._gemm import Tiling

from .cache import Entry, Tables, add, default_path, read
from .hardware import Hardware, agreed
from .tilings import OPERATIONS, ShapeClass, candidates


@dataclass(frozen=True)
class TuningTable:
    """Measured tilings of one kind of hardware. Equal on all ranks if `load` has made it; never changes.

    Args:
        hardware: where they were measured.
        tilings: by class of shapes; every one is a candidate of its class.
        notes: what was left out, and why.
    """

    hardware: Hardware
    tilings: Mapping[ShapeClass, Tiling]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tilings", MappingProxyType(dict(self.tilings)))

    def tiling(
        self,
        operation: str,
        rows: int | Sequence[int],
        n: int,
        k: int,
        dtype: torch.dtype,
        world: int,
    ) -> Tiling | None:
        """What the kernel `operation` takes as `tiling=` for x [rows, k] and w [n, k] on each rank.

        Looks at nothing that differs between ranks, so all arguments must be equal on them. For workspaces
        of depth 4 or more.

        Args:
            rows: of all ranks together; or how many each rank has, if not divided by split_sizes.

        Returns:
            None if nothing like it was measured: the kernel then chooses by itself.
        """
        total = rows if isinstance(rows, int) else sum(rows)
        if operation not in OPERATIONS or min(total, n, k) < 1:
            return None
        return self.tilings.get(ShapeClass.of(operation, rows, n, k, dtype, world))


def load(group: ParallelGroup, device: torch.device, path: Path | None = None) -> TuningTable:
    """The table for `device`, the same on all ranks; empty, with a note, where none can be used. Collective.

    Args:
        group: whose ranks are to agree.
        device: of this rank's tensors; "cpu" for the interpreter.
        path: of the file; only that of rank 0 counts. Default: `default_path()`.
    """
    try:
        hardware = agreed(Hardware.of(device), group)
    except GroupMismatchError as error:  # on every rank
        return TuningTable(Hardware.of(device), {}, (str(error),))
    tilings: dict[ShapeClass, Tiling] = {}
    notes: list[str] = []
    if group.rank == 0:
        tables, problem = read(path or default_path())
        tilings, notes = usable(tables, hardware)
        notes = [problem, *notes] if problem else notes
    found = broadcast_object(
        [[[asdict(shape), asdict(tilings[shape])] for shape in tilings], notes], group
    )
    tilings = {ShapeClass(**shape): Tiling(**tiling) for shape, tiling in found[0]}
    return TuningTable(hardware, tilings, tuple(found[1]))


def usable(tables: Tables, hardware: Hardware) -> tuple[dict[ShapeClass, Tiling], list[str]]:
    """The tilings of `hardware` that may be used, and why the others may not.

    Only candidates may: a tiling from elsewhere could give other bits, or not run at all.
    """
    tilings: dict[ShapeClass, Tiling] = {}
    notes = []
    for shape, entry in tables.get(hardware, {}).items():
        same = [one for one in candidates(hardware, shape) if asdict(one) == entry.tiling]
        if same:
            tilings[shape] = same[0]
        else:
            notes.append(f"{shape}: {entry.tiling} is no candidate and is ignored")
    return tilings, notes


def save(
    group: ParallelGroup,
    hardware: Hardware,
    entries: Mapping[ShapeClass, Entry],
    path: Path | None = None,
) -> str:
    """Let rank 0 add `entries` to the file; what became of one that could not be read, or "". Collective.

    Raises:
        UnsupportedError: rank 0 cannot write it; on every rank.
    """
    note = error = ""
    if group.rank == 0:
        try:
            note = add(path or default_path(), hardware, entries)
        except UnsupportedError as failure:
            error = str(failure)
    note, error = broadcast_object([note, error], group)
    if error:
        raise UnsupportedError(error)
    return note
