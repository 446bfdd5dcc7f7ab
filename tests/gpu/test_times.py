"""Flags that are set ahead, interpreted: waits are over, and stay so from launch to launch."""

from __future__ import annotations

import torch

from tests.gpu.times import check_product, operands, preset, preset_arrivals, without_senders
from tp_kernels.kernels import WorkspaceShape, all_gather_linear
from tp_kernels.kernels._signals import CREDIT, MOST_RANKS, READY
from tp_kernels.kernels.virtual_ranks import workspaces_of_one_process


def test_flags_set_ahead(interpreted):
    interpreted(1).run(launch_alone)


def launch_alone() -> None:
    """Rank 0 of 3: programs that gather bring zeros of the peers; without them all rows are there already."""
    whole, w = operands(60, 5, 7, "cpu")
    x = whole[:20]
    shape = WorkspaceShape(3, channels=3, chunk=64)
    for arrived in (False, True):
        workspace, *_peers = workspaces_of_one_process(shape, torch.device("cpu"), timeout=1.0)
        preset(workspace, READY.value, MOST_RANKS)
        preset(workspace, CREDIT.value, MOST_RANKS)
        if arrived:
            preset_arrivals(workspace)
        for _ in range(2):
            rows = whole if arrived else torch.full_like(whole, torch.nan)
            if arrived:
                with without_senders(workspace):
                    (y,), _ = all_gather_linear(x, w, workspace, gathered=rows)
                check_product(y, whole, w)
            else:
                (y,), _ = all_gather_linear(x, w, workspace, gathered=rows)
                check_product(y[:20], x, w)
                assert not y[20:].any()
                assert torch.equal(rows[:20], x) and not rows[20:].any()
