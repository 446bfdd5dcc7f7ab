// Element conversions in plain C++. Every file that includes this is compiled for another
// instruction set; the anonymous namespace keeps the linker from using one file's copy in another.
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

// condition ? yes : no, which compilers would often make a branch that keeps a loop from vectors.
inline std::uint32_t choose(bool condition, std::uint32_t yes, std::uint32_t no) {
  return no ^ ((yes ^ no) & -std::uint32_t{condition});
}

constexpr std::uint32_t kCanonicalNan = 0x7fc00000;

inline float canonical(float value) {
  const auto magnitude = static_cast<std::int32_t>(bits_of(value) & 0x7fffffff);
  return float_of(choose(magnitude > 0x7f800000, kCanonicalNan, bits_of(value)));
}

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
    const std::int32_t rest = value & 0x7fff;
    const std::uint32_t tiny = bits_of(static_cast<float>(rest) * 0x1p-24f);
    const std::uint32_t other = (rest << 13) + (112 << 23);
    const std::uint32_t large = choose(rest >= 0x7c00, other | 0x7f800000, other);
    return float_of(choose(rest < 0x400, tiny, large) | std::uint32_t{value & 0x8000u} << 16);
  }

  static Storage narrow(float value) {
    const std::uint32_t sign = (bits_of(value) >> 16) & 0x8000;
    const std::uint32_t bits = bits_of(value) & 0x7fffffff;
    const auto size = static_cast<std::int32_t>(bits);  // whose comparisons are the cheaper ones
    // Below 2^-14: the sum has units of 2^-24, as subnormals have.
    const std::uint32_t tiny = bits_of(float_of(bits) + 0.5f) - bits_of(0.5f);
    const std::uint32_t normal = (bits - (112u << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
    const std::uint32_t finite = choose(size < 0x38800000, tiny, normal);
    const std::uint32_t huge = choose(size > 0x7f800000, 0x7e00, 0x7c00);
    return static_cast<Storage>(sign | choose(size < 0x477ff000, finite, huge));  // below 65520
  }
};

}  // namespace
}  // namespace tpk
