"""The kernels that `make gpu-check` runs between ranks: how each is called, and what its results have to be.

A kernel is added by an entry in one of these modules; everything else (worlds, dtypes, virtual ranks,
processes, graphs) goes over this table.
"""

from __future__ import annotations

import torch

from tests.gpu import collectives, gathers, losses, native, products

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

KERNELS = {**collectives.KERNELS, **products.KERNELS, **gathers.KERNELS, **losses.KERNELS}
# Those that the interpreter cannot run as well.
ALL_KERNELS = {**KERNELS, **native.KERNELS}
