"""Whether all ranks of a group can run the kernels of tp_kernels._cuda, from what they told each other.

A rank alone must not decide, see triton_support.py. What a build, a driver and a device can do together is
decided here by functions of plain values, so that it can be tested, and explained, without any of them.
Their sources: CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility"; CUDA Compatibility
(docs.nvidia.com/deploy/cuda-compatibility), "Minor Version Compatibility".
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch

# The oldest driver for any toolkit of a major version ("minor version compatibility"), on Linux.
OLDEST_DRIVER = {12: "525", 13: "580"}
# Boards with the processor on them: they do not run the code of other devices of the same major version.
INTEGRATED = (87,)

Kernel = Literal["simt", "gemm"]


def image_for(images: Sequence[str], capability: int) -> str | None:
    """The image that a device of this capability (10 * major + minor) runs, or None.

    "sm_..." is machine code and runs as it is; "compute_..." is PTX, which the driver compiles first.
    """
    parsed = [(image, *_parsed(image)) for image in images]
    candidates = [
        (kind == "sm", number, image)
        for image, kind, number, features in parsed
        if _runs(kind, number, features, capability)
    ]
    return max(candidates)[2] if candidates else None


def driver_obstacle(driver: int, toolkit: int, *, compiles: bool = False) -> str | None:
    """Why a driver cannot serve what this toolkit built, or None. Both as 1000 * major + 10 * minor.

    driver: the latest toolkit that it knows; 0 without a driver.
    compiles: it has to compile PTX, of which it knows no later version than its own.
    """
    if driver == 0:
        return "no NVIDIA driver is installed (libcuda.so.1)"
    if driver // 1000 < toolkit // 1000:
        oldest = OLDEST_DRIVER.get(toolkit // 1000)
        needed = f", which needs driver {oldest} or later" if oldest else ""
        return (
            f"the driver knows CUDA up to {version_name(driver)}, _cuda is built with "
            f"{version_name(toolkit)}{needed}: update the driver, or use a wheel for CUDA {driver // 1000}"
        )
    if compiles and driver < toolkit:
        return (
            f"the driver has to compile PTX of CUDA {version_name(toolkit)} and knows CUDA up to "
            f"{version_name(driver)}: update the driver, or build for this device"
        )
    return None


@dataclass(frozen=True)
class CudaSupport:
    """What a rank tells its peers.

    missing: why `_cuda` cannot be imported; None if it can.
    toolkit: that it was built with, as 1000 * major + 10 * minor.
    images, gemm_images: that the kernels, and those of matrix products, were compiled to.
    driver: the latest toolkit that the driver serves, likewise; 0 without one.
    capability: of the current CUDA device, 10 * major + minor; None without one.
    """

    missing: str | None
    toolkit: int = 0
    images: tuple[str, ...] = ()
    gemm_images: tuple[str, ...] = ()
    driver: int = 0
    capability: int | None = None

    @classmethod
    def current(cls) -> CudaSupport:
        capability = None
        if torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability()
            capability = 10 * major + minor
        try:
            native = importlib.import_module("tp_kernels._cuda")
        except ImportError as error:
            return cls(unavailable(error), capability=capability)
        info, versions = native.build_info(), native.versions()
        return cls(
            None,
            versions["runtime"],
            tuple(info["archs"].split()),
            tuple(info["gemm_archs"].split()),
            versions["driver"],
            capability,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CudaSupport:
        support = cls(**json.loads(text))
        return replace(
            support, images=tuple(support.images), gemm_images=tuple(support.gemm_images)
        )

    def obstacle(self, kernel: Kernel) -> str | None:
        """Why this rank cannot run kernels of this kind, or None when it can."""
        if self.missing:
            return f"_cuda is {self.missing}"
        if self.capability is None:
            return "no CUDA device that torch can use"
        images = self.gemm_images if kernel == "gemm" else self.images
        image = image_for(images, self.capability)
        if image is None:
            return device_obstacle(images, self.capability, kernel)
        return driver_obstacle(self.driver, self.toolkit, compiles=image.startswith("compute_"))


def native_obstacle(ranks: Sequence[CudaSupport], kernel: Kernel) -> str | None:
    """Why these ranks cannot run kernels of `_cuda` together, or None.

    kernel: "simt" (all-reduce family, waits) or "gemm" (products for Hopper).
    """
    for rank, support in enumerate(ranks):
        obstacle = support.obstacle(kernel)
        if obstacle:
            return f"rank {rank}: {obstacle}"
    return None


def device_obstacle(images: Sequence[str], capability: int, kernel: Kernel) -> str:
    """The sentence instead of "no kernel image is available for execution on the device"."""
    have = f"compute capability {capability // 10}.{capability % 10}"
    if kernel == "gemm":
        if not images:
            return "_cuda is built without Hopper products: TP_KERNELS_CUDA_ARCHS had no 90a"
        return f"{have}; the products of _cuda are for Hopper (9.0) only"
    if capability < 80:
        return f"{have}; kernels need 8.0 or higher"
    return (
        f"{have}, and _cuda is built for {', '.join(images)}: build it with "
        f"TP_KERNELS_CUDA_ARCHS={capability}"
    )


def unavailable(error: ImportError) -> str:
    """Why `_cuda` is not there, and what helps."""
    text = str(error)
    if isinstance(error, ModuleNotFoundError):
        return "not built: install a wheel +cu..., or build where nvcc is (docs/building.md)"
    library = re.search(r"version `((?:GLIBC|GLIBCXX|CXXABI)\w+[\d.]*)' not found", text)
    if library:
        return (
            f"not loadable: this system has no {library[1]}, because the wheel was built on a later "
            "one: build it here"
        )
    if "undefined symbol" in text:
        return (
            f"not loadable, the file is of another build or Python: reinstall tp_kernels ({text})"
        )
    return f"not loadable ({text})"


def version_name(version: int) -> str:
    """13000 -> "13.0"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _runs(kind: str, number: int, features: str, capability: int) -> bool:
    if features == "a":
        return number == capability
    same_family = number // 10 == capability // 10 and number <= capability
    if kind == "compute" and not features:
        return number <= capability
    integrated = number in INTEGRATED or capability in INTEGRATED
    return same_family and (number == capability or not integrated)


def _parsed(image: str) -> tuple[str, int, str]:
    match = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", image)
    if match is None:
        raise ValueError(f"{image} is no image")
    return match[1], int(match[2]), match[3]
