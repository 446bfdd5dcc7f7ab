// Compiled with -mavx512f and more; see isa_avx512.cpp.
#include <immintrin.h>

#include "dropout_vector.h"

namespace tpk {
namespace {

struct Avx512 {
  static constexpr std::size_t kCounters = 8;
  static __m512i all(std::uint64_t value) { return _mm512_set1_epi64(static_cast<long long>(value)); }
  // In the order in which `store` takes them.
  static __m512i counters(std::uint64_t group) {
    return _mm512_add_epi64(all(group), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static __m512i product(__m512i a, __m512i b) { return _mm512_mul_epu32(a, b); }
  static __m512i high(__m512i a) { return _mm512_srli_epi64(a, 32); }
  static __m512i differ(__m512i a, __m512i b) { return _mm512_xor_si512(a, b); }
  static void store(std::uint32_t* words, __m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_mask_blend_epi32(0xaaaa, a, _mm512_slli_epi64(b, 32));
    const __m512i cd = _mm512_mask_blend_epi32(0xaaaa, c, _mm512_slli_epi64(d, 32));
    _mm512_storeu_si512(words, _mm512_unpacklo_epi64(ab, cd));
    _mm512_storeu_si512(words + 16, _mm512_unpackhi_epi64(ab, cd));
  }
};

}  // namespace

const DropoutTable kDropoutAvx512 = table_of<Avx512>();

}  // namespace tpk
