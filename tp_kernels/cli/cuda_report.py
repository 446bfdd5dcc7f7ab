"""What `tp-kernels doctor` says about CUDA: what was built, what is here, and whether the two fit."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from tp_kernels.comm.cuda_support import (
    device_obstacle,
    driver_obstacle,
    image_for,
    unavailable,
    version_name,
)


def cuda_report() -> dict[str, Any]:
    """The part "cuda" of the report. Starts the driver, if there is one."""
    try:
        native = importlib.import_module("tp_kernels._cuda")
    except ImportError as error:
        return {"built": None, "problem": f"_cuda is {unavailable(error)}", "devices": []}
    return examine(native, torch.version.cuda, driver_release(), os.environ)


def examine(
    native: ModuleType, torch_cuda: str | None, release: str | None, environment: Mapping[str, str]
) -> dict[str, Any]:
    """What a module `_cuda` says of itself and of this machine, with the conclusions.

    torch_cuda: the version of CUDA that torch is built for, None without.
    release: of the driver in the kernel, None without.
    """
    info, versions, found = native.build_info(), native.versions(), native.device_info()
    images, products = info["archs"].split(), info["gemm_archs"].split()
    devices = [
        _device(device, images, products, versions) | {"peers": peers}
        for device, peers in zip(found["devices"], found["peers"], strict=True)
    ]
    return {
        "built": {
            "cuda": version_name(versions["runtime"]),
            "images": images,
            "product_images": products,
            "cutlass": info["cutlass"],
        },
        "driver": {
            "cuda": version_name(versions["driver"]) if versions["driver"] else None,
            "release": release,
        },
        "problem": _problem(versions, found, torch_cuda, release, environment),
        "devices": devices,
    }


def driver_release(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Like 580.65.06, of the driver in the kernel; None without one."""
    if not file.is_file():
        return None
    match = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", file.read_text())
    return match[0] if match else None


def _device(
    device: dict[str, Any], images: list[str], products: list[str], versions: dict[str, int]
) -> dict[str, Any]:
    capability = device["capability"]
    image, product = image_for(images, capability), image_for(products, capability)
    if image is None:
        obstacle: str | None = device_obstacle(images, capability, "simt")
    else:
        compiles = image.startswith("compute_")
        obstacle = driver_obstacle(versions["driver"], versions["runtime"], compiles=compiles)
    return {
        **device,
        "capability": version_name(100 * capability),
        "image": image,
        "product_image": product,
        "obstacle": obstacle,
    }


def _problem(
    versions: dict[str, int],
    found: dict[str, Any],
    torch_cuda: str | None,
    release: str | None,
    environment: Mapping[str, str],
) -> str | None:
    """Why no kernel runs here, whatever the devices are."""
    if not versions["driver"] and release:
        return (
            f"driver {release} is in the kernel but not here (libcuda.so.1): start the container with "
            "its GPUs (docker run --gpus all)"
        )
    obstacle = driver_obstacle(versions["driver"], versions["runtime"])
    if obstacle:
        return obstacle
    if found["problem"]:
        hidden = environment.get("CUDA_VISIBLE_DEVICES")
        why = f" (CUDA_VISIBLE_DEVICES is '{hidden}')" if hidden is not None else ""
        return f"CUDA finds no device: {found['problem']}{why}"
    if torch_cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a build of it with CUDA"
    return None


def add_rows(facts: Table, cuda: dict[str, Any]) -> None:
    """`cuda` of the report in the table of facts."""
    built = cuda["built"]
    if built:
        products = ", ".join(built["product_images"])
        hopper = f"Hopper products: {products} (CUTLASS {built['cutlass']})" if products else ""
        made = f"CUDA {built['cuda']} for {', '.join(built['images'])}"
        facts.add_row("CUDA kernels", "; ".join(filter(None, [f"built with {made}", hopper])))
        driver = cuda["driver"]
        if driver["cuda"]:
            serves = f"serves CUDA up to {driver['cuda']}"
            facts.add_row("CUDA driver", ", ".join(filter(None, [driver["release"], serves])))
    if cuda["problem"]:
        facts.add_row("CUDA", f"[yellow]no[/]: {escape(cuda['problem'])}")
    for index, device in enumerate(cuda["devices"]):
        if device["obstacle"]:
            state = f"[yellow]no[/]: {escape(device['obstacle'])}"
        else:
            state = _runs(device)
        facts.add_row(f"GPU {index}", f"{escape(device['name'])}: {state}")
    if len(cuda["devices"]) > 1:
        facts.add_row("peer access", _reach([device["peers"] for device in cuda["devices"]]))


def _runs(device: dict[str, Any]) -> str:
    image = device["image"]
    how = (
        f"compiled by the driver from {image}" if image.startswith("compute_") else f"runs {image}"
    )
    parts = [
        f"compute capability {device['capability']}",
        how,
        f"{device['multiprocessors']} multiprocessors",
        "multicast" if device["multicast"] else "no multicast",
    ]
    return ", ".join(parts)


def _reach(peers: list[list[bool]]) -> str:
    """A matrix of who can address whose memory, in words."""
    if all(map(all, peers)):
        return "every GPU reaches every other"
    lines = []
    for index, row in enumerate(peers):
        reached = [str(peer) for peer, can in enumerate(row) if can and peer != index]
        lines.append(f"{index} reaches {', '.join(reached) or 'none'}")
    return "; ".join(lines)
