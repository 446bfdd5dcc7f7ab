"""Compiles candidates as a rank with an sm_90 would, through a driver without a device; a process of its own.

Prints what was loaded, launched and refused as JSON. Triton keeps a driver, and what it compiled with it, for
the whole process.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tp_kernels.kernels import linear_all_reduce, workspace
from tp_kernels.planning import Hardware, ShapeClass, candidates, products

found: dict[str, list[Any]] = {"loaded": [], "launched": [], "refused": []}


class Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        found["loaded"].append([name, shared])
        return 0, 0, 0, 0, 1024  # module, function, registers, spills, threads


class Driver:
    utils = Utils()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: found["launched"].append(metadata.name)


def main() -> None:
    driver.set_active(Driver())
    x, w = torch.ones(64, 256, dtype=torch.bfloat16), torch.ones(128, 256, dtype=torch.bfloat16)
    shape = ShapeClass.of("linear_all_reduce", 64, 128, 256, torch.bfloat16, 2)
    _, small, *_ = candidates(Hardware("", 90), shape)
    space = products.workspace_shape((small,), torch.bfloat16, 2)
    local = torch.zeros(space.nbytes, dtype=torch.uint8)
    compiling = products.CompilingWorkspace(space, 0, local, [local.data_ptr()] * 2)
    # CPU tensors, which have addresses as those of a device.
    with mock.patch.object(workspace, "check_device"):
        for tiling in (small, replace(small, stages=30)):
            try:
                linear_all_reduce(x, w, compiling, tiling=tiling)
            except Exception as error:
                found["refused"].append([type(error).__name__, str(error)])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
