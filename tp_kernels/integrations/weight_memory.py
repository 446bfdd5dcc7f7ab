"""One block of memory for all weights of a rank, on huge pages where the kernel gives them.

Decoding reads every weight once per token. Single weights are smaller than a huge page, so on their own
they lie on 4 KiB pages and each token pays for a page walk every 1024 floats.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

_ALIGNMENT = 64


class WeightMemory:
    """Room for tensors of the given (shape, dtype), taken in any order; freed with the last of them."""

    def __init__(self, tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        size = sum(_padded(torch.Size(shape).numel() * dtype.itemsize) for shape, dtype in tensors)
        # Private: shared anonymous memory is a file to the kernel, which has its own page policy.
        block = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages: ordinary ones do
                block.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(block, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next contiguous tensor, aligned to a cache line; its values are zero."""
        size = torch.Size(shape).numel() * dtype.itemsize
        start, self._used = self._used, self._used + _padded(size)
        return self._bytes[start : start + size].view(dtype).view(tuple(shape))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
