"""What a rank says about Triton, and what the ranks make of it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from unittest import mock

import pytest

from tp_kernels import CollectiveTimeoutError, ParallelGroup, PeerLostError
from tp_kernels.comm.faults import error_from_kernel
from tp_kernels.comm.topology import HostIdentity
from tp_kernels.comm.triton_support import TritonSupport, triton_obstacle

HERE = TritonSupport(None, False, 90)


@pytest.mark.parametrize(
    ("support", "device", "reason"),
    [
        (HERE, "cuda", None),
        (replace(HERE, capability=93), "cuda", None),
        (replace(HERE, capability=86), "cuda", "ranks 0 and 1: compute capabilities 9.x and 8.x;"),
        (replace(HERE, interpreted=True), "cpu", None),
        (HERE, "cpu", "rank 1: CPU tensors need Triton's interpreter: set TRITON_INTERPRET=1"),
        (replace(HERE, missing="not installed"), "cuda", "rank 1: triton is not installed; pip"),
        (replace(HERE, interpreted=True), "cuda", "rank 1: TRITON_INTERPRET is set"),
        (replace(HERE, capability=None), "cuda", "rank 1: no CUDA device"),
        (replace(HERE, capability=75), "cuda", "rank 1: compute capability 7.5; kernels need 8.0"),
        (HERE, "xpu", "rank 0: kernels run on CUDA devices, not xpu"),
    ],
)
def test_support(support, device, reason):
    others = replace(HERE, interpreted=True) if device == "cpu" else HERE
    found = triton_obstacle([others, TritonSupport.from_json(support.to_json())], device)
    assert found is None if reason is None else found.startswith(reason)


def test_support_of_this_process():
    with mock.patch.dict(os.environ):
        os.environ.pop("TRITON_INTERPRET", None)
        assert not TritonSupport.current().interpreted
        os.environ["TRITON_INTERPRET"] = "1"
        assert TritonSupport.current().interpreted
        with mock.patch.dict(sys.modules, {"triton.knobs": None}):
            assert "not importable" in str(TritonSupport.current().missing)
    with mock.patch("tp_kernels.comm.triton_support.find_spec", return_value=None):
        assert TritonSupport.current() == TritonSupport("not installed", False, None)


@pytest.mark.parametrize("alive", [True, False])
def test_a_kernel_that_waited_for_a_dead_rank(alive):
    with ParallelGroup() as group, subprocess.Popen(["sleep", "9" if alive else "0"]) as peer:
        if not alive:
            peer.wait()
        here = HostIdentity.current()
        group.identities = [here, replace(here, pid=peer.pid)]
        error = error_from_kernel(CollectiveTimeoutError("no data"), group, "all_gather_linear")
        peer.kill()
    where = f"all_gather_linear: rank 0 of group '{group.name}'"
    if alive:
        assert type(error) is CollectiveTimeoutError and str(error) == f"{where}: no data"
    else:
        assert type(error) is PeerLostError
        assert str(error) == f"{where} lost rank 1 (process ended): no data"
