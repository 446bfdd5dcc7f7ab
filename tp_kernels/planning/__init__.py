"""Which tiling a product takes on which hardware: candidates, a tuner, and a table that all ranks agree on.

    table = load(group, device)                     # once, collective
    tiling = table.tiling("linear_all_reduce", rows, n, k, dtype, world)
    kernels.linear_all_reduce(x, w, workspace, tiling=tiling)    # None: the built-in choice

`tp-kernels tune` fills the file that `load` reads. Needs Triton, as tp_kernels.kernels does.
"""

from .cache import Entry, default_path
from .groups import GroupRows, tune_groups
from .hardware import Hardware
from .products import Product, tune_product
from .table import TuningTable, load, save
from .tilings import OPERATIONS, ShapeClass, candidates, workspace_shape
from .tuner import Limits, Subject, Timing, Tuned, tune

__all__ = [
    "OPERATIONS",
    "Entry",
    "GroupRows",
    "Hardware",
    "Limits",
    "Product",
    "ShapeClass",
    "Subject",
    "Timing",
    "Tuned",
    "TuningTable",
    "candidates",
    "default_path",
    "load",
    "save",
    "tune",
    "tune_groups",
    "tune_product",
    "workspace_shape",
]
