// Element conversions in plain C++. Every file that includes this is compiled for another instruction
// set; the anonymous namespace keeps the linker from using one file's copy in another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tpk {
namespace {

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

constexpr std::uint32_t kCanonicalNan = 0x7fc00000;

struct Float32 {
  using Storage = float;
  static float widen(Storage value) { return value; }
  static Storage narrow(float value) { return value; }
};

struct Bfloat16 {
  using Storage = std::uint16_t;
  static float widen(Storage value) { return float_of(std::uint32_t{value} << 16); }
  // Canonical NaN passes through: the rounding term does not carry out of its low half.
  static Storage narrow(float value) {
    const std::uint32_t bits = bits_of(value);
    return static_cast<Storage>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

struct Float16 {
  using Storage = std::uint16_t;

  static float widen(Storage value) {
    const std::uint32_t sign = std::uint32_t{value & 0x8000u} << 16;
    const std::uint32_t exponent = (value >> 10) & 0x1f;
    const std::uint32_t fraction = value & 0x3ff;
    if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(fraction) * 0x1p-24f));
    if (exponent == 0x1f) return float_of(sign | 0x7f800000 | (fraction << 13));
    return float_of(sign | ((exponent + 112) << 23) | (fraction << 13));
  }

  static Storage narrow(float value) {
    const std::uint32_t sign = (bits_of(value) >> 16) & 0x8000;
    const std::uint32_t bits = bits_of(value) & 0x7fffffff;
    std::uint32_t half;
    if (bits > 0x7f800000) {
      half = 0x7e00;
    } else if (bits >= 0x477ff000) {  // 65520 and more round to infinity
      half = 0x7c00;
    } else if (bits < 0x38800000) {  // below 2^-14: the sum has units of 2^-24, as subnormals have
      half = bits_of(float_of(bits) + 0.5f) - bits_of(0.5f);
    } else {
      half = (bits - (112u << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
    }
    return static_cast<Storage>(sign | half);
  }
};

template <class Element>
void reduce_scalar(const void* const* sources, std::size_t ranks, const void* bias, void* out,
                   std::size_t begin, std::size_t end) {
  using Storage = typename Element::Storage;
  const auto load = [](const void* base, std::size_t index) {
    Storage value;
    std::memcpy(&value, static_cast<const char*>(base) + index * sizeof(value), sizeof(value));
    return Element::widen(value);
  };
  for (std::size_t i = begin; i < end; ++i) {
    float sum = load(sources[0], i);
    for (std::size_t rank = 1; rank < ranks; ++rank) sum += load(sources[rank], i);
    if (bias != nullptr) sum += load(bias, i);
    if (sum != sum) sum = float_of(kCanonicalNan);
    const Storage result = Element::narrow(sum);
    std::memcpy(static_cast<char*>(out) + i * sizeof(result), &result, sizeof(result));
  }
}

}  // namespace
}  // namespace tpk
