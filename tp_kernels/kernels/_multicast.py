"""Sums and stores by the switch between GPUs (NVLink SHARP), and nothing else.

One multicast address stands for the memory of all ranks at that place:

    multimem.ld_reduce   the sum of what all ranks have there, in float32, rounded to their type
    multimem.st          to all ranks

See the PTX ISA, "multimem.ld_reduce, multimem.st, multimem.red"; for compute capability 9.0 and later. The
order of the sum is the hardware's, so it is not that of other kernels; who sums once and stores to all gives
all ranks the same bits. The interpreter, in which no such address exists, sums in the order of ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._device import INTERPRETED, narrow, widen

LINE = tl.constexpr(16)  # bytes that a thread moves at a time

if not INTERPRETED:

    @triton.jit
    def sum_and_multicast(
        table, multicast, source, target, used, TYPE: tl.constexpr, WORLD: tl.constexpr
    ):
        """Sum 16 bytes of TYPE at `source` [lanes] in all ranks' memory, to `target` in all ranks' memory.

        Byte offsets from the multicast address; where `used`.
        """
        if tl.float32 == TYPE:
            _move(multicast + source, multicast + target, used, ".add.v4.f32", ".v4.f32")
        elif tl.bfloat16 == TYPE:
            _move(
                multicast + source,
                multicast + target,
                used,
                ".add.acc::f32.v4.bf16x2",
                ".v4.bf16x2",
            )
        else:
            _move(
                multicast + source, multicast + target, used, ".add.acc::f32.v4.f16x2", ".v4.f16x2"
            )

    @triton.jit
    def _move(source, target, used, SUM: tl.constexpr, STORE: tl.constexpr):
        tl.inline_asm_elementwise(
            """{
            .reg .pred used;
            .reg .b32 a, b, c, d;
            setp.ne.s32 used, $3, 0;
            @used multimem.ld_reduce.relaxed.sys.global"""
            + SUM
            + """ {a, b, c, d}, [$1];
            @used multimem.st.relaxed.sys.global"""
            + STORE
            + """ [$2], {a, b, c, d};
            mov.b32 $0, 0;
            }""",
            "=r,l,l,r",
            [source, target, used.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

else:

    def sum_and_multicast(table, multicast, source, target, used, TYPE, WORLD):
        elements = tl.arange(0, 16 * 8 // TYPE.primitive_bitwidth)
        mask = used[:, None] & (elements >= 0)[None, :]
        total = tl.full(mask.shape, -0.0, tl.float32)  # what keeps the sign of a zero
        for owner in range(WORLD):
            base = (tl.load(table + owner) + source).to(tl.pointer_type(TYPE))
            total += widen(tl.load(base[:, None] + elements[None, :], mask=mask, other=0))
        value = narrow(total, TYPE)
        for owner in range(WORLD):
            base = (tl.load(table + owner) + target).to(tl.pointer_type(TYPE))
            tl.store(base[:, None] + elements[None, :], value, mask=mask)
