// Compiled with -mavx2 -mf16c; runs only where `available_isas` has found both.
#include <immintrin.h>

#include "convert.h"
#include "isa.h"

namespace tpk {
namespace {

constexpr std::size_t kLanes = 8;

struct Float32Vector : Float32 {
  static __m256 load(const Storage* p) { return _mm256_loadu_ps(p); }
  static void store(Storage* p, __m256 v) { _mm256_storeu_ps(p, v); }
};

struct Bfloat16Vector : Bfloat16 {
  static __m256 load(const Storage* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static void store(Storage* p, __m256 v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i term = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd);
    const __m256i high = _mm256_srli_epi32(_mm256_add_epi32(bits, term), 16);
    const __m128i half =
        _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half);
  }
};

struct Float16Vector : Float16 {
  static __m256 load(const Storage* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store(Storage* p, __m256 v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
};

__m256 canonical(__m256 v) {
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(kCanonicalNan));
  return _mm256_blendv_ps(v, nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}

template <class Element>
void reduce(const void* const* sources, std::size_t ranks, const void* bias, void* out,
            std::size_t count) {
  using Storage = typename Element::Storage;
  constexpr std::size_t kUnroll = 4;  // independent sums hide the latency of the additions
  constexpr std::size_t kBlock = kUnroll * kLanes;
  const auto at = [](const void* base, std::size_t index) {
    return static_cast<const Storage*>(base) + index;
  };
  std::size_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    __m256 sum[kUnroll];
    for (std::size_t u = 0; u < kUnroll; ++u) {
      sum[u] = Element::load(at(sources[0], i + u * kLanes));
    }
    for (std::size_t rank = 1; rank < ranks; ++rank) {
      for (std::size_t u = 0; u < kUnroll; ++u) {
        sum[u] = _mm256_add_ps(sum[u], Element::load(at(sources[rank], i + u * kLanes)));
      }
    }
    if (bias != nullptr) {
      for (std::size_t u = 0; u < kUnroll; ++u) {
        sum[u] = _mm256_add_ps(sum[u], Element::load(at(bias, i + u * kLanes)));
      }
    }
    for (std::size_t u = 0; u < kUnroll; ++u) {
      Element::store(static_cast<Storage*>(out) + i + u * kLanes, canonical(sum[u]));
    }
  }
  reduce_scalar<Element>(sources, ranks, bias, out, i, count);
}

}  // namespace

const Isa kAvx2Isa = {"avx2",
                      {reduce<Float32Vector>, reduce<Bfloat16Vector>, reduce<Float16Vector>}};

}  // namespace tpk
