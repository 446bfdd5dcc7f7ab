// What the products of sm_90 ask of the processor: transaction barriers, tensor loads (TMA), products of
// warpgroups (wgmma). On the device loads and products are atoms of CUTLASS; on the host
// csrc/tests/simt_hopper.h computes what all of them do, late enough that missing waits show.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "device.h"
#include "gemm_sm90/operands.h"
#include "tpk/number.h"

#if defined(__CUDACC__)
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cutlass/arch/reg_reconfig.h>
#else
#include "simt_hopper.h"
#endif

namespace tpk::device {

// Operands lie in lines of 128 bytes, 64 numbers of the contiguous dimension. The 16-byte chunks of eight
// lines are permuted together.
inline constexpr int kSwizzleBytes = 1024;

// Where the matrix units find an operand in shared memory. K-major: one panel of rows x 64. MN-major:
// panels of 64 (k) x 64 (rows), one after the other.
template <Major major>
TPK_DEVICE std::uint64_t descriptor(std::uint32_t address) {
  constexpr std::uint64_t kPanel = kBlockK * 128;  // bytes between groups of 64 rows if MN-major
  constexpr std::uint64_t leading = major == Major::K ? 1 : kPanel >> 4;
  constexpr std::uint64_t stride = kSwizzleBytes >> 4;  // between groups of eight lines
  constexpr std::uint64_t swizzle_128 = 1;
  return std::uint64_t{(address & 0x3ffff) >> 4} | leading << 16 | stride << 32 | swizzle_128 << 62;
}
// Bytes from one 16 numbers of the sum to the next.
template <Major major>
inline constexpr std::uint32_t kStepBytes = major == Major::K ? 32 : 16 * 128;
// Bytes from 64 rows of an operand to the next 64.
inline constexpr std::uint32_t kAtomBytes = 64 * 128;

#if defined(__CUDACC__)

TPK_DEVICE std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}
TPK_DEVICE void sync_warp() { __syncwarp(); }

// To global memory. Written as C++, the compiler may store a predicated line word by word.
TPK_DEVICE void store_global(std::byte* to, const Line& line) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(line.words[0]),
               "r"(line.words[1]), "r"(line.words[2]), "r"(line.words[3])
               : "memory");
}

template <int kRegisters>
TPK_DEVICE void take_registers() {
  cutlass::arch::warpgroup_reg_alloc<kRegisters>();
}
template <int kRegisters>
TPK_DEVICE void give_registers() {
  cutlass::arch::warpgroup_reg_dealloc<kRegisters>();
}

// A phase ends when `count` arrivals have come and all bytes that were announced. One waits for the
// phase of parity 0 first, then 1, 0, ...; the phase before the first, of parity 1, is over. Not CUTLASS's:
// those do not tell the compiler that memory has changed, and what passes here is also plain data.
struct Barrier {
  std::uint64_t word;

  TPK_DEVICE void init(int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&word)), "r"(count)
                 : "memory");
  }
  TPK_DEVICE void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&word)) : "memory");
  }
  TPK_DEVICE void arrive_and_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(&word)),
                 "r"(bytes)
                 : "memory");
  }
  TPK_DEVICE void wait(std::uint32_t parity) {
    std::uint32_t over = 0;
    while (!over) {
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
          " selp.b32 %0, 1, 0, p; }"
          : "=r"(over)
          : "r"(shared_address(&word)), "r"(parity)
          : "memory");
    }
  }
};
// Between initialisation of barriers and a barrier of the block.
TPK_DEVICE void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// What other units than this one's own threads load next comes after what this thread has observed.
TPK_DEVICE void fence_observed_for_loads() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

TPK_DEVICE void prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// A box of the tensor that begins at column x and row y, zero outside of the tensor.
TPK_DEVICE void load_box(const TensorMap* map, Barrier* barrier, std::byte* to, std::int32_t x,
                         std::int32_t y) {
  constexpr auto hint = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  cute::SM90_TMA_LOAD_2D::copy(map, &barrier->word, hint, to, x, y);
}

template <class Number, int N, Major a, Major b>
struct Atom;
#define TPK_ATOM(n, number, name)                                                                \
  template <Major a, Major b>                                                                    \
  struct Atom<number, n, a, b> {                                                                 \
    using type = cute::SM90::GMMA::name<                                                         \
        a == Major::K ? cute::SM90::GMMA::Major::K : cute::SM90::GMMA::Major::MN,                \
        b == Major::K ? cute::SM90::GMMA::Major::K : cute::SM90::GMMA::Major::MN>;               \
  };
TPK_ATOM(128, Bfloat16, MMA_64x128x16_F32BF16BF16_SS)
TPK_ATOM(256, Bfloat16, MMA_64x256x16_F32BF16BF16_SS)
TPK_ATOM(128, Float16, MMA_64x128x16_F32F16F16_SS)
TPK_ATOM(256, Float16, MMA_64x256x16_F32F16F16_SS)
#undef TPK_ATOM

// Products of a warpgroup, which go on beside its instructions: between `open` and the `wait` that covers
// them, nobody touches sums and operands. Of a thread's sums [N / 2], number 4 j + 2 h + e is that of row
// 16 w + l / 4 + 8 h and column 8 j + 2 (l % 4) + e, in lane l of warp w.
class Products {
 public:
  template <int kAtoms, int kCount>
  TPK_DEVICE void open(float (&sums)[kAtoms][kCount]) {
    fence(sums);
    cute::warpgroup_arrive();
  }
  // sums += a [64, 16] b [N, 16]^T
  template <class Number, int N, Major a, Major b>
  TPK_DEVICE void multiply(float (&sums)[N / 2], std::uint64_t at_a, std::uint64_t at_b) {
    multiply<typename Atom<Number, N, a, b>::type>(sums, at_a, at_b,
                                                   std::make_index_sequence<N / 2>());
  }
  TPK_DEVICE void commit() { cute::warpgroup_commit_batch(); }
  // All but the `kLeft` latest commits are done.
  template <int kLeft, int kAtoms, int kCount>
  TPK_DEVICE void wait(float (&sums)[kAtoms][kCount]) {
    cute::warpgroup_wait<kLeft>();
    fence(sums);
  }

 private:
  template <int kAtoms, int kCount>
  static TPK_DEVICE void fence(float (&sums)[kAtoms][kCount]) {
    TPK_UNROLL
    for (int i = 0; i < kAtoms * kCount; ++i) {
      cute::warpgroup_fence_operand(sums[i / kCount][i % kCount]);
    }
  }
  template <class Mma, int kCount, std::size_t... i>
  static TPK_DEVICE void multiply(float (&sums)[kCount], std::uint64_t at_a, std::uint64_t at_b,
                                  std::index_sequence<i...>) {
    Mma::fma(at_a, at_b, sums[i]..., cute::SM90::GMMA::ScaleOut::One);
  }
};

#else

using simt::Barrier;
using simt::load_box;
using simt::shared_address;
using simt::sync_warp;

template <int kRegisters>
void take_registers() {}
template <int kRegisters>
void give_registers() {}
inline void store_global(std::byte* to, const Line& line) { store(to, line); }
inline void fence_barriers() {}
inline void fence_observed_for_loads() {}
inline void prefetch(const TensorMap*) {}

class Products {
 public:
  template <int kAtoms, int kCount>
  void open(float (&)[kAtoms][kCount]) {}
  template <class Number, int N, Major a, Major b>
  void multiply(float (&sums)[N / 2], std::uint64_t at_a, std::uint64_t at_b) {
    products_.multiply<Number, N>(sums, {at_a, a == Major::K}, {at_b, b == Major::K});
  }
  void commit() { products_.commit(); }
  template <int kLeft, int kAtoms, int kCount>
  void wait(float (&)[kAtoms][kCount]) {
    products_.wait(kLeft);
  }

 private:
  simt::Products products_;
};

#endif

}  // namespace tpk::device
