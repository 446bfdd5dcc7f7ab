// Compiled with -mavx2 -mfma -mf16c; see isa_avx2.cpp.
#include <immintrin.h>

#include "dropout_vector.h"

namespace tpk {
namespace {

struct Avx2 {
  static constexpr std::size_t kCounters = 4;
  static __m256i all(std::uint64_t value) { return _mm256_set1_epi64x(static_cast<long long>(value)); }
  // In the order in which `store` takes them.
  static __m256i counters(std::uint64_t group) {
    return _mm256_add_epi64(all(group), _mm256_setr_epi64x(0, 2, 1, 3));
  }
  static __m256i product(__m256i a, __m256i b) { return _mm256_mul_epu32(a, b); }
  static __m256i high(__m256i a) { return _mm256_srli_epi64(a, 32); }
  static __m256i differ(__m256i a, __m256i b) { return _mm256_xor_si256(a, b); }
  static void store(std::uint32_t* words, __m256i a, __m256i b, __m256i c, __m256i d) {
    const __m256i ab = _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xaa);
    const __m256i cd = _mm256_blend_epi32(c, _mm256_slli_epi64(d, 32), 0xaa);
    auto* const to = reinterpret_cast<__m256i*>(words);
    _mm256_storeu_si256(to, _mm256_unpacklo_epi64(ab, cd));
    _mm256_storeu_si256(to + 1, _mm256_unpackhi_epi64(ab, cd));
  }
};

}  // namespace

const DropoutTable kDropoutAvx2 = table_of<Avx2>();

}  // namespace tpk
