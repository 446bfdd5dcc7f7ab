"""PipeDream against its definition: one process that stashes versions of the weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tp_kernels.pipeline import PipelineRunner
from tp_kernels.pipeline.generators import pipedream
from tp_kernels.pipeline.micro_batches import cut, tensors_of
from tp_kernels.pipeline.schedule import Kind
from tp_kernels.pipeline.stashing import WeightStash

from .stages import call, make_batch, make_stages, mean_loss, mine, pipeline


def optimizers(kind: str, stages: list[nn.Module]) -> list[torch.optim.Optimizer]:
    if kind == "adam":
        return [torch.optim.AdamW(s.parameters(), 0.05) for s in stages]
    return [torch.optim.SGD(s.parameters(), 0.01, momentum=0.9) for s in stages]


def simulated(
    stages: list[nn.Module],
    updates: list[torch.optim.Optimizer],
    args: Any,
    target: Tensor,
    micro_batches: int,
) -> list[float]:
    """All stages in one process, each action when its inputs are there, in the order of each stage.

    A forward runs on a whole copy of its stage, which is the stash; its backward runs on that copy, and the
    gradients go to the stage as it is by then.
    """
    made = pipedream(len(stages), micro_batches)
    orders = [list(made.order(rank)) for rank in range(len(stages))]
    inputs, targets = cut(args, micro_batches), cut(target, micro_batches)
    forwards: dict[tuple[int, int], Any] = {}  # what arrives, by stage and micro-batch
    backwards: dict[tuple[int, int], Any] = {}
    kept: dict[tuple[int, int], Any] = {}
    losses = []
    for k, value in enumerate(inputs):
        forwards[0, k] = value
    while any(orders):
        for s, order in enumerate(orders):
            if not order:
                continue
            k = order[0].micro_batch
            last = s == len(stages) - 1
            if order[0].kind is Kind.F and (s, k) in forwards:
                order.pop(0)
                version = copy.deepcopy(stages[s])
                value = forwards.pop((s, k))
                received = [x for x in tensors_of(value) if x.requires_grad]
                output = call(version, value)
                if last:
                    output = mean_loss(output, targets[k])
                    losses.append(output.item())
                    backwards[s, k] = [torch.ones_like(output)]
                else:
                    forwards[s + 1, k] = detached(output)
                kept[s, k] = version, received, [y for y in tensors_of(output) if y.requires_grad]
            elif order and order[0].kind is Kind.B and (s, k) in backwards:
                order.pop(0)
                version, received, outputs = kept.pop((s, k))
                given = backwards.pop((s, k))
                pairs = [(y, g) for y, g in zip(outputs, given, strict=True) if g is not None]
                for p in version.parameters():
                    p.grad = None
                torch.autograd.backward(*zip(*pairs, strict=True))
                if s:
                    backwards[s - 1, k] = [x.grad for x in received]
                for p, q in zip(stages[s].parameters(), version.parameters(), strict=True):
                    p.grad = q.grad
                updates[s].step()
    return losses


def detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(detached(item) for item in value)
    return value


def training(kind: str) -> None:
    """Losses and weights of several batches, bit by bit."""
    with pipeline() as channel:
        rank, ranks = channel.rank, channel.group.size
        for m in (1, 2, 2 * ranks + 1):
            stages = make_stages(ranks)
            own = mine(stages, channel)
            ours = optimizers(kind, own)[0]
            runner = PipelineRunner(
                own, "pipedream", channel, mean_loss, micro_batches=m, optimizer=ours
            )
            updates = optimizers(kind, stages)
            for step in range(2):
                batch, target = make_batch(2 * m + 1, step)
                before = [p.detach().clone() for p in own[0].parameters()]
                expected = simulated(stages, updates, batch, target, m)
                losses = runner.step(*batch, target=target)
                assert losses.each == tuple(expected), (m, step)
                assert losses.total == pytest.approx(sum(expected) / m)
                for p, q in zip(own[0].parameters(), stages[rank].parameters(), strict=True):
                    assert torch.equal(p, q), (m, step)
                assert any(
                    not torch.equal(p, q) for p, q in zip(own[0].parameters(), before, strict=True)
                )
                assert runner.eval(*batch, target=target).each != losses.each
            assert "stashes weights" in runner.explain()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_equals_its_definition(world, ranks: int) -> None:
    world(ranks).run(training, "sgd")


def test_with_an_optimizer_with_state(world) -> None:
    world(3).run(training, "adam")


def hooks() -> None:
    """Hooks of parameters run once for each micro-batch; checkpointed stages use the stashed weights too."""
    with pipeline() as channel:
        found = []
        for checkpoint in (False, True):
            own = mine(make_stages(2), channel)[0]
            seen: list[str] = []
            for key, p in own.named_parameters():
                p.register_post_accumulate_grad_hook(lambda p, key=key, seen=seen: seen.append(key))
            optimizer = torch.optim.SGD(own.parameters(), 0.1)
            runner = PipelineRunner(
                own, "pipedream", channel, mean_loss, optimizer=optimizer, checkpoint=checkpoint
            )
            batch, target = make_batch(5)
            runner.step(*batch, target=target, micro_batches=5)
            used = {key for key, p in own.named_parameters()}
            assert sorted(seen) == sorted(list(used) * 5)
            found.append([p.detach() for p in own.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_hooks_and_checkpoints(world) -> None:
    world(2).run(hooks)


def test_versions() -> None:
    """A copy for each update that micro-batches have seen the weights before; none if there are none."""
    module = nn.Linear(3, 3)
    stash = WeightStash(module)
    memory = module.weight.data_ptr()
    first = stash.take(0)
    assert first["weight"].data_ptr() == memory
    stash.give_back(0)
    stash.before_update()
    assert module.weight.data_ptr() == memory  # nobody needs the old one
    before = stash.take(1)["weight"]
    assert stash.take(2)["weight"] is before and stash.versions == 1
    stash.before_update()
    with torch.no_grad():
        module.weight.add_(1.0)
    assert not torch.equal(before, module.weight)
    assert stash.take(3)["weight"] is not before and stash.versions == 2
    stash.give_back(1)
    stash.give_back(2)
    assert stash.versions == 1
    stash.clear()
    assert stash.versions == 0
