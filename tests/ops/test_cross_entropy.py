"""vocab_parallel_cross_entropy: against float64, bits alike, its implementations, what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.loss_body import Case, run_logits, variants
from tests.oracle import digest
from tp_kernels import ParallelGroup, ShapeError, UnsupportedError, copy_linear
from tp_kernels.ops import linear_cross_entropy, vocab_parallel_cross_entropy

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def alike(results: list) -> None:
    assert all(result == results[0] for result in results), "ranks have different bits"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(world, size, dtype):
    provider = "none" if dtype == torch.float64 else "auto"
    alike(world(size).run(run_logits, variants(Case(dtype=dtype)), provider))


@pytest.mark.parametrize("implementation", ["reference", "host"])
def test_implementations(world, implementation):
    """Both ways of the exchange bring the same numbers."""
    cases = variants(Case(smoothing=0.1))
    results = world(3).run(run_logits, cases, "auto", implementation)
    alike([*results, *world(3).run(run_logits, cases)])


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_kernels(interpreted, dtype):
    cases = [case for case in variants(Case(dtype=dtype)) if case.cap is None]
    alike(interpreted(2).run(run_logits, cases, "auto", "triton"))


def compiled() -> None:
    """Both losses in one graph, with any number of rows: the bits of eager, loss and gradients."""
    torch._dynamo.reset()
    with ParallelGroup(timeout=60) as group:
        options = {"group": group, "vocab_size": 6 * group.size, "label_smoothing": 0.1}

        def step(h: Tensor, w: Tensor, labels: Tensor) -> Tensor:
            logits = copy_linear(h, w, group=group)
            loss = vocab_parallel_cross_entropy(logits, labels, soft_cap=9.0, **options)
            rest = linear_cross_entropy(h, w, labels, reduction="none", chunk_rows=2, **options)
            return loss + rest.square().sum()

        function = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
        for rows in (5, 3, 8):
            torch.manual_seed(rows)
            results = []
            h, w = torch.randn(rows, 4), torch.randn(6, 4)
            labels = torch.randint(0, 6 * group.size, (rows,))
            for one in (step, function):
                leaves = [t.clone().requires_grad_() for t in (h, w)]
                loss = one(*leaves, labels)
                loss.backward()
                results.append(digest(loss, *(leaf.grad for leaf in leaves)))
            assert results[0] == results[1], rows


def test_compiled(world):
    world(2).run(compiled)


def refusals() -> None:
    with ParallelGroup(timeout=30) as group:
        logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, -100])
        weight, hidden = torch.randn(3, 5), torch.randn(4, 5)
        size = 3 * group.size

        def both(match: str, error: type[Exception] = ShapeError, **changed: object) -> None:
            options = {"group": group, "vocab_size": size} | changed
            y = options.pop("labels", labels)
            with pytest.raises(error, match=match):
                vocab_parallel_cross_entropy(logits, y, **options)
            with pytest.raises(error, match=match):
                linear_cross_entropy(hidden, weight, y, **options)

        for wrong in (size, -1, -99, size + 5):
            both(rf"labels \[{wrong}\] are outside", labels=torch.tensor([0, wrong, -100, 1]))
        both(r"labels \[-100\] are outside", ignore_index=-1)
        both(r"labels are \(3,\)", labels=labels[:3])
        both("int32", labels=labels.int())
        both("labels on meta", UnsupportedError, labels=labels.to("meta"))
        both("pass start=", vocab_size=4 * group.size)
        both("soft_cap=0", soft_cap=0.0)
        both("label_smoothing", label_smoothing=1.5)
        both("start=-1", start=-1)
        both("reduction='max'", UnsupportedError, reduction="max")
        both("ParallelGroup", UnsupportedError, group=None)
        options = {"group": group, "vocab_size": size}
        with pytest.raises(UnsupportedError, match="the loss has reference, host, triton"):
            vocab_parallel_cross_entropy(logits, labels, implementation="chunked", **options)
        with pytest.raises(UnsupportedError, match="no soft_cap"):
            vocab_parallel_cross_entropy(
                logits, labels, implementation="triton", soft_cap=1.0, **options
            )
        with pytest.raises(UnsupportedError, match="int64"):
            vocab_parallel_cross_entropy(logits.long(), labels, **options)
        with pytest.raises(ShapeError, match="chunk_rows=0"):
            linear_cross_entropy(hidden, weight, labels, chunk_rows=0, **options)
        with pytest.raises(ShapeError, match="its share of rows=4 is 2"):
            linear_cross_entropy(hidden, weight, labels, sequence_parallel=True, **options)
        with pytest.raises(ShapeError, match="no rows to divide"):
            linear_cross_entropy(hidden[0], weight, labels[0], sequence_parallel=True, **options)
        with ParallelGroup(timeout=30, provider="none") as apart:
            options = {"group": apart, "vocab_size": size}
            with pytest.raises(UnsupportedError, match="'host' cannot run"):
                vocab_parallel_cross_entropy(logits, labels, implementation="host", **options)
        # nothing was sent: the group still works
        assert vocab_parallel_cross_entropy(logits, labels, group=group, vocab_size=size) > 0


def test_refusals(world):
    world(2).run(refusals)


def padded_shards(vocab: int) -> list[float]:
    """Largest error of loss and gradient where all ranks have ceil(V / W) columns, the last ones padding."""
    with ParallelGroup(timeout=30, provider="none") as group:
        torch.manual_seed(1)
        width = -(-vocab // group.size)
        whole = torch.randn(5, width * group.size, dtype=torch.float64)
        labels = torch.arange(5) % vocab
        mine = whole[:, group.rank * width :][:, :width].clone().requires_grad_()
        dense = whole[:, :vocab].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(mine, labels, group=group, vocab_size=vocab)
        expected = torch.nn.functional.cross_entropy(dense, labels)
        loss.backward()
        expected.backward()
        gradient = torch.zeros_like(whole)
        gradient[:, :vocab] = dense.grad
        gradient = gradient[:, group.rank * width :][:, :width]
        return [float((loss - expected).abs()), float((mine.grad - gradient).abs().max())]


@pytest.mark.parametrize("vocab", [7, 9, 2])
def test_equal_shards_with_padding_need_no_start(world, vocab):
    for size in (2, 3, 4):
        for errors in world(size).run(padded_shards, vocab):
            assert max(errors) < 1e-15
