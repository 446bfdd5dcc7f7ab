"""Batches cut and outputs joined."""

from __future__ import annotations

import pytest
import torch

from tp_kernels import ShapeError
from tp_kernels.pipeline.micro_batches import MicroBatches, Whole, cut, join


def test_cut() -> None:
    x = torch.arange(10).view(5, 2)
    one, two = cut((x, {"y": [x[:, 0], 3, None, "s"], "mask": Whole(x)}, torch.tensor(7)), 2)
    assert torch.equal(one[0], x[:3]) and torch.equal(two[0], x[3:])  # as torch.tensor_split
    assert one[0].data_ptr() == x.data_ptr()  # a view
    assert one[1]["y"][1:] == two[1]["y"][1:] == [3, None, "s"]
    assert torch.equal(two[1]["y"][0], x[3:, 0]) and one[1]["mask"] is x and int(two[2]) == 7
    for rows in range(1, 9):
        for count in range(1, rows + 1):
            parts = cut(torch.arange(rows), count)
            split = torch.tensor_split(torch.arange(rows), count)
            assert [p.tolist() for p in parts] == [p.tolist() for p in split]
    assert cut(MicroBatches([1, 2]), 2) == [1, 2]
    assert cut("plain", 2) == ["plain", "plain"]


@pytest.mark.parametrize(
    ("value", "count", "words"),
    [
        (torch.zeros(3, 1), 4, "3 rows for 4 micro-batches.*at most 3 micro-batches"),
        ([torch.zeros(3), torch.zeros(4)], 2, r"tensors of \[3, 4\] rows.*Whole"),
        (MicroBatches([1]), 2, "1 values for 2 micro-batches"),
        (torch.zeros(0, 3), 1, "0 rows"),
    ],
)
def test_refused(value: object, count: int, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        cut(value, count)


def test_join() -> None:
    x = torch.arange(10).view(5, 2)
    parts = cut({"a": x, "b": (x[:, 0], "s")}, 2)
    joined = join(parts)
    assert torch.equal(joined["a"], x) and torch.equal(joined["b"][0], x[:, 0])
    assert joined["b"][1] == "s"
    assert join([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1.0, 2.0]
    assert join([1, 2]) == [1, 2] and join([None, None]) is None
