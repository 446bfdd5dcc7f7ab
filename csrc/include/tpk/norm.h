// What all_reduce_rms_norm works on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tpk {

// x, residual, s [rows, width] of Number, weight, bias [width]; y like s, or of float8 where there
// is a scale. bias, residual and scale may be null.
struct NormOperands {
  const std::byte* x;
  const std::byte* bias;
  const std::byte* residual;
  const std::byte* weight;
  const float* scale;
  std::byte* y;
  std::byte* s;
  std::int64_t rows;
  std::int32_t width;
  float epsilon;
};

// Shared memory of a block that sums squares: a word for each thread and each partial sum.
inline constexpr int kPartialSums = 32;

inline constexpr std::int64_t norm_shared_bytes(int threads) {
  return (threads + kPartialSums) * static_cast<std::int64_t>(sizeof(float));
}

}  // namespace tpk
