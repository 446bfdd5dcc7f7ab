// Operands as the device loads them.
#pragma once

#include "gemm_sm90/arguments.h"

#if defined(__CUDACC__)
#include <cuda.h>
#else
#include "simt_hopper.h"
#endif

namespace tpk::device {

#if defined(__CUDACC__)
using TensorMap = CUtensorMap;
#else
using simt::TensorMap;
#endif

// Which dimension of an operand is contiguous: that of the sum (K), or its rows.
enum class Major { K, MN };

// Numbers of the sum in a stage.
inline constexpr int kBlockK = 64;

// Pairs of operands a [M, K] and b [N, K] of one dtype and layout.
struct Operands {
  TensorMap a[kMostPairs];
  TensorMap b[kMostPairs];
  std::int32_t k[kMostPairs];
};

}  // namespace tpk::device
