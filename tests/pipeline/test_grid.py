"""Pipelines of tensor-parallel stages, and replicas of pipelines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tp_kernels import GroupMismatchError, PeerLostError, ShapeError
from tp_kernels.layers import (
    ColumnParallelLinear,
    LayerNorm,
    RowParallelLinear,
    full_tensors,
    gradient_of,
    load_full_state_dict,
    use_main_grads,
)
from tp_kernels.pipeline import (
    Grid,
    MicroBatches,
    PipelineCommunicator,
    PipelineError,
    PipelineRunner,
)

from .stages import make_batch, make_stages, mean_loss, mine, one_process


def places() -> None:
    """rank = (d * pipeline + s) * tensor + t; options reach the groups."""
    rank = dist.get_rank()
    for pipeline, tensor, data in ((2, 2, 1), (2, 1, 2), (1, 2, 2)):
        with Grid(pipeline, tensor, data, timeout=11.0) as grid:
            sizes = grid.pipeline.size, grid.tensor.size, grid.data.size
            assert sizes == (pipeline, tensor, data)
            d, s, t = grid.data.rank, grid.pipeline.rank, grid.tensor.rank
            assert (d * pipeline + s) * tensor + t == rank
            assert grid.tensor.timeout == 11.0
            for group, step in (
                (grid.tensor, 1),
                (grid.pipeline, tensor),
                (grid.data, tensor * pipeline),
            ):
                first = rank - group.rank * step
                assert group.ranks == list(range(first, first + step * group.size, step))
            assert f"stage rank {s}, tensor rank {t}, replica {d}" in repr(grid)
    with pytest.raises(ShapeError, match="of 6 ranks; there are 4"):
        Grid(3, 2)


def test_places(world) -> None:
    world(4).run(places)


class Divided(nn.Module):
    """A layer over the ranks of a tensor group, with a norm whose gradient they hold in parts."""

    def __init__(self, group: Any, sequence_parallel: bool, delay: bool, dtype: Any) -> None:
        super().__init__()
        options = {
            "group": group,
            "sequence_parallel": sequence_parallel,
            "delay_wgrad": delay,
            "dtype": dtype,
        }
        self.norm = LayerNorm(8, group=group, sequence_parallel=sequence_parallel, dtype=dtype)
        self.up = ColumnParallelLinear(8, 12, **options)
        self.down = RowParallelLinear(12, 8, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Undivided(nn.Module):
    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, dtype=dtype)
        self.up, self.down = nn.Linear(8, 12, dtype=dtype), nn.Linear(12, 8, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def tensor_parallel(name: str, sequence_parallel: bool, delay: bool, main: bool) -> None:
    """2 stages x 2 tensor ranks: gradients, two steps of accumulation, and the clipped norm."""
    dtype = torch.float64
    with Grid(2, tensor=2, timeout=30) as grid, PipelineCommunicator(grid.pipeline) as channel:
        torch.manual_seed(0)
        one = [Undivided(dtype) for _ in range(2)]
        own = Divided(grid.tensor, sequence_parallel, delay, dtype)
        load_full_state_dict(own, one[channel.rank].state_dict())
        if main:
            use_main_grads(own)
        torch.manual_seed(1)
        x, target = torch.randn(6, 4, 8, dtype=dtype), torch.randn(6, 4, 8, dtype=dtype)
        mine_ = slice(2 * grid.tensor.rank, 2 * grid.tensor.rank + 2)
        part = (lambda t: t[:, mine_]) if sequence_parallel else (lambda t: t)
        scale = 1.0 if sequence_parallel else 0.5
        runner = PipelineRunner(
            own, name, channel, lambda y, t: squares(y, t) * scale, micro_batches=3, scale="sum"
        )
        for _ in range(2):
            for b in range(0, 6, 2):
                squares(one[1](one[0](x[b : b + 2])), target[b : b + 2]).backward()
            pieces = [part(x[b : b + 2]).transpose(0, 1) for b in range(0, 6, 2)]
            wanted = [part(target[b : b + 2]).transpose(0, 1) for b in range(0, 6, 2)]
            losses = runner.step(MicroBatches(pieces), target=MicroBatches(wanted))
        assert len(losses.each) == 3
        factor = 1.0 if sequence_parallel else 2.0  # the loss above is a half on each of two ranks
        norm = runner.clip_grad_norm_(1e9)
        expected = nn.utils.clip_grad_norm_([p for s in one for p in s.parameters()], 1e9)
        torch.testing.assert_close(norm * factor, expected, rtol=1e-9, atol=0)
        with torch.no_grad():  # gathered as the parameters are
            for p in own.parameters():
                p.copy_(gradient_of(p))
        whole = dict(full_tensors(own))
        for key, p in one[channel.rank].named_parameters():
            torch.testing.assert_close(whole[key] * factor, p.grad, rtol=1e-9, atol=1e-12)
        if delay and name == "zero_bubble_h1":
            assert "up.weight: later (delay_wgrad=True)" in runner.explain()


def messages_that_do_not_fit() -> None:
    """Of tensor-parallel stages: refused with the size that is needed, which then works."""
    with Grid(2, tensor=2, timeout=10) as grid:
        x = torch.zeros(4, 64, 8, dtype=torch.float64)
        with PipelineCommunicator(grid.pipeline, buffer_bytes=1 << 18) as channel:
            own = Divided(grid.tensor, False, False, torch.float64)
            runner = PipelineRunner(own, "gpipe", channel, squares, micro_batches=1)
            runner.step(x, target=x)
            x = torch.cat([x, x, x])
            with pytest.raises((PipelineError, PeerLostError), match="buffer_bytes=327680"):
                runner.step(x, target=x)


def test_messages_that_do_not_fit(world) -> None:
    world(4).run(messages_that_do_not_fit)


def test_tensor_parallel_stages(world) -> None:
    for name in ("one_f_one_b", "zero_bubble_h1"):
        for sequence_parallel, delay, main in (
            (False, False, False),
            (True, True, False),
            (True, False, True),
        ):
            world(4).run(tensor_parallel, name, sequence_parallel, delay, main)


def replicas(name: str, scale: str, main: bool) -> None:
    """2 stages x 2 replicas that get batches of different numbers of tokens: one process with all of them."""
    with Grid(2, data=2, timeout=30) as grid, PipelineCommunicator(grid.pipeline) as channel:
        stages = make_stages(2)
        own = mine(stages, channel)
        for stage in own if main else ():
            use_main_grads(stage)
        batches = [make_batch(rows, seed) for seed, rows in enumerate((5, 3))]
        batches[1][1][0] = -100
        sums = scale == "token"
        loss_fn = token_sum if sums else mean_loss
        factor = {"token": 1 / 21, "micro_batch": 1 / 4, "sum": 1.0}[scale]
        runner = PipelineRunner(
            own, name, channel, loss_fn, micro_batches=2, scale=scale, data_parallel=grid.data
        )
        everyone = []
        for _ in range(2):  # steps accumulate
            everyone = [
                one_process(stages, batch, target, 2, loss_fn, factor) for batch, target in batches
            ]
            batch, target = batches[grid.data.rank]
            losses = runner.step(*batch, target=target)
        assert losses.each == tuple(everyone[grid.data.rank])
        total = sum(sum(each) for each in everyone) * factor
        assert losses.total == pytest.approx(total, rel=1e-12)
        for (key, p), q in zip(
            own[0].named_parameters(), stages[channel.rank].parameters(), strict=True
        ):
            torch.testing.assert_close(gradient_of(p), q.grad, rtol=1e-9, atol=1e-14, msg=key)
        bits: list[Any] = [None] * grid.data.size
        dist.all_gather_object(
            bits,
            [gradient_of(p).numpy().tobytes() for p in own[0].parameters()],
            group=grid.data.process_group,
        )
        assert bits[0] == bits[1]


def token_sum(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")


def test_replicas(world) -> None:
    for name, scale, main in (
        ("one_f_one_b", "token", False),
        ("zero_bubble_h1", "micro_batch", True),
        ("gpipe", "sum", False),
    ):
        world(4).run(replicas, name, scale, main)


def without_flush(scale: str) -> None:
    """PipeDream on 2 stages x 2 replicas: one pipeline whose micro-batches are those of both together."""
    with Grid(2, data=2, timeout=30) as grid, PipelineCommunicator(grid.pipeline) as channel:
        torch.manual_seed(0)
        stages = [nn.Linear(8, 8, dtype=torch.float64) for _ in range(2)]
        x, target = (torch.randn(6, 4, 8, dtype=torch.float64) for _ in range(2))
        sums = scale == "token"
        own, kept = [], []
        for replicas in (1, 2):
            own = mine(stages, channel)
            optimizer = torch.optim.SGD(own[0].parameters(), 0.5)
            runner = PipelineRunner(
                own,
                "pipedream",
                channel,
                lambda y, t: (y - t).square().sum() if sums else (y - t).square().mean(),
                micro_batches=3,
                scale=scale,
                count=torch.numel if sums else None,
                optimizer=optimizer,
                data_parallel=grid.data if replicas == 2 else None,
            )
            rows = slice(None) if replicas == 1 else slice(grid.data.rank, None, 2)
            batch, wanted = (MicroBatches([part[rows] for part in t.split(2)]) for t in (x, target))
            losses = runner.step(batch, target=wanted)
            kept.append((losses.total, [p.detach() for p in own[0].parameters()]))
        assert kept[0][0] == pytest.approx(kept[1][0], rel=1e-12)
        for p, q, r in zip(kept[0][1], kept[1][1], stages[channel.rank].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
            assert not torch.equal(p, r)


def test_without_flush(world) -> None:
    for scale in ("micro_batch", "token"):
        world(4).run(without_flush, scale)


def unequal_replicas() -> None:
    with Grid(2, data=2, timeout=10) as grid, PipelineCommunicator(grid.pipeline) as channel:
        runner = PipelineRunner(
            mine(make_stages(2), channel), "gpipe", channel, mean_loss, data_parallel=grid.data
        )
        batch, target = make_batch(4)
        with pytest.raises(
            GroupMismatchError, match=r"replica \d calls step with \d micro-batches"
        ):
            runner.step(*batch, target=target, micro_batches=2 + grid.data.rank)
        runner.step(*batch, target=target, micro_batches=2)


def test_unequal_replicas(world) -> None:
    world(4).run(unequal_replicas)


def a_replica_that_cannot() -> None:
    """Too few rows for one replica: all ranks of both raise, and go on with the next batch."""
    with Grid(2, data=2, timeout=10) as grid, PipelineCommunicator(grid.pipeline) as channel:
        own = mine(make_stages(2), channel)
        runner = PipelineRunner(
            own, "gpipe", channel, mean_loss, micro_batches=2, data_parallel=grid.data
        )
        batch, target = make_batch(1 + grid.data.rank)
        words = "1 rows for 2" if grid.data.rank == 0 else "since replica 0 cannot.*1 rows"
        wrong = grid.data.rank == 0
        with pytest.raises(ShapeError if wrong else PipelineError, match=words):
            runner.step(*batch, target=target)
        batch, target = make_batch(2)
        runner.step(*batch, target=target)
        # a stage of one replica raises: so do all ranks of both
        if (grid.data.rank, channel.rank) == (1, 1):
            own[0].forward = lambda *_: 1 / 0
        with pytest.raises((PipelineError, PeerLostError), match="division by zero"):
            runner.step(*batch, target=target)
        with pytest.raises(PipelineError, match="of no more use"):
            runner.step(*batch, target=target)


def test_a_replica_that_cannot(world) -> None:
    world(4).run(a_replica_that_cannot)
