"""What a GPU and the Triton interpreter do differently, and nothing else: flags, clocks, roundings, products.

On a GPU flags are plain acquire loads and release stores at system scope, in PTX because Triton's
language has neither: its only ordered accesses are read-modify-writes, which over PCIe are not atomic with
those of another device. The interpreter knows no PTX; there the same functions are Python, on Triton's
atomics, which are real between processes.

Flags and clocks work on one lane per thread of the block: `lanes` must be 32 * num_warps long, or Triton
lets several threads do the work of one lane, and threads of one block could see different values.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret  # TRITON_INTERPRET when this module is imported

if not INTERPRETED:
    device_function = triton.jit

    @triton.jit
    def load_acquire(addresses, used, other):
        """int32 flags at `addresses` [lanes] where `used`, else `other`; orders what is read after it."""
        return tl.inline_asm_elementwise(
            """{
            .reg .pred used;
            setp.ne.s32 used, $2, 0;
            mov.b32 $0, $3;
            @used ld.acquire.sys.global.b32 $0, [$1];
            }""",
            "=&r,l,r,r",
            [addresses, used.to(tl.int32), other],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def store_release(addresses, value, used):
        """Store `value` to the flags at `addresses` [lanes] where `used`, after all this thread did."""
        tl.inline_asm_elementwise(
            """{
            .reg .pred used;
            setp.ne.s32 used, $3, 0;
            @used st.release.sys.global.b32 [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,r,r",
            [addresses, value, used.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def nanoseconds(lanes):
        """A clock that all programs of a device share, int64 per lane."""
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;",
            "=l,r",
            [lanes],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def largest(x):
        """The largest element of x [lanes], the same for every thread of the block."""
        return tl.max(x, axis=0)

    @triton.jit
    def rest():
        """Between two polls."""

    @triton.jit
    def order_before_tma():
        """What this block has seen others store is there for its loads by the tensor memory accelerator.

        Those go by another way to memory (PTX ISA, async proxy).
        """
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, 0;",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def widen(x):
        """float32 of a float32, bfloat16 or float16; exact."""
        return x.to(tl.float32)

    @triton.jit
    def narrow(x, dtype: tl.constexpr):
        """float32 rounded to `dtype`, to nearest even."""
        return x.to(dtype)

    @triton.jit
    def multiply(a, b, total):
        """total + a @ b, accumulated in float32; never with operands cut to TF32."""
        return tl.dot(a, b, total, input_precision="ieee")

else:
    from triton.runtime.interpreter import TensorHandle

    def device_function(function):
        """What kernels call. As Python functions, which cost a tenth of the interpreter's own calls."""
        return function

    def load_acquire(addresses, used, other):
        pointers = addresses.to(tl.pointer_type(tl.int32))
        seen = tl.atomic_add(pointers, 0, mask=used, sem="acquire", scope="sys")
        return tl.where(used, seen, other)

    def store_release(addresses, value, used):
        pointers = addresses.to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(pointers, value, mask=used, sem="release", scope="sys")

    def nanoseconds(lanes):
        return lanes.to(tl.int64) * 0 + time.monotonic_ns()

    def largest(x):
        return tl.full([], int(x.handle.data.max()), x.dtype.scalar)

    def rest():
        time.sleep(1e-3)  # ranks outnumber cores, and the awaited one needs one

    def order_before_tma():
        pass

    # The interpreter's own conversions lose subnormal bfloat16 and round by cutting off.
    def widen(x):
        if x.dtype != tl.bfloat16:
            return x.to(tl.float32)
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        return (bits << 16).to(tl.float32, bitcast=True)

    def narrow(x, dtype):
        if dtype != tl.bfloat16:
            return x.to(dtype)
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40
        return tl.where(x == x, rounded, quiet).to(tl.uint16).to(tl.bfloat16, bitcast=True)

    # Its own product takes the bits of a bfloat16 for an integer, and is a library's, which adds in an order
    # that depends on the sizes of tiles and on the processor. This one adds term by term.
    def multiply(a, b, total):
        left, right = widen(a).handle.data, widen(b).handle.data
        sums = left[:, :1] * right[0]
        for k in range(1, left.shape[1]):
            sums += left[:, k : k + 1] * right[k]
        return tl.tensor(TensorHandle(total.handle.data + sums, total.dtype), total.type)
