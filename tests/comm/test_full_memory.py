"""A /dev/shm of one MiB, in a mount namespace of its own: no shared memory, no bus error, no remains.

This module is also the script that runs there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tp_kernels import ParallelGroup, UnsupportedError, launch
from tp_kernels.comm import all_reduce

SHARED_MEMORY = Path("/dev/shm")
MOUNT = "mount --make-rprivate / && mount -t tmpfs -o size=1m tmpfs /dev/shm"


def unshare(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, timeout=110
    )


def test_a_full_file_system():
    try:
        available = unshare(MOUNT)
    except FileNotFoundError:
        pytest.skip("mount namespaces are not available: no unshare")
    if available.returncode != 0:
        pytest.skip(f"mount namespaces are not available: {available.stderr.strip()}")
    done = unshare(f"{MOUNT} && exec {sys.executable} -m {__name__}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok\n"


def work() -> None:
    assert os.statvfs(SHARED_MEMORY).f_blocks * os.statvfs(SHARED_MEMORY).f_frsize == 1 << 20
    # Two ranks need three windows each.
    with ParallelGroup(timeout=30, window=128 << 10) as group:
        assert group.provider == "host", group.provider_reason
        assert torch.equal(all_reduce(torch.ones(100_000), group), torch.full((100_000,), 2.0))
        # What is left is not enough, on whichever rank one looks.
        with ParallelGroup(timeout=30, window=128 << 10) as second:
            assert second.provider == "none"
            assert "rank 0: [Errno 28]" in second.provider_reason, second.provider_reason
            assert "bytes are free" in second.provider_reason
            assert torch.equal(all_reduce(torch.ones(5), second), torch.full((5,), 2.0))
        with pytest.raises(UnsupportedError, match=r"provider='host' is not possible.*Errno 28"):
            ParallelGroup(timeout=30, window=128 << 10, provider="host")
        assert torch.equal(all_reduce(torch.ones(5), group), torch.full((5,), 2.0))
    assert list(SHARED_MEMORY.iterdir()) == []


if __name__ == "__main__":
    launch(work, 2)
    assert list(SHARED_MEMORY.iterdir()) == []
    print("ok")
