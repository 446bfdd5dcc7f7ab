// Compiled with -mavx2 -mfma -mf16c; runs only where `available_isas` has found all three.
#include <immintrin.h>

#include "tpk/convert.h"
#include "isa.h"
#include "product_vector.h"
#include "reduce_vector.h"

namespace tpk {
namespace {

struct Sum16 {
  __m256 first, second;
};

Sum16 canonical(Sum16 sum) {
  // True in a lane if either number is NaN. Rare, so a branch is cheaper than two selections.
  const __m256 any = _mm256_cmp_ps(sum.first, sum.second, _CMP_UNORD_Q);
  if (__builtin_expect(_mm256_movemask_ps(any) == 0, 1)) return sum;
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(kCanonicalNan));
  const auto select = [&](__m256 v) {
    return _mm256_blendv_ps(v, nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  };
  return {select(sum.first), select(sum.second)};
}

struct Lanes16 {
  using Sum = Sum16;
  static constexpr std::size_t kLanes = 16;
  static constexpr std::size_t kTile = 4;
  static Sum add(Sum a, Sum b) {
    return {_mm256_add_ps(a.first, b.first), _mm256_add_ps(a.second, b.second)};
  }
  static Sum zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Sum multiply_add(Sum sum, Sum a, Sum b) {
    return {_mm256_fmadd_ps(a.first, b.first, sum.first),
            _mm256_fmadd_ps(a.second, b.second, sum.second)};
  }
  static float total(Sum sum) {
    const __m256 eight = _mm256_add_ps(sum.first, sum.second);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
};

struct Float32Vector : Lanes16, OnCopy<Float32Vector, float> {
  using Storage = float;
  static Sum load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, Sum sum) {
    sum = canonical(sum);
    _mm256_storeu_ps(p, sum.first);
    _mm256_storeu_ps(p + 8, sum.second);
  }
};

// Even elements in `first`, odd ones in `second`: either half of a 32-bit lane becomes a float32 in
// one operation.
struct Bfloat16Vector : Lanes16, OnCopy<Bfloat16Vector, std::uint16_t> {
  using Storage = std::uint16_t;
  static Sum load(const Storage* p) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i odd = _mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), _mm256_castsi256_ps(odd)};
  }
  static void store(Storage* p, Sum sum) {
    sum = canonical(sum);
    const __m256i even = _mm256_srli_epi32(rounded(sum.first), 16);
    const __m256i both = _mm256_blend_epi16(even, rounded(sum.second), 0xaa);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), both);
  }
  static __m256i rounded(__m256 v) {  // in the upper halves
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last);
  }
};

struct Float16Vector : Lanes16, OnCopy<Float16Vector, std::uint16_t> {
  using Storage = std::uint16_t;
  static Sum load(const Storage* p) { return {load8(p), load8(p + 8)}; }
  static void store(Storage* p, Sum sum) {
    sum = canonical(sum);
    store8(p, sum.first);
    store8(p + 8, sum.second);
  }
  static __m256 load8(const Storage* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store8(Storage* p, __m256 v) {
    const __m128i halves = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);
  }
};

}  // namespace

const Isa kAvx2Isa = {"avx2",
                      {reduce<Float32Vector>, reduce<Bfloat16Vector>, reduce<Float16Vector>},
                      {product<Float32Vector, Float32>, product<Bfloat16Vector, Bfloat16>,
                       product<Float16Vector, Float16>}};

}  // namespace tpk
