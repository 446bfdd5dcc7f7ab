"""Random streams, keys and ParallelDropout: one mask on any number of ranks, replayed and resumed exactly."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.oracle import digest
from tp_kernels import GroupMismatchError, ParallelGroup, ShapeError, UnsupportedError, split_range
from tp_kernels.layers import ParallelDropout, RandomStreams, draw_key
from tp_kernels.ops import dropout

SIZES = [1, 2, 3, 4]


def draws(streams: RandomStreams, name: str, count: int = 3) -> list[float]:
    with streams.fork(name):
        return torch.rand(count, dtype=torch.float64).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_same_and_own(world, size):
    results = world(size).run(draw_same_and_own)
    assert len({tuple(same) for same, _ in results}) == 1
    assert len({tuple(own) for _, own in results}) == size
    with ParallelGroup() as alone:
        assert draws(RandomStreams(11, group=alone), "same") == results[0][0]
        assert draws(RandomStreams(12, group=alone), "same") != results[0][0]


def draw_same_and_own() -> tuple[list[float], list[float]]:
    with ParallelGroup(timeout=30) as group:
        torch.manual_seed(group.rank)  # of no effect
        streams = RandomStreams(11, group=group)
        return draws(streams, "same"), draws(streams, "own")


def test_streams_are_independent():
    with ParallelGroup() as group:
        expected = draws(RandomStreams(1, group=group), "same", 6)
        streams = RandomStreams(1, group=group)
        streams.add("more")
        torch.manual_seed(5)
        before = torch.get_rng_state()
        assert len({tuple(draws(streams, name)) for name in ("same", "own", "more")}) == 3
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(7)
        draws(streams, "more", 2)
        assert expected[:3] + draws(streams, "same") == expected


def test_forks_nest():
    with ParallelGroup() as group:
        one, two = (RandomStreams(1, group=group) for _ in range(2))
        same, own = draws(one, "same", 9), draws(one, "own", 4)
        found: dict[str, list[float]] = {"same": [], "own": []}

        def draw(name: str, count: int) -> None:
            found[name] += torch.rand(count, dtype=torch.float64).tolist()

        torch.manual_seed(3)
        outside = torch.rand(2).tolist()
        torch.manual_seed(3)
        first = torch.rand(1).tolist()
        with two.fork("same"):
            draw("same", 2)
            with two.fork("own"):
                draw("own", 1)
                with two.fork("same"):
                    draw("same", 3)
                draw("own", 3)
            draw("same", 1)
            with two.fork("same"):
                draw("same", 2)
            draw("same", 1)
        assert found == {"same": same, "own": own}
        assert first + torch.rand(1).tolist() == outside


def test_left_by_an_exception():
    with ParallelGroup() as group:
        expected = draws(RandomStreams(1, group=group), "same", 4)
        streams = RandomStreams(1, group=group)
        before = torch.get_rng_state()
        found: list[float] = []

        def fail() -> None:
            with streams.fork("same"):
                found.extend(torch.rand(1, dtype=torch.float64).tolist())
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert torch.equal(torch.get_rng_state(), before)
        assert found + draws(streams, "same") == expected


def test_refused():
    with ParallelGroup() as group:
        streams = RandomStreams(1, group=group)
        with pytest.raises(UnsupportedError, match="no stream 'other'; there are same, own"):
            draws(streams, "other")
        with pytest.raises(UnsupportedError, match="already"):
            streams.add("own")
        state = streams.state_dict()
        with streams.fork("own"):
            for call in (streams.state_dict, lambda: streams.load_state_dict(state)):
                with pytest.raises(UnsupportedError, match="inside of fork"):
                    call()


def test_other_seeds_on_other_ranks_are_refused(world):
    world(2).run(disagree)


def disagree() -> None:
    with ParallelGroup(timeout=30) as group:
        with pytest.raises(GroupMismatchError, match=r"given seed .*\[5, 6\]"):
            RandomStreams(5 + group.rank, group=group)
        RandomStreams(5, group=group)  # the group works on


def test_resume(world):
    """Saved in the middle and loaded by another run, every stream goes on."""
    world(2).run(save_and_resume)


def save_and_resume() -> None:
    with ParallelGroup(timeout=30) as group:
        streams = RandomStreams(7, group=group)
        streams.add("mine", per_rank=True)
        layer = ParallelDropout(0.5, group=group, streams=streams)
        x = torch.ones(2, 5, 4)
        for name in ("same", "own", "mine"):
            draws(streams, name)
        layer(x)
        file = io.BytesIO()
        torch.save(streams.state_dict(), file)

        def go_on(streams: RandomStreams, layer: nn.Module) -> list[Any]:
            return [digest(layer(x)), *(draws(streams, name) for name in ("same", "own", "mine"))]

        expected = go_on(streams, layer)
        file.seek(0)
        other = RandomStreams(8, group=group)  # of another seed: the state has its own
        other.load_state_dict(torch.load(file, weights_only=True))
        assert go_on(other, ParallelDropout(0.5, group=group, streams=other)) == expected
        assert go_on(other, layer) != expected

        state = other.state_dict()
        with pytest.raises(GroupMismatchError, match="the state is of rank"):
            other.load_state_dict(state | {"rank": 1 - group.rank})
        later = other.state_dict()
        if group.rank == 1:
            draws(other, "same")
            later = other.state_dict()
        with pytest.raises(GroupMismatchError, match="different runs or steps"):
            other.load_state_dict(later)
        other.load_state_dict(state)
        other.add("newer")
        with pytest.raises(UnsupportedError, match="newer"):
            other.load_state_dict(state)


# Functions to be recomputed. Dropout of torch on a stream per rank, and of ours on the other.
class Block(nn.Module):
    def __init__(self, streams: RandomStreams | None, group: ParallelGroup) -> None:
        super().__init__()
        self.streams = streams
        self.drop = ParallelDropout(0.4, group=group, streams=streams)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x * self.weight, residual=x)
        with nullcontext() if self.streams is None else self.streams.fork("own"):
            x = nn.functional.dropout(x.sin(), 0.3)
        return self.drop(x * self.weight).cos()


def inputs(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 3, 6, generator=generator).requires_grad_() for _ in range(count)]


def outcome(
    block: Block, call: Callable[..., Tensor], order: tuple[int, ...] = (0, 1, 2)
) -> list[str]:
    """Several micro-batches forward, then backward in `order`; bits of all results, and the states after."""
    torch.manual_seed(4)
    block.weight.grad = None
    xs = inputs(len(order))
    ys = [call(block, x) for x in xs]
    torch.rand(3)  # something else goes on in between
    for i in order:
        (dw,) = torch.autograd.grad(ys[i].square().sum(), block.weight, retain_graph=True)
        ys[i].square().sum().backward()
        xs[i] = torch.cat((xs[i].grad.flatten(), dw))
    after = [torch.get_rng_state()]
    if block.streams is not None:
        after += [torch.tensor(draws(block.streams, name)) for name in ("same", "own")]
    return [digest(*ys), *(digest(x) for x in xs), digest(*after)]


def new_block(group: ParallelGroup, streamed: bool = True) -> Block:
    return Block(RandomStreams(2, group=group) if streamed else None, group)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_checkpoint_of_streams(order):
    with ParallelGroup() as group:
        plain = outcome(new_block(group), lambda block, x: block(x), order)
        block = new_block(group)
        again = outcome(block, lambda block, x: block.streams.checkpoint(block, x), order)
        assert plain == again
        keywords = lambda block, x: block.streams.checkpoint(lambda *, x: block(x), x=x)
        assert outcome(new_block(group), keywords, order) == plain


def test_checkpoints_nest():
    with ParallelGroup() as group:

        def twice(block: Block, x: Tensor, recomputed: bool) -> Tensor:
            again = block.streams.checkpoint if recomputed else lambda f, *args: f(*args)

            def outer(x: Tensor) -> Tensor:
                return block(again(block, block(x)) + 1)

            return again(outer, x)

        results = [
            outcome(new_block(group), lambda b, x, r=r: twice(b, x, r), (1, 0))
            for r in (False, True)
        ]
        assert results[0] == results[1]


def test_checkpoint_inside_of_a_fork():
    """What was drawn of the stream before, and is drawn after, is not drawn again."""
    with ParallelGroup() as group:

        def call(block: Block, x: Tensor, recomputed: bool) -> Tensor:
            again = block.streams.checkpoint if recomputed else lambda f, *args: f(*args)
            with block.streams.fork("own"):
                x = nn.functional.dropout(x, 0.2)
                x = again(lambda x: block(nn.functional.dropout(x, 0.2)), x)
                return nn.functional.dropout(x, 0.2)

        results = [
            outcome(new_block(group), lambda b, x, r=r: call(b, x, r), (1, 0))
            for r in (False, True)
        ]
        assert results[0] == results[1]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_plain_checkpoint_without_streams(world, size, reentrant):
    """torch replays its default generators, of which the keys are."""
    world(size).run(recompute_plainly, reentrant)


def recompute_plainly(reentrant: bool) -> None:
    with ParallelGroup(timeout=30) as group:
        block = new_block(group, streamed=False)
        plain = outcome(block, lambda block, x: block(x))

        def recomputed(block: Block, x: Tensor) -> Tensor:
            return checkpoint(block, x, use_reentrant=reentrant)

        if reentrant:  # knows no torch.autograd.grad
            y, x = (
                recomputed_gradients(block, recomputed),
                recomputed_gradients(block, Block.forward),
            )
            assert y == x
        else:
            assert outcome(block, recomputed) == plain


def recomputed_gradients(block: Block, call: Callable[..., Tensor]) -> str:
    torch.manual_seed(4)
    block.weight.grad = None
    (x,) = inputs(1)
    y = call(block, x)
    torch.rand(3)
    y.square().sum().backward()
    return digest(y, x.grad, block.weight.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_plain_checkpoint_with_streams_is_refused(reentrant):
    """It would draw the numbers that come next, not those of the forward."""
    with ParallelGroup() as group:
        block, (x,) = new_block(group), inputs(1)
        y = checkpoint(block, x, use_reentrant=reentrant)
        with pytest.raises(UnsupportedError, match=r"use the checkpoint\(\) of these streams"):
            y.sum().backward()
        assert outcome(block, lambda block, x: block(x))  # works on


def test_copies_draw_from_the_same_streams():
    """As copies of layers of torch do from its generator; with their own, masks would be equal."""
    with ParallelGroup() as group:
        block = new_block(group)
        other = copy.deepcopy(block)
        first = outcome(block, lambda block, x: block(x))
        assert outcome(other, lambda block, x: block(x)) != first


@pytest.mark.parametrize("size", [2, 3])
def test_keys_of_a_group(world, size):
    """Generators that have gone different ways: the key is that of rank 0, and each one another."""
    results = world(size).run(draw_keys)
    assert all(keys == results[0] for keys in results) and len(set(results[0])) == 3
    with ParallelGroup() as alone:
        torch.manual_seed(50)
        assert [int(draw_key("cpu", alone)) for _ in range(3)] == results[0]
        torch.manual_seed(50)
        assert int(draw_key("cpu")) == results[0][0]


def draw_keys() -> list[int]:
    with ParallelGroup(timeout=30) as group:
        torch.manual_seed(50 + group.rank)
        return [int(draw_key("cpu", group)) for _ in range(3)]


@pytest.mark.parametrize("size", SIZES)
def test_one_mask_on_any_number_of_ranks(world, size):
    for digests in zip(*world(size).run(drop_everywhere), strict=True):
        assert len(set(digests)) == 1  # of what every rank holds whole


def layouts() -> Iterator[tuple[bool, bool, bool | None]]:
    for streamed in (False, True):
        for parallel in (False, True):
            for batch_first in (None, False, True):
                yield streamed, parallel, batch_first


def drop_everywhere() -> list[str]:
    """Rows that divide by nothing, one per rank, fewer than ranks; values and gradients of every layout."""
    digests = []
    with ParallelGroup(timeout=30) as group:
        for rows in (7, 4, 1):
            generator = torch.Generator().manual_seed(rows)
            x, residual, dy = torch.randn(3, 2, rows, 5, generator=generator)
            for streamed, parallel, batch_first in layouts():
                if streamed:
                    streams = RandomStreams(5, group=group)
                    with streams.fork("same"):
                        key = draw_key("cpu")
                    streams = RandomStreams(5, group=group)
                else:
                    streams = None
                    torch.manual_seed(6)
                    key = draw_key("cpu")
                    torch.manual_seed(6 + group.rank)
                mask = dropout(torch.ones(2, rows, 5), 0.4, key=key)
                layer = ParallelDropout(
                    0.4,
                    group=group,
                    sequence_parallel=parallel,
                    batch_first=batch_first,
                    streams=streams,
                )
                first = not parallel if batch_first is None else batch_first
                start, stop = split_range(rows, group.size, group.rank)

                def mine(
                    t: Tensor, part=slice(start, stop), parallel=parallel, first=first
                ) -> Tensor:
                    t = t[:, part] if parallel else t
                    return t if first else t.transpose(0, 1)

                a, b = (mine(t).clone().requires_grad_() for t in (x, residual))
                y = layer(a, residual=b, rows=rows if parallel else None)
                y.backward(mine(dy))
                where = (rows, streamed, parallel, batch_first)
                torch.testing.assert_close(y, mine(x * mask + residual), msg=str(where))
                torch.testing.assert_close(a.grad, mine(dy * mask), msg=str(where))
                assert torch.equal(b.grad, mine(dy)), where
                if not parallel:
                    digests.append(digest(y, a.grad))
    return digests


def test_rows_of_parallel_dropout():
    with ParallelGroup() as group:
        layer = ParallelDropout(0.5, group=group)
        x = torch.randn(2, 3, 4)
        with pytest.raises(UnsupportedError, match="rows="):
            layer(x, rows=3)
        assert layer.eval()(x) is x and torch.equal(layer(x, residual=x), 2 * x)
        assert ParallelDropout(0.0, group=group)(x) is x
        assert layer.train()(x[0, 0]).shape == (4,)
        divided = ParallelDropout(0.5, group=group, sequence_parallel=True)
        with pytest.raises(ShapeError, match="holds 2 tokens"):
            divided(x, rows=3)
        with pytest.raises(ShapeError, match="holds 2 tokens"):
            divided.eval()(x, rows=3)
        with pytest.raises(ShapeError, match="three dimensions"):
            divided(x[0, 0])
        assert divided(x[0]).shape == (3, 4)
        for p in (-0.1, 1.5):
            with pytest.raises(UnsupportedError, match="probability"):
                ParallelDropout(p, group=group)


@pytest.mark.parametrize("size", [1, 2])
def test_compiled_is_eager_to_the_bit(world, size):
    world(size).run(compile_dropout)


def compile_dropout() -> None:
    """As one graph without streams, whose forks break it."""
    with ParallelGroup(timeout=30) as group:
        for streamed in (False, True)[: 3 - group.size]:  # streams send nothing
            results = []
            for compiled in (False, True):
                torch._dynamo.reset()
                streams = RandomStreams(3, group=group) if streamed else None
                layer = ParallelDropout(0.5, group=group, sequence_parallel=True, streams=streams)

                def step(x: Tensor, layer: nn.Module = layer) -> Tensor:
                    return layer(x.sin(), residual=x).cos()

                call = torch.compile(step, backend="aot_eager", fullgraph=not streamed)
                call = call if compiled else step
                torch.manual_seed(9)
                for rows in (3, 4):
                    x = torch.linspace(0, 1, rows * 12).view(rows, 2, 6).requires_grad_()
                    y = call(x)
                    y.sum().backward()
                    results.append(digest(y, x.grad))
            assert results[:2] == results[2:]
