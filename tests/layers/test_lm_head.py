"""ParallelLMHead: logits, loss, likeliest words and ties against float64 on unsplit tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ops.loss_body import IGNORED, Case, close, draw, linear_oracle
from tests.oracle import digest
from tp_kernels import ParallelGroup, ShapeError, UnsupportedError
from tp_kernels.layers import ParallelLMHead, VocabParallelCrossEntropy, VocabParallelEmbedding
from tp_kernels.layers.gradients import gradient_of, use_main_grads

HIDDEN, LENGTH, BATCH = 6, 7, 2


def alike(results: list) -> None:
    assert all(result == results[0] for result in results), "ranks have different bits"


def drawn(vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [s, b, H], labels [s, b], weight [V, H], bias [V], equal on all ranks."""
    g = torch.Generator().manual_seed(vocab)
    h, w, b = (
        torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
        for shape in ((LENGTH, BATCH, HIDDEN), (vocab, HIDDEN), (vocab,))
    )
    labels = torch.randint(0, vocab, (LENGTH, BATCH), generator=g)
    labels[::3] = IGNORED
    return h, labels, w, b


def head_of(
    vocab: int, dtype: torch.dtype, group: ParallelGroup, bias: bool, **options: Any
) -> ParallelLMHead:
    _, _, w, b = drawn(vocab, dtype)
    head = ParallelLMHead(HIDDEN, vocab, bias, group=group, dtype=dtype, **options)
    head.load_dense(w, b if bias else None)
    return head


def mine(t: Tensor, group: ParallelGroup, sequence_parallel: bool, batch_first: bool) -> Tensor:
    """What a layer takes of t [s, b, ...]: own rows, in its layout."""
    t = t.tensor_split(group.size)[group.rank] if sequence_parallel else t
    return t.transpose(0, 1) if batch_first else t


def of_rank(whole: Tensor, head: ParallelLMHead) -> Tensor:
    return head.placements["weight"].slice(whole)


def logits_and_loss(vocab: int, dtype: torch.dtype, sequence_parallel: bool) -> list[str]:
    """Every way to a loss, and all its gradients, in both layouts."""
    provider = "none" if dtype == torch.float64 else "auto"
    case = Case(leading=(LENGTH, BATCH), vocab=vocab, hidden=HIDDEN, dtype=dtype, smoothing=0.1)
    _, labels, hidden, weight, bias, upstream = draw(case)
    digests = []
    with ParallelGroup(timeout=30, provider=provider) as group:
        exact, allowed = linear_oracle(case, labels.flatten(), group.size)
        for batch_first in (False, True):
            layout = (group, sequence_parallel, batch_first)
            options = {"sequence_parallel": sequence_parallel, "batch_first": batch_first}
            y = labels.t() if batch_first else labels
            rows = LENGTH if sequence_parallel else None
            for way in ("loss", "divided", "gathered"):
                options["gather_output"] = way == "gathered"
                head = ParallelLMHead(HIDDEN, vocab, True, group=group, dtype=dtype, **options)
                head.load_dense(weight, bias)
                x = mine(hidden, *layout).detach().requires_grad_()
                if way == "loss":
                    loss = head.loss(x, y, label_smoothing=0.1, chunk_rows=3)
                elif way == "divided":
                    module = VocabParallelCrossEntropy(vocab, group=group, label_smoothing=0.1)
                    loss = module(head(x, rows), y)
                else:
                    logits = head(x, rows)
                    assert logits.shape == (*y.shape, vocab)
                    loss = nn.functional.cross_entropy(
                        logits.flatten(0, 1), y.flatten(), label_smoothing=0.1
                    )
                loss.backward(upstream)
                results = {"loss": loss.detach(), "h": x.grad}
                results |= {"w": head.weight.grad, "b": head.bias.grad}
                for name, value in results.items():
                    wanted, bound = exact[name], allowed[name]
                    if name == "h":
                        wanted, bound = mine(wanted, *layout), mine(bound, *layout)
                    elif name != "loss":
                        place = head.placements["weight" if name == "w" else "bias"]
                        wanted, bound = place.slice(wanted), place.slice(bound)
                    close(value, wanted, bound, way, batch_first, name)
                shared = (loss,) if sequence_parallel else (loss, x.grad)
                digests.append(digest(*shared))
    return digests


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_logits_and_loss(world, dtype, sequence_parallel, size):
    for vocab in (2, 11):
        alike(world(size).run(logits_and_loss, vocab, dtype, sequence_parallel))


def likeliest(vocab: int, sequence_parallel: bool, batch_first: bool) -> list[str]:
    """As torch.argmax of all logits: of ties the first, and NaN before all."""
    with ParallelGroup(timeout=30) as group:
        h, _, w, b = drawn(vocab, torch.float32)
        w[vocab // 2] = w[0]  # a tie of words of different ranks
        b[:] = 0
        b[[0, vocab // 2]] = 4.0
        layout = (group, sequence_parallel, batch_first)
        options = {"sequence_parallel": sequence_parallel, "batch_first": batch_first}
        rows = LENGTH if sequence_parallel else None
        head = head_of(vocab, torch.float32, group, True, **options)
        words = []
        for value in (None, math.nan, -math.inf):
            if value is not None:
                b[vocab - 1] = value
            if value == -math.inf:
                b[:] = -math.inf
            head.load_dense(w, b)
            with torch.no_grad():
                wanted = head(mine(h, *layout), rows).argmax(-1)
            found = head.argmax(mine(h, *layout), rows)
            assert found.dtype == torch.int64 and torch.equal(found, wanted), (value, found, wanted)
            words.append(found)
        assert (words[0] == 0).any() and (words[1] == vocab - 1).all() and not words[2].any()
        return [digest(found) for found in words]


@pytest.mark.parametrize("vocab", [2, 11])
@pytest.mark.parametrize("layout", [(False, True), (True, False), (True, True)])
def test_argmax(world, vocab, layout):
    for size in (1, 3):
        alike(world(size).run(likeliest, vocab, *layout))


class Tied(nn.Module):
    def __init__(self, vocab: int, group: ParallelGroup, sequence_parallel: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel}
        self.embedding = VocabParallelEmbedding(vocab, HIDDEN, **options)
        self.head = ParallelLMHead(HIDDEN, vocab, **options)
        self.head.tie(self.embedding)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.head.loss(self.embedding(ids).sin(), labels, z_loss=0.01)


def tied(vocab: int, sequence_parallel: bool, main_grad: bool) -> list[str]:
    """One table looked up and multiplied with: its gradient is the sum, in grad or in main_grad."""
    with ParallelGroup(timeout=30) as group:
        torch.manual_seed(1)
        model = Tied(vocab, group, sequence_parallel)
        assert len(list(model.parameters())) == 1
        table = model.head.placements["weight"].gather(model.head.weight).double().requires_grad_()
        if main_grad:
            use_main_grads(model)
        _, labels, _, _ = drawn(vocab, torch.float32)
        ids = torch.arange(LENGTH * BATCH).view(LENGTH, BATCH) % vocab
        loss = model(ids, labels)
        loss.backward()
        z = nn.functional.embedding(ids, table).sin() @ table.t()
        counts = labels != IGNORED
        exact = nn.functional.cross_entropy(
            z.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        exact = (exact + 0.01 * (z.logsumexp(-1).square() * counts).sum()) / counts.sum()
        exact.backward()
        gradient = gradient_of(model.head.weight)
        assert (gradient is model.head.weight.grad) != main_grad
        wanted = of_rank(table.grad, model.head)
        # Sums of LENGTH * BATCH + H + V terms below 4 in float32.
        tolerance = 4 * (LENGTH * BATCH + HIDDEN + vocab) * torch.finfo(torch.float32).eps
        assert abs(float(loss) - float(exact)) <= tolerance
        torch.testing.assert_close(gradient.double(), wanted, rtol=0, atol=tolerance)
        return [digest(loss)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("main_grad", [False, True])
def test_tied(world, sequence_parallel, main_grad):
    for size in (1, 2, 3):
        for vocab in (2, 13):
            alike(world(size).run(tied, vocab, sequence_parallel, main_grad))


def passed_at_call() -> None:
    """weight= instead of the layer's own, which then has no gradient."""
    with ParallelGroup(timeout=30) as group:
        h, labels, _, _ = drawn(11, torch.float32)
        head, own = (
            head_of(11, torch.float32, group, False),
            head_of(11, torch.float32, group, False),
        )
        with torch.no_grad():
            head.weight.zero_()
        other = own.weight.detach().clone().requires_grad_()
        loss, wanted = head.loss(h, labels, weight=other), own.loss(h, labels)
        assert torch.equal(loss, wanted)
        loss.backward()
        wanted.backward()
        assert head.weight.grad is None and torch.equal(other.grad, own.weight.grad)
        assert torch.equal(head(h, weight=other), own(h))
        assert torch.equal(head.argmax(h, weight=other), own.argmax(h))
        half = ParallelLMHead(HIDDEN, 11, group=group, out_dtype=torch.bfloat16)
        assert half(h).dtype == torch.bfloat16


def test_weight_passed_at_call(world):
    world(2).run(passed_at_call)


def test_refusals():
    group = ParallelGroup()
    head = ParallelLMHead(4, 5, group=group)
    x, labels = torch.randn(3, 2, 4), torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(UnsupportedError, match="rows="):
        head.argmax(x, rows=3)
    with pytest.raises(ShapeError, match=r"labels are \(2, 3\)"):
        head.loss(x, labels.t())
    with pytest.raises(ShapeError, match=r"weight= is \(4, 4\)"):
        head.loss(x, labels, weight=torch.ones(4, 4))
    for embedding in (
        VocabParallelEmbedding(6, 4, group=group),
        VocabParallelEmbedding(5, 3, group=group),
        VocabParallelEmbedding(5, 4, group=ParallelGroup()),
    ):
        with pytest.raises(ShapeError, match="cannot be one"):
            head.tie(embedding)
