"""`tp-kernels doctor`: what is here, what can run, and why the rest cannot."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tp_kernels import (
    ParallelGroup,
    RankError,
    TpKernelsError,
    __version__,
)
from tp_kernels.comm import short_way
from tp_kernels.comm.launch import launch
from tp_kernels.comm.symmetric_memory import HOST_OBSTACLE, _host
from tp_kernels.dispatch import IMPLEMENTATIONS, obstacle
from tp_kernels.ops.linear_all_reduce import linear_all_reduce

from .cuda_report import add_rows, cuda_report

_PACKAGES = ("torch", "transformers", "triton", "numpy", "safetensors", "gguf", "accelerate")


def report() -> dict[str, Any]:
    """Everything `tp-kernels doctor --json` prints. Starts two ranks for a moment."""
    implementations = _implementations()
    return {
        "usable": any(state["available"] for state in implementations.values()),
        "versions": {
            "tp_kernels": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
        },
        "built": {name: _extension(name) for name in ("_host", "_cuda")},
        "isa": _isa(),
        "short_way": short_way.AVAILABLE,
        "shared_memory": _shared_memory(),
        "cores": {"usable": _affinity(), "machine": os.cpu_count()},
        "gpus": _gpus(),
        "cuda": cuda_report(),
        "implementations": implementations,
    }


def print_report(found: dict[str, Any], *, as_json: bool = False) -> None:
    if as_json:
        print(json.dumps(found, indent=2))
        return
    console = Console()
    facts = Table(show_header=False, box=None, pad_edge=False)
    for name, version in found["versions"].items():
        facts.add_row(name, version or "[dim]not installed[/]")
    host = found["built"]["_host"]
    facts.add_row("_host", f"built: {host['detail']}" if host["built"] else _no(host["detail"]))
    isa = found["isa"]
    facts.add_row(
        "instruction set",
        f"{isa['used']} (can run here: {', '.join(isa['available'])})"
        if isa["used"]
        else "unknown",
    )
    facts.add_row(
        "short way",
        "yes: calls that record nothing skip most of Python"
        if found["short_way"]
        else _no("it needs _host, and torch with the C exchange API of DLPack 1.3"),
    )
    memory = found["shared_memory"]
    facts.add_row(
        memory["path"],
        f"{memory['free'] / 2**20:,.0f} MiB free of {memory['size'] / 2**20:,.0f} MiB"
        if memory["size"]
        else _no("there is none: ranks go through the process group"),
    )
    usable = found["cores"]["usable"]
    facts.add_row(
        "cores",
        f"{len(usable)} of {found['cores']['machine']} usable ({_ranges(usable)})",
    )
    facts.add_row("GPUs of torch", ", ".join(found["gpus"]) or "none")
    add_rows(facts, found["cuda"])
    console.print(facts)

    table = Table("implementation", "here", "why")
    for name, state in found["implementations"].items():
        table.add_row(
            name, "[green]yes[/]" if state["available"] else "no", escape(str(state["why"]))
        )
    console.print(table)
    if not found["usable"]:
        console.print("[bold red]not usable:[/] no implementation gave the right result")


def check_implementations() -> dict[str, str | None]:
    """In a rank: a small product with each implementation; why it failed, or None.

    On CPU tensors, but "triton" and "cuda" on GPUs where there are any.
    """
    problems: dict[str, str | None] = {}
    gpus = torch.cuda.device_count()
    if gpus:  # with fewer than ranks, they will say what stands in the way
        torch.cuda.set_device(dist.get_rank() % gpus)
    with ParallelGroup(timeout=20.0) as group:
        x = torch.arange(12.0).reshape(3, 4) + group.rank
        weight = torch.ones(2, 4)
        inputs = torch.stack([x - group.rank + other for other in range(group.size)])
        expected = inputs.sum(0) @ weight.T
        for name in IMPLEMENTATIONS:
            device = "cuda" if name in ("triton", "cuda") and gpus else "cpu"
            problems[name] = obstacle(name, group, weight.shape[0], x.dtype, device)
            if problems[name]:
                continue
            try:
                result = linear_all_reduce(
                    x.to(device), weight.to(device), group=group, implementation=name
                )
            except TpKernelsError as error:
                problems[name] = str(error)
            else:
                correct = torch.equal(result.cpu(), expected)
                problems[name] = None if correct else "a wrong result"
    return problems


def _implementations() -> dict[str, dict[str, Any]]:
    try:
        by_rank = launch(check_implementations, 2, timeout=20.0)
    except RankError as error:
        why = f"two ranks could not be started and used: {str(error).splitlines()[0]}"
        by_rank = [dict.fromkeys(IMPLEMENTATIONS, why)]
    states: dict[str, dict[str, Any]] = {}
    for name in IMPLEMENTATIONS:
        problem = next((found[name] for found in by_rank if found[name]), None)
        why = problem or "ran on two ranks and gave the right result"
        states[name] = {"available": problem is None, "why": why}
    return states


def _extension(name: str) -> dict[str, Any]:
    if name == "_host" and HOST_OBSTACLE:
        return {"built": False, "detail": HOST_OBSTACLE}
    try:
        module = importlib.import_module(f"tp_kernels.{name}")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        return {"built": False, "detail": "not built" if missing else f"cannot be loaded: {error}"}
    info = module.build_info() if hasattr(module, "build_info") else {}
    detail = ", ".join(f"{key} {value}" for key, value in info.items())
    return {"built": True, "detail": detail or str(module.__file__)}


def _isa() -> dict[str, Any]:
    if _host is None:
        return {"used": None, "available": [], "why": HOST_OBSTACLE}
    try:
        return {"used": _host.isa(), "available": list(_host.available_isas())}
    except ValueError as error:
        return {"used": None, "available": [], "why": str(error)}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _shared_memory() -> dict[str, Any]:
    path = Path("/dev/shm")
    if not path.is_dir():
        return {"path": str(path), "size": 0, "free": 0}
    usage = shutil.disk_usage(path)
    return {"path": str(path), "size": usage.total, "free": usage.free}


def _affinity() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _no(why: str) -> str:
    return f"[yellow]no[/]: {escape(why)}"
