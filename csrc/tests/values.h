// Numbers of every dtype to give to what is tested, and their bits read and written without it.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "isa.h"

namespace tpk::test {

using Bytes = std::vector<std::byte>;
using Random = std::mt19937_64;

inline constexpr std::byte kPoison{0xff};  // NaN in every dtype

inline std::size_t width_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

inline std::uint16_t load16(const std::byte* at) {
  std::uint16_t value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

// Bits of a 16-bit dtype as a number, written without the code under test.
inline double decode16(Dtype dtype, std::uint16_t bits) {
  const int exponent_bits = dtype == Dtype::bfloat16 ? 8 : 5;
  const int fraction_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return fraction ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

inline double decode(Dtype dtype, const std::byte* data, std::size_t index) {
  if (dtype != Dtype::float32) return decode16(dtype, load16(data + index * 2));
  float value;
  std::memcpy(&value, data + index * 4, sizeof(value));
  return value;
}

// Relative error of one rounding.
inline double epsilon(Dtype dtype) {
  return std::ldexp(1, dtype == Dtype::float32 ? -24 : dtype == Dtype::bfloat16 ? -8 : -11);
}

// Values of both signs between 2^-9 and 4, all fraction bits random.
inline Bytes random_values(Dtype dtype, std::size_t count, Random& random) {
  Bytes data(count * width_of(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(random());
    const std::uint32_t power = random() % 11;
    if (dtype == Dtype::float32) {
      const std::uint32_t word = (bits & 0x807fffff) | ((118 + power) << 23);
      std::memcpy(data.data() + i * 4, &word, 4);
    } else {
      const std::uint16_t word = static_cast<std::uint16_t>(
          dtype == Dtype::bfloat16 ? (bits & 0x807f) | ((118 + power) << 7)
                                   : (bits & 0x83ff) | ((6 + power) << 10));
      std::memcpy(data.data() + i * 2, &word, 2);
    }
  }
  return data;
}

inline Bytes poisoned(std::size_t bytes) { return Bytes(bytes, kPoison); }

// `value` to nearest even, written without the code under test.
inline void encode(Dtype dtype, double value, std::byte* at) {
  if (dtype == Dtype::float32) {
    const float rounded = static_cast<float>(value);
    std::memcpy(at, &rounded, 4);
    return;
  }
  const int fraction_bits = dtype == Dtype::bfloat16 ? 7 : 10;
  const int lowest = dtype == Dtype::bfloat16 ? -126 : -14;
  const double largest =
      std::ldexp(2 - std::ldexp(1, -fraction_bits), dtype == Dtype::bfloat16 ? 127 : 15);
  std::uint32_t bits;
  const double size = std::abs(value);
  if (std::isnan(value)) {
    bits = ((1u << (15 - fraction_bits)) - 1) << fraction_bits | 1u << (fraction_bits - 1);
  } else {
    const int exponent = size == 0 ? lowest : std::max(std::ilogb(size), lowest);
    const double unit = std::ldexp(1, exponent - fraction_bits);
    const double rounded = std::nearbyint(size / unit) * unit;
    if (!(rounded <= largest)) {  // also not for infinity
      bits = ((1u << (15 - fraction_bits)) - 1) << fraction_bits;
    } else {
      // Subnormal and normal numbers are one sequence, as numbers and as bits.
      bits = static_cast<std::uint32_t>(rounded / unit) +
             (static_cast<std::uint32_t>(exponent - lowest) << fraction_bits);
    }
  }
  const std::uint16_t word = static_cast<std::uint16_t>(bits | (std::signbit(value) ? 0x8000 : 0));
  std::memcpy(at, &word, 2);
}

}  // namespace tpk::test
