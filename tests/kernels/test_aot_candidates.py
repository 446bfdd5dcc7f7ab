"""What is read from compiled candidates of the tuner: a few here, all of them in
`make aot AOT_ARGS=--candidates`."""

from __future__ import annotations

from dataclasses import replace

from tests.kernels import aot, aot_candidates


def test_what_does_not_fit_is_found(monkeypatch):
    """Another instruction, too much shared memory, and more programs than there is room for."""
    usual, good, *_ = aot_candidates.choices(90, 2, "few")
    choices = (
        usual,
        good,
        replace(usual, block_m=16),
        replace(usual, block_n=256, stages=6),
        replace(usual, programs=3 * 132),
    )
    monkeypatch.setattr(aot_candidates, "choices", lambda *_: choices)
    found = aot_candidates.check(90, 2, "few", "linear_reduce_scatter.scatter")
    nothing, small, deep, many = (notes for _, notes in found)
    assert nothing == []
    assert any("mma.sync.aligned.k16" in note for note in small)
    assert any("bytes of shared memory, at most" in note for note in deep)
    assert many == ["396 programs are not resident on 132 processors"]


def test_instructions():
    ptx = """
        wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%f1}, %rd1;
        wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1;
    """
    assert aot_candidates.instructions(ptx) == {"wgmma.mma_async.sync.aligned.k16.f32.bf16.bf16"}
    assert aot_candidates.instructions("fma.rn.f32 %f1, %f2;") == {"fma.rn.f32"}
    assert aot.MATRIX_UNITS.keys() == aot_candidates.SHARED.keys()
