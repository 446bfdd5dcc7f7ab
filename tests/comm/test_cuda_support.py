"""What a rank says about the module _cuda, and what a build, a driver and a device can do together."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tp_kernels.comm.cuda_support import (
    CudaSupport,
    driver_obstacle,
    image_for,
    native_obstacle,
    unavailable,
)

IMAGES = ("sm_80", "sm_90a", "sm_100", "sm_120", "compute_120")
HERE = CudaSupport(None, 13000, IMAGES, ("sm_90a",), 13000, 90)


@pytest.mark.parametrize(
    ("capability", "image"),
    [
        (75, None),
        (80, "sm_80"),
        (86, "sm_80"),
        (87, None),  # Orin does not run code of other 8.x
        (89, "sm_80"),
        (90, "sm_90a"),
        (100, "sm_100"),
        (103, "sm_100"),
        (110, None),  # between: PTX of 12.0 is too new
        (120, "sm_120"),
        (121, "sm_120"),
        (130, "compute_120"),
    ],
)
def test_image_of_a_device(capability, image):
    assert image_for(IMAGES, capability) == image


@pytest.mark.parametrize(
    ("images", "capability", "image"),
    [
        (("sm_86",), 80, None),
        (("sm_80", "sm_86"), 89, "sm_86"),
        (("sm_87",), 87, "sm_87"),
        (("sm_87",), 89, None),
        (("sm_90a", "compute_90a"), 100, None),
        (("sm_100f", "compute_100f"), 103, "sm_100f"),
        (("compute_100f",), 103, "compute_100f"),
        (("compute_100f",), 120, None),
        (("compute_80",), 87, "compute_80"),
        (("sm_80", "compute_80"), 90, "compute_80"),
        ((), 90, None),
    ],
)
def test_image_of_other_builds(images, capability, image):
    assert image_for(images, capability) == image


def test_image_that_is_none():
    with pytest.raises(ValueError, match="hopper is no image"):
        image_for(("hopper",), 90)


@pytest.mark.parametrize(
    ("driver", "toolkit", "compiles", "reason"),
    [
        (0, 13000, False, "no NVIDIA driver is installed"),
        (
            12040,
            13000,
            False,
            "up to 12.4, _cuda is built with 13.0, which needs driver 580 or later",
        ),
        (12080, 14000, False, "built with 14.0: update the driver"),
        (12040, 12090, False, None),  # minor version compatibility
        (12040, 12090, True, "has to compile PTX of CUDA 12.9 and knows CUDA up to 12.4"),
        (12090, 12090, True, None),
        (13010, 12090, True, None),
    ],
)
def test_drivers(driver, toolkit, compiles, reason):
    found = driver_obstacle(driver, toolkit, compiles=compiles)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("support", "kernel", "reason"),
    [
        (HERE, "simt", None),
        (HERE, "gemm", None),
        (replace(HERE, capability=100), "simt", None),
        (
            replace(HERE, capability=100),
            "gemm",
            "compute capability 10.0; the products of _cuda are",
        ),
        (replace(HERE, gemm_images=()), "gemm", "_cuda is built without Hopper products"),
        (replace(HERE, capability=75), "simt", "compute capability 7.5; kernels need 8.0"),
        (
            replace(HERE, images=("sm_80",)),
            "simt",
            "compute capability 9.0, and _cuda is built for sm_80: build",
        ),
        (replace(HERE, driver=12080), "simt", "the driver knows CUDA up to 12.8"),
        (
            replace(HERE, capability=130, toolkit=13010),
            "simt",
            "the driver has to compile PTX of CUDA",
        ),
        (replace(HERE, capability=None), "simt", "no CUDA device that torch can use"),
        (CudaSupport("not built: ...", capability=90), "simt", "_cuda is not built: ..."),
    ],
)
def test_support(support, kernel, reason):
    found = native_obstacle([HERE, CudaSupport.from_json(support.to_json())], kernel)
    assert found is None if reason is None else found.startswith(f"rank 1: {reason}")


def test_support_of_this_process():
    info = {"archs": "sm_80 sm_90a", "gemm_archs": "sm_90a"}
    versions = {"runtime": 13000, "driver": 13010}
    native = SimpleNamespace(build_info=lambda: info, versions=lambda: versions)
    with (
        mock.patch.dict(sys.modules, {"tp_kernels._cuda": native}),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
    ):
        found = CudaSupport.current()
    assert found == CudaSupport(None, 13000, ("sm_80", "sm_90a"), ("sm_90a",), 13010, 90)
    assert CudaSupport.from_json(found.to_json()) == found


def test_support_without_the_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "tp_kernels._cuda", None)
    found = CudaSupport.current()
    assert found.missing is not None and found.missing.startswith("not built: install a wheel +cu")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            ImportError("/lib/libc.so.6: version `GLIBC_2.38' not found (required by _cuda.so)"),
            "not loadable: this system has no GLIBC_2.38, because the wheel was built on a later one",
        ),
        (
            ImportError("_cuda.so: undefined symbol: PyX"),
            "not loadable, the file is of another build",
        ),
        (ImportError("file too short"), "not loadable (file too short)"),
    ],
)
def test_module_that_does_not_load(error, reason):
    assert unavailable(error).startswith(reason)
