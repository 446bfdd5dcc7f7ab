"""What the doctor says about CUDA on machines that are not here: each is data."""

from __future__ import annotations

import io
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from tp_kernels.cli import cuda_report as module
from tp_kernels.cli.cuda_report import add_rows, cuda_report, driver_release, examine

INFO = {
    "archs": "sm_80 sm_90a sm_100 sm_120 compute_120",
    "gemm_archs": "sm_90a",
    "cutlass": "4.2.0",
}
H100 = {"name": "NVIDIA H100", "capability": 90, "multiprocessors": 132, "multicast": True}
A100 = {"name": "NVIDIA A100", "capability": 80, "multiprocessors": 108, "multicast": False}
T4 = {"name": "Tesla T4", "capability": 75, "multiprocessors": 40, "multicast": False}
NEXT = {"name": "next year's", "capability": 130, "multiprocessors": 200, "multicast": True}


def machine(
    *devices: dict[str, Any],
    driver: int = 13000,
    problem: str = "",
    peers: list[list[bool]] | None = None,
    **info: str,
) -> Any:
    """A module _cuda on a machine with these devices, which all reach each other unless told."""
    found = {
        "devices": list(devices),
        "problem": problem,
        "peers": peers or [[True] * len(devices)] * len(devices),
    }
    return SimpleNamespace(
        build_info=lambda: INFO | info,
        versions=lambda: {"runtime": 13000, "driver": driver},
        device_info=lambda: found,
    )


def look(
    native: Any,
    torch_cuda: str | None = "13.0",
    release: str | None = "580.65.06",
    **environment: str,
) -> tuple[dict[str, Any], str]:
    """The report, and the same as printed."""
    found = examine(native, torch_cuda, release, environment)
    return found, printed(found)


def printed(found: dict[str, Any]) -> str:
    facts = Table(show_header=False, box=None)
    add_rows(facts, found)
    console = Console(file=io.StringIO(), width=400)
    console.print(facts)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_eight_gpus_on_a_switch():
    found, text = look(machine(*[H100] * 8))
    assert found["problem"] is None
    assert found["built"]["cuda"] == "13.0" and found["driver"]["release"] == "580.65.06"
    assert [d["image"] for d in found["devices"]] == ["sm_90a"] * 8
    assert [d["product_image"] for d in found["devices"]] == ["sm_90a"] * 8
    assert "built with CUDA 13.0 for sm_80, sm_90a, sm_100, sm_120, compute_120" in text
    assert "Hopper products: sm_90a (CUTLASS 4.2.0)" in text
    assert "580.65.06, serves CUDA up to 13.0" in text
    runs = "compute capability 9.0, runs sm_90a, 132 multiprocessors, multicast"
    assert re.search(f"GPU 7 +NVIDIA H100: {runs}", text)
    assert "every GPU reaches every other" in text


def test_gpus_that_do_not_reach_each_other():
    peers = [[True, True, False], [True, True, False], [False, False, True]]
    found, text = look(machine(A100, A100, A100, peers=peers))
    assert [device["peers"] for device in found["devices"]] == peers
    assert "0 reaches 1; 1 reaches 0; 2 reaches none" in text
    assert "runs sm_80, 108 multiprocessors, no multicast" in text
    assert found["devices"][0]["product_image"] is None


@pytest.mark.parametrize(
    ("native", "settings", "problem"),
    [
        (machine(driver=0), {"release": None}, "no NVIDIA driver is installed (libcuda.so.1)"),
        (
            machine(driver=0),
            {},
            "driver 580.65.06 is in the kernel but not here (libcuda.so.1): start",
        ),
        (
            machine(driver=12040),
            {},
            "the driver knows CUDA up to 12.4, _cuda is built with 13.0, which",
        ),
        (
            machine(problem="cudaErrorNoDevice: none"),
            {},
            "CUDA finds no device: cudaErrorNoDevice: none",
        ),
        (
            machine(problem="cudaErrorNoDevice: none"),
            {"CUDA_VISIBLE_DEVICES": ""},
            "CUDA finds no device: cudaErrorNoDevice: none (CUDA_VISIBLE_DEVICES is '')",
        ),
        (machine(H100), {"torch_cuda": None}, "torch "),
    ],
)
def test_nothing_runs(native, settings, problem):
    found, text = look(native, **settings)
    assert found["problem"].startswith(problem)
    assert f"no: {problem}" in text


def test_a_device_that_nothing_was_built_for():
    found, text = look(machine(T4, H100))
    assert found["problem"] is None
    obstacles = [device["obstacle"] for device in found["devices"]]
    assert obstacles == ["compute capability 7.5; kernels need 8.0 or higher", None]
    assert "Tesla T4: no: compute capability 7.5" in text
    only, _ = look(machine(H100, archs="sm_80", gemm_archs=""))
    assert only["devices"][0]["obstacle"].endswith("build it with TP_KERNELS_CUDA_ARCHS=90")


def test_a_device_yet_to_come():
    found, text = look(machine(NEXT))
    assert found["devices"][0]["image"] == "compute_120"
    assert "compute capability 13.0, compiled by the driver from compute_120" in text


def test_a_build_without_products():
    _, text = look(machine(gemm_archs=""))
    assert "CUDA kernels" in text and "Hopper" not in text


def test_without_the_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "tp_kernels._cuda", None)
    found = cuda_report()
    assert found["built"] is None and found["devices"] == []
    assert found["problem"].startswith("_cuda is not built: install a wheel +cu")
    assert "no: _cuda is not built" in printed(found)


def test_this_machine(monkeypatch):
    native = machine(driver=0)
    monkeypatch.setitem(sys.modules, "tp_kernels._cuda", native)
    monkeypatch.setattr(module, "driver_release", lambda: None)
    assert cuda_report()["problem"] == "no NVIDIA driver is installed (libcuda.so.1)"


@pytest.mark.parametrize(
    ("text", "release"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\nGCC version: 12",
            "550.54.15",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release",
            "580.65.06",
        ),
        ("NVRM version: of some kind", None),
    ],
)
def test_release_of_a_driver(tmp_path, text, release):
    (tmp_path / "version").write_text(text)
    assert driver_release(tmp_path / "version") == release
    assert driver_release(tmp_path / "absent") is None
