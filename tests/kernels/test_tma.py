"""Loads by the tensor memory accelerator, which the interpreter imitates; compiled in test_aot.py."""

from __future__ import annotations

import torch

from tests.kernels import tma_body as body
from tests.kernels.body import REAL
from tp_kernels.kernels._gemm import TILINGS, tma


def test_same_bits(interpreted):
    interpreted(2).run(body.same_bits, REAL)


def test_only_where_asked_and_aligned():
    asked = TILINGS[90, 2, "many"]
    x, w = torch.zeros(4, 24).bfloat16(), torch.zeros(16, 24).bfloat16()
    assert tma(TILINGS[80, 2, "many"], [x], [w]) == ""
    assert tma(asked, [x], [w]) == "inner inner"
    assert tma(asked, [x], [w.t().contiguous().t()]) == "inner rows"
    assert tma(asked, [x.t()], [w.t()]) == "rows rows"
    assert tma(asked, [x[:1].expand(4, 24)], [w]) == "", "one row four times"
    for bad in (
        x[:, 1:],
        x[:, ::2],
        x.expand(4, 24)[:, :23].contiguous(),
        x.view(-1)[4:84].view(4, 20),
    ):
        assert tma(asked, [bad], [w]) == "", bad.stride()
    assert tma(asked, [x, x[:, 1:]], [w, w]) == ""
