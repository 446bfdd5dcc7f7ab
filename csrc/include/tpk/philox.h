// Philox4x32-10: random numbers that are a function of a key and a counter (Salmon, Moraes, Dror and Shaw,
// "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
#pragma once

#include <cstdint>

namespace tpk {
namespace {  // see convert.h

constexpr std::uint32_t kPhiloxFirst = 0xd2511f53, kPhiloxSecond = 0xcd9e8d57;
constexpr std::uint32_t kPhiloxKeySteps[2] = {0x9e3779b9, 0xbb67ae85};
constexpr int kPhiloxRounds = 10;

struct PhiloxBlock {
  std::uint32_t word[4];
};

inline PhiloxBlock philox(PhiloxBlock c, std::uint32_t k0, std::uint32_t k1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const std::uint64_t first = std::uint64_t{kPhiloxFirst} * c.word[0];
    const std::uint64_t second = std::uint64_t{kPhiloxSecond} * c.word[2];
    c = {{static_cast<std::uint32_t>(second >> 32) ^ c.word[1] ^ k0,
          static_cast<std::uint32_t>(second),
          static_cast<std::uint32_t>(first >> 32) ^ c.word[3] ^ k1,
          static_cast<std::uint32_t>(first)}};
    k0 += kPhiloxKeySteps[0];
    k1 += kPhiloxKeySteps[1];
  }
  return c;
}

// Word index % 4 of the counter (index / 4, 0), of 64 bits each.
inline std::uint32_t philox_word(std::uint64_t key, std::uint64_t index) {
  const std::uint64_t group = index / 4;
  const PhiloxBlock counter = {
      {static_cast<std::uint32_t>(group), static_cast<std::uint32_t>(group >> 32), 0, 0}};
  const auto low = static_cast<std::uint32_t>(key), high = static_cast<std::uint32_t>(key >> 32);
  return philox(counter, low, high).word[index % 4];
}

}  // namespace

}  // namespace tpk
