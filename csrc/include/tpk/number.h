// Numbers as kernels load, add and store them: lines of 16 bytes, the widest access of a thread.
// The same bits on device and host, the payload of NaNs aside.
#pragma once

#include <cstdint>

#include "tpk/channel.h"

#if !defined(__CUDACC__)
#include <cmath>

#include "tpk/convert.h"
#endif

namespace tpk::device {

inline constexpr int kLineBytes = 16;
inline constexpr int kLineWords = 4;

struct alignas(kLineBytes) Line {
  std::uint32_t words[kLineWords];
};

// Of each type of number: a word holds kPerWord of them, the first one lowest; Piece is as wide as
// one.
#if defined(__CUDACC__)

#define TPK_NUMBER_CODE __device__ __forceinline__
#define TPK_UNROLL _Pragma("unroll")
#define TPK_NO_UNROLL _Pragma("unroll 1")

TPK_NUMBER_CODE std::uint32_t as_bits(float value) { return __float_as_uint(value); }
TPK_NUMBER_CODE float as_float(std::uint32_t bits) { return __uint_as_float(bits); }
TPK_NUMBER_CODE float square_root(float value) { return __fsqrt_rn(value); }

struct Bfloat16 {
  using Piece = std::uint16_t;
  static constexpr int kPerWord = 2;
  TPK_NUMBER_CODE static void widen(std::uint32_t word, float* values) {
    values[0] = as_float(word << 16);
    values[1] = as_float(word & 0xffff0000u);
  }
  TPK_NUMBER_CODE static std::uint32_t narrow(const float* values) {
    std::uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
    return word;
  }
};

struct Float16 {
  using Piece = std::uint16_t;
  static constexpr int kPerWord = 2;
  TPK_NUMBER_CODE static void widen(std::uint32_t word, float* values) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, "
        "high; }"
        : "=f"(values[0]), "=f"(values[1])
        : "r"(word));
  }
  TPK_NUMBER_CODE static std::uint32_t narrow(const float* values) {
    std::uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
    return word;
  }
};

#else

#define TPK_NUMBER_CODE inline
#define TPK_UNROLL
#define TPK_NO_UNROLL

inline std::uint32_t as_bits(float value) { return bits_of(value); }
inline float as_float(std::uint32_t bits) { return float_of(bits); }
inline float square_root(float value) { return std::sqrt(value); }

template <class Number>
struct HalfWidth {
  using Piece = std::uint16_t;
  static constexpr int kPerWord = 2;
  static void widen(std::uint32_t word, float* values) {
    values[0] = Number::widen(static_cast<std::uint16_t>(word));
    values[1] = Number::widen(static_cast<std::uint16_t>(word >> 16));
  }
  static std::uint32_t narrow(const float* values) {
    const std::uint32_t low = Number::narrow(canonical(values[0]));
    return low | std::uint32_t{Number::narrow(canonical(values[1]))} << 16;
  }
};

using Bfloat16 = HalfWidth<tpk::Bfloat16>;
using Float16 = HalfWidth<tpk::Float16>;

#endif

struct Float32 {
  using Piece = std::uint32_t;
  static constexpr int kPerWord = 1;
  TPK_NUMBER_CODE static void widen(std::uint32_t word, float* values) {
    values[0] = as_float(word);
  }
  TPK_NUMBER_CODE static std::uint32_t narrow(const float* values) { return as_bits(values[0]); }
};

template <class Number>
inline constexpr int kPerLine = kLineWords * Number::kPerWord;

template <class Number>
TPK_NUMBER_CODE void widen(const Line& line, float* values) {
  TPK_UNROLL
  for (int i = 0; i < kLineWords; ++i) Number::widen(line.words[i], values + i * Number::kPerWord);
}

template <class Number>
TPK_NUMBER_CODE Line narrow(const float* values) {
  Line line;
  TPK_UNROLL
  for (int i = 0; i < kLineWords; ++i)
    line.words[i] = Number::narrow(values + i * Number::kPerWord);
  return line;
}

// Four numbers rounded to float8 e4m3 (to nearest even, at most 448, NaN stays), the first one
// lowest.
TPK_NUMBER_CODE std::uint32_t narrow_to_e4m3(const float* values) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint32_t word;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;"
      " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high}; }"
      : "=r"(word)
      : "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]));
  return word;
#else
  std::uint32_t word = 0;
  TPK_UNROLL
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t bits = as_bits(values[i]);
    // Below 2^-6: the sum has units of 2^-9, as subnormals have.
    const std::uint32_t subnormal = as_bits(as_float(bits & 0x7fffffff) + 16384.0f) - 0x46800000u;
    const std::uint32_t size = bits & 0x7fffffff;
    const std::uint32_t normal = (size - (120u << 23) + 0x7ffff + ((size >> 20) & 1)) >> 20;
    std::uint32_t byte = size < 0x3c800000u ? subnormal : normal;  // 2^-6
    if (size >= 0x43e00000u) byte = 0x7e;                          // 448
    if (size > 0x7f800000u) byte = 0x7f;
    word |= (byte | (bits >> 24 & 0x80)) << (8 * i);
  }
  return word;
#endif
}

}  // namespace tpk::device
