"""The file in which measured tilings are kept: JSON, sorted, to be read and reviewed by people.

    {"schema": "tp_kernels.tilings/1",
     "tables": [{"hardware": {"device": ..., "capability": ..., "triton": ..., "package": ...},
                 "entries": [{"shape": {"operation": ..., ...}, "tiling": {"block_m": ..., ...},
                              "median_us": ..., "p10_us": ..., "p90_us": ..., ...}]}]}

A file that is damaged or has another schema is as good as none, and whoever reads it is told. It is written
whole, beside itself, and renamed, so that a reader sees the old or the new one; writers take turns on a lock
beside it, so none loses what another has added.

One rank reads and writes it: see table.py.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from tp_kernels.comm.errors import UnsupportedError

from .hardware import Hardware
from .tilings import ShapeClass

SCHEMA = "tp_kernels.tilings/1"
T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """The fastest tiling of a class of shapes, and how it was found.

    Args:
        tiling: fields of a Tiling.
        median_us, p10_us, p90_us: microseconds of a call on its slowest rank, over `calls` calls.
        built_in_us: median of the tiling that is taken without a table, in the same run.
        measured: sizes and dtype of the product that stood for its class.
        date: of the measurement, UTC, ISO 8601.
    """

    tiling: dict[str, int]
    median_us: float
    p10_us: float
    p90_us: float
    calls: int
    built_in_us: float
    measured: str
    date: str


Tables = dict[Hardware, dict[ShapeClass, Entry]]


def default_path() -> Path:
    """tilings.json in $TP_KERNELS_CACHE, or else in the directory tp_kernels of the user's caches."""
    directory = os.environ.get("TP_KERNELS_CACHE")
    if directory:
        return Path(directory) / "tilings.json"
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches) / "tp_kernels" / "tilings.json"


def read(path: Path) -> tuple[Tables, str]:
    """All tables of a file, and why there are none if it is damaged or of another schema, else ""."""
    try:
        document = json.loads(path.read_text(), parse_constant=_refuse)
        if not isinstance(document, dict) or "schema" not in document:
            raise ValueError("no document with a schema")
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']!r}, this version has {SCHEMA!r}")
        return _parse(document), ""
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path} is ignored: {error}"


def add(path: Path, hardware: Hardware, entries: Mapping[ShapeClass, Entry]) -> str:
    """Put `entries` into the file, in place of those of the same classes and beside all others.

    Returns what became of a file that could not be read, or "".

    Raises:
        UnsupportedError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _turn(path):
            tables, problem = read(path)
            if problem:
                aside = path.with_name(f"{path.name}.ignored")
                os.replace(path, aside)
                problem = f"{problem}; moved to {aside}"
            tables[hardware] = {**tables.get(hardware, {}), **entries}
            _write(path, tables)
    except OSError as error:
        raise UnsupportedError(f"{path} cannot be written: {error}") from error
    return problem


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no time")


def _parse(document: Any) -> Tables:
    tables: Tables = {}
    for table in _list(document.get("tables")):
        hardware = _make(Hardware, table, "hardware")
        tables[hardware] = {
            _make(ShapeClass, raw, "shape"): _entry(raw) for raw in _list(table.get("entries"))
        }
    return tables


def _entry(raw: dict[str, Any]) -> Entry:
    entry = _make(Entry, {"entry": {key: raw[key] for key in raw if key != "shape"}}, "entry")
    if any(type(value) is not (bool if k == "tma" else int) for k, value in entry.tiling.items()):
        raise ValueError(f"sizes of a tiling are numbers, not {entry.tiling}")
    return entry


def _make(kind: type[T], holder: Any, name: str) -> T:
    """The dataclass `kind` from the dict `name` of `holder`; ValueError if it is anything else."""
    given = holder.get(name) if isinstance(holder, dict) else None
    wanted = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(given, dict) or given.keys() != wanted.keys():
        raise ValueError(f"{name} has the fields {', '.join(wanted)}, not {given!r:.200}")
    for key, value in given.items():
        found, expected = type(value).__name__, wanted[key].partition("[")[0]
        if found != expected and (found, expected) != ("int", "float"):
            raise ValueError(f"{name}: {key} is a {wanted[key]}, not {value!r:.200}")
    return kind(**given)


def _list(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"a list of objects is expected, not {value!r:.200}")
    return value


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    with open(path.with_name(f"{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file is closed, also by a crash
        yield


def _write(path: Path, tables: Tables) -> None:
    document = {
        "schema": SCHEMA,
        "tables": [
            {
                "hardware": asdict(hardware),
                "entries": [
                    {"shape": asdict(shape)} | asdict(entries[shape]) for shape in sorted(entries)
                ],
            }
            for hardware, entries in sorted(tables.items())
        ],
    }
    new = path.with_name(f"{path.name}.new")  # nobody else's: it is this writer's turn
    try:
        with open(new, "w") as file:
            json.dump(document, file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
