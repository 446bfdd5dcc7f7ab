"""Where a measurement was made: what explains its numbers, nothing that names a machine or a person."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tp_kernels import __version__
from tp_kernels.comm.symmetric_memory import _host

# What may differ between two runs without a word from `compare`.
VOLATILE = ("date", "load_average", "memory_free_mib")

_CPU = Path("/sys/devices/system/cpu/cpu0/cache")


def environment(peers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Machine, kernel settings and versions; `peers` are versions of other libraries."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "caches": _caches(),
        "memory_mib": _memory("MemTotal"),
        "memory_free_mib": _memory("MemAvailable"),
        "huge_pages": {
            name: _chosen(Path("/sys/kernel/mm/transparent_hugepage") / name)
            for name in ("enabled", "shmem_enabled")
        },
        "kernel": f"{platform.system()} {platform.release()}",
        "isa": _host.isa() if _host is not None else None,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "versions": {
            "tp_kernels": __version__,
            "commit": _commit(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": importlib.metadata.version("numpy"),
            **(peers or {}),
        },
    }


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """What differs between two environments, one line each, without what always does."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = [name for name in {**old, **new} if where or name not in VOLATILE]
        return [
            line
            for name in names
            for line in differences(old.get(name), new.get(name), f"{where}.{name}".strip("."))
        ]
    return [] if old == new else [f"{where}: {old} -> {new}"]


def _cpu_model() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _caches() -> dict[str, str]:
    """Size by level and kind, of the first core."""
    found = {}
    for entry in sorted(_CPU.glob("index*")):
        kind = _read(entry / "type")
        suffix = {"Data": "d", "Instruction": "i"}.get(kind, "")
        found[f"L{_read(entry / 'level')}{suffix}"] = _read(entry / "size")
    return found


def _memory(name: str) -> int | None:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) // 1024
    return None


def _chosen(path: Path) -> str | None:
    """The value in brackets: "always [madvise] never"."""
    text = _read(path)
    return text.partition("[")[2].partition("]")[0] or None


def _commit() -> str | None:
    """The commit of the checkout this package is in, if it is in one; "+" when it has changes."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
