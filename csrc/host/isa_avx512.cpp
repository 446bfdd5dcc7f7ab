// Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl; runs only where `available_isas` has
// found them.
#include <immintrin.h>

#include "tpk/convert.h"
#include "isa.h"
#include "product_vector.h"
#include "reduce_vector.h"

namespace tpk {
namespace {

constexpr __mmask32 first_lanes(std::size_t lanes) {  // lanes < 32
  return (__mmask32{1} << lanes) - 1;
}

struct Sum32 {
  __m512 first, second;
};

Sum32 canonical(Sum32 sum) {
  // True in a lane if either number is NaN. Rare, so a branch is cheaper than two selections.
  const __mmask16 any = _mm512_cmp_ps_mask(sum.first, sum.second, _CMP_UNORD_Q);
  if (__builtin_expect(any == 0, 1)) return sum;
  const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(kCanonicalNan));
  const auto select = [&](__m512 v) {
    return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), nan);
  };
  return {select(sum.first), select(sum.second)};
}

// The dtypes differ in `Convert`, which loads and stores the lanes of a mask.
template <class Convert>
struct Vector {
  using Storage = typename Convert::Storage;
  using Sum = Sum32;
  static constexpr std::size_t kLanes = 32;
  static constexpr __mmask32 kAll = ~__mmask32{0};

  static constexpr std::size_t kTile = 8;

  static Sum add(Sum a, Sum b) {
    return {_mm512_add_ps(a.first, b.first), _mm512_add_ps(a.second, b.second)};
  }
  static Sum zero() { return {_mm512_setzero_ps(), _mm512_setzero_ps()}; }
  static Sum multiply_add(Sum sum, Sum a, Sum b) {
    return {_mm512_fmadd_ps(a.first, b.first, sum.first),
            _mm512_fmadd_ps(a.second, b.second, sum.second)};
  }
  static float total(Sum sum) { return _mm512_reduce_add_ps(_mm512_add_ps(sum.first, sum.second)); }
  static Sum load(const Storage* p) { return Convert::load(p, kAll); }
  static void store(Storage* p, Sum sum) { Convert::store(p, canonical(sum), kAll); }
  static Sum load_part(const Storage* p, std::size_t lanes) {
    return Convert::load(p, first_lanes(lanes));
  }
  static void store_part(Storage* p, Sum sum, std::size_t lanes) {
    Convert::store(p, canonical(sum), first_lanes(lanes));
  }
};

__mmask16 lower(__mmask32 mask) { return static_cast<__mmask16>(mask); }
__mmask16 upper(__mmask32 mask) { return static_cast<__mmask16>(mask >> 16); }

struct Float32Convert {
  using Storage = float;
  static Sum32 load(const float* p, __mmask32 mask) {
    return {_mm512_maskz_loadu_ps(lower(mask), p), _mm512_maskz_loadu_ps(upper(mask), p + 16)};
  }
  static void store(float* p, Sum32 sum, __mmask32 mask) {
    _mm512_mask_storeu_ps(p, lower(mask), sum.first);
    _mm512_mask_storeu_ps(p + 16, upper(mask), sum.second);
  }
};

// Even elements in `first`, odd ones in `second`: either half of a 32-bit lane becomes a float32 in
// one operation.
struct Bfloat16Convert {
  using Storage = std::uint16_t;
  static Sum32 load(const Storage* p, __mmask32 mask) {
    const __m512i both = _mm512_maskz_loadu_epi16(mask, p);
    const __m512i odd = _mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), _mm512_castsi512_ps(odd)};
  }
  static void store(Storage* p, Sum32 sum, __mmask32 mask) {
    const __m512i even = _mm512_srli_epi32(rounded(sum.first), 16);
    _mm512_mask_storeu_epi16(p, mask, _mm512_mask_mov_epi16(even, 0xaaaaaaaa, rounded(sum.second)));
  }
  static __m512i rounded(__m512 v) {  // in the upper halves
    const __m512i bits = _mm512_castps_si512(v);
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    return _mm512_mask_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd, bits,
                                 _mm512_set1_epi32(0x8000));
  }
};

struct Float16Convert {
  using Storage = std::uint16_t;
  static Sum32 load(const Storage* p, __mmask32 mask) {
    return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lower(mask), p)),
            _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(upper(mask), p + 16))};
  }
  static void store(Storage* p, Sum32 sum, __mmask32 mask) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT;
    _mm256_mask_storeu_epi16(p, lower(mask), _mm512_cvtps_ph(sum.first, kNearest));
    _mm256_mask_storeu_epi16(p + 16, upper(mask), _mm512_cvtps_ph(sum.second, kNearest));
  }
};

}  // namespace

const Isa kAvx512Isa = {"avx512",
                        {reduce<Vector<Float32Convert>>, reduce<Vector<Bfloat16Convert>>,
                         reduce<Vector<Float16Convert>>},
                        {product<Vector<Float32Convert>, Float32>,
                         product<Vector<Bfloat16Convert>, Bfloat16>,
                         product<Vector<Float16Convert>, Float16>}};

}  // namespace tpk
