"""FSDP2 around layers on a mesh of two dimensions, against plain torch on the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.layers.twins import Results, batch, compare, gradients, twins
from tp_kernels import ParallelGroup

MODES = pytest.mark.parametrize("sp", [False, True])


def sharded_again(sp: bool) -> None:
    """FSDP2 on one dimension of the mesh, our layers on the other; each half of the data on its ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    half = mesh["data"].get_local_rank()
    with ParallelGroup(mesh["tensor"], provider="none", timeout=60) as group:
        dense, block = twins(group, sp, torch.float64)
        for part in (block.block.attention, block.block.mlp, block):
            fully_shard(part, mesh=mesh["data"])
        parameters = list(block.parameters())
        assert all(isinstance(p, DTensor) and p.device_mesh == mesh["data"] for p in parameters)
        found = step(block, half)
        found |= gradients(block)
        # FSDP averages over the data: so does plain torch with half the gradient of every half
        wanted = [step(dense, i, 0.5) for i in (0, 1)][half]
        wanted["dx"] = wanted["dx"] * 2
        wanted |= gradients(dense)
        compare(found, wanted)
        # the optimizer sees what it should: a step moves every weight as in plain torch
        for module in (block, dense):
            torch.optim.SGD(module.parameters(), 0.1).step()
        found = step(block, half)
        compare(found, step(dense, half))


def step(module: nn.Module, seed: int, factor: float = 1.0) -> Results:
    x, dy = batch(torch.float64, seed)
    y = module(x.requires_grad_())
    y.backward(dy * factor)
    return {"y": y.detach(), "dx": x.grad}


@MODES
def test_fsdp(world, sp):
    world(4).run(sharded_again, sp)
