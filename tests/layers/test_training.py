"""Training of the example models: the same curve however they are divided, and resumed with the same bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from examples import train as cli
from examples import training
from examples.training import Run, Settings, batch, read, train, unigram_entropy
from tp_kernels.comm import ParallelGroup, RankError, Ranks
from tp_kernels.layers import RandomStreams, finalize_gradients

TEXT = Path(__file__).parent.parent / "data" / "text.txt"
WAYS = [(2, False), (2, True), (3, False), (3, True), (4, False), (4, True)]


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    """One process with one thread: more are of no use to models as small as these."""
    with Ranks(1, threads=1) as ranks:
        yield ranks


def curve(run: list[Run]) -> torch.Tensor:
    """Losses of a run, equal on all ranks."""
    assert all(rank.losses == run[0].losses for rank in run)
    return torch.tensor(run[0].losses, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_losses_do_not_depend_on_the_division(world, alone, model):
    """200 steps in fp32 with dropout, checkpointing and clipping, on 1 to 4 ranks."""
    settings = Settings(model=model)
    assert settings.steps == 200 and settings.dropout == 0.1 and settings.checkpointing
    entropy = unigram_entropy(read(TEXT))
    unsplit = curve(alone.run(train, settings, TEXT))
    assert unsplit[-20:].mean() < entropy - 0.5, "nothing was learnt from what comes before a byte"
    for size, sequence_parallel in WAYS:
        divided = replace(settings, sequence_parallel=sequence_parallel)
        apart = (curve(world(size).run(train, divided, TEXT)) - unsplit).abs()
        assert apart.max() < 1e-4, (
            size,
            sequence_parallel,
            int(apart.argmax()),
            float(apart.max()),
        )


def broken(settings: Settings, fault: str) -> list[float]:
    """A run with something left out."""
    if fault == "finalize_gradients":
        training.finalize_gradients = lambda model: None
    else:  # streams that differ between ranks
        rank = torch.distributed.get_rank()
        training.RandomStreams = lambda seed, group: RandomStreams(
            seed + rank, group=ParallelGroup(own_group())
        )
    try:
        return train(settings, TEXT).losses
    finally:
        training.finalize_gradients, training.RandomStreams = finalize_gradients, RandomStreams


def own_group() -> torch.distributed.ProcessGroup:
    """A group of this process only, beside the world's."""
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return [torch.distributed.new_group([one]) for one in range(size)][rank]


@pytest.mark.parametrize("fault", ["finalize_gradients", "streams"])
def test_faults_are_seen(world, alone, fault):
    """Ten steps are enough to see that a reduction is missing, or that ranks drop different elements."""
    settings = Settings("gpt2", fault == "finalize_gradients", steps=10, batch=2)
    (unsplit,) = alone.run(train, replace(settings, sequence_parallel=False), TEXT)
    divided = world(2).run(broken, settings, fault)[0]
    assert max(abs(a - b) for a, b in zip(divided, unsplit.losses, strict=True)) > 1e-3


@pytest.mark.parametrize(
    ("model", "size", "sequence_parallel"), [("gpt2", 1, False), ("llama", 2, True)]
)
def test_resumed_with_the_same_bits(world, alone, tmp_path, model, size, sequence_parallel):
    """Stopped after three of six steps and continued, or not: the same losses, weights, moments, streams."""
    settings = Settings(model, sequence_parallel, steps=6, batch=2, tokens=33)
    ranks = alone if size == 1 else world(size)
    whole = ranks.run(train, settings, TEXT, save=tmp_path / "whole")
    first = ranks.run(train, settings, TEXT, stop=3, save=tmp_path / "half")
    second = ranks.run(train, settings, TEXT, resume=tmp_path / "half", save=tmp_path / "resumed")
    for rank in range(size):
        assert first[rank].losses + second[rank].losses == whole[rank].losses
        assert second[rank].start == 3
        states = [torch.load(tmp_path / name / f"rank{rank}.pt") for name in ("whole", "resumed")]
        wanted, found = (dict(leaves(state)) for state in states)
        assert wanted.keys() == found.keys()
        for name, value in wanted.items():
            same = (
                torch.equal(value, found[name]) if torch.is_tensor(value) else value == found[name]
            )
            assert same, name


def leaves(state: object, name: str = "") -> Iterator[tuple[str, object]]:
    """What a nested state holds, by path."""
    if isinstance(state, dict | list | tuple):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        for key, value in items:
            yield from leaves(value, f"{name}/{key}")
    else:
        yield name, state


def test_a_state_of_another_size_is_refused(world, alone, tmp_path):
    settings = Settings(steps=1, batch=1)
    world(2).run(train, settings, TEXT, save=tmp_path)
    with pytest.raises(RankError):
        alone.run(train, replace(settings, steps=2), TEXT, resume=tmp_path)


def test_text_and_batches():
    text = read(TEXT)
    assert text.numel() > 25_000 and int(text.max()) < 128
    assert unigram_entropy(torch.tensor([0, 0, 1, 1])) == pytest.approx(math.log(2), abs=1e-15)
    settings = Settings(batch=3, tokens=5)
    ids, labels = batch(text, settings, 7)
    assert ids.shape == labels.shape == (3, 5) and torch.equal(ids[:, 1:], labels[:, :-1])
    assert torch.equal(ids, batch(text, settings, 7)[0])
    assert not torch.equal(ids, batch(text, settings, 8)[0])
    short = text[:6]  # the only place where five bytes and their followers fit
    assert torch.equal(batch(short, settings, 0)[1], short[1:].expand(3, 5))


def test_command_line(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "WAYS", [(1, False), (2, True)])
    run = CliRunner().invoke
    short = ["--steps", "2", "--model", "gpt2"]
    shown = run(cli.app, [*short, "--tp", "2"])
    assert shown.exit_code == 0 and "unigram entropy of the text is 3.08" in shown.output
    picture = tmp_path / "curves.png"
    shown = run(cli.app, [*short, "--compare", "--picture", str(picture)])
    assert shown.exit_code == 0 and "2 ranks, SP" in shown.output
    assert "yes" in shown.output and picture.stat().st_size > 10_000
    for arguments, words in (
        (["--model", "bert"], "known are llama, gpt2"),
        (["--compare", "--tp", "2"], "leave out --tp"),
        (["--compare", "--save", str(tmp_path)], "leave out --tp"),
    ):
        shown = run(cli.app, arguments)
        assert shown.exit_code == 2 and words in " ".join(shown.output.replace("│", " ").split())


def test_losses_too_far_apart_fail(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "WAYS", [(1, False), (2, False)])
    monkeypatch.setattr(cli, "BOUND", -1.0)
    monkeypatch.setattr(cli, "draw", lambda *arguments: None)
    settings = Settings(steps=1, batch=1)
    assert cli.compare_all([settings], TEXT, tmp_path / "none.png") == 1
