// Launches of kernels between ranks. No torch, no Python: raw pointers, sizes and a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "tpk/order.h"

namespace tpk {

// A block for every channel that is used.
struct Grid {
  int blocks;
  cudaStream_t stream;
};

// Of a block: what the registers of a multiprocessor are enough for without spills.
inline constexpr int kMostThreads = 384;
inline constexpr int kMostNormThreads = 256;

// For `bytes` bytes that a block moves at a time, 16 of each thread: fewer threads meet sooner.
inline int threads_for(std::int64_t bytes, int most) {
  return static_cast<int>(larger(smaller(ceil_div(bytes, 16 * 32) * 32, most), 32));
}

inline std::runtime_error launch_error(const char* kernel, int blocks, int threads,
                                       cudaError_t error) {
  return std::runtime_error(std::string(kernel) + " with " + std::to_string(blocks) +
                            " blocks of " + std::to_string(threads) +
                            " threads: " + cudaGetErrorString(error));
}

// Whether `kernel` may start while the one before it in the stream still runs: where the image that
// runs has the instruction to wait for that one (await_predecessor). Asking takes as long as a
// launch, so once.
inline bool starts_early(const void* kernel) {
  thread_local std::map<std::pair<const void*, int>, bool> known;
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  const auto found = known.find({kernel, device});
  if (found != known.end()) return found->second;
  cudaFuncAttributes attributes;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
    return false;
  }
  return known[{kernel, device}] = major >= 9 && attributes.ptxVersion >= 90;
}

// Throws std::runtime_error, which names the kernel and the grid.
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), const Grid& grid, int threads,
            std::int64_t shared_bytes, const Arguments&... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = grid.stream;
  config.attrs = &attribute;
  config.numAttrs = starts_early(reinterpret_cast<const void*>(kernel)) ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next call that asks would report it again
  throw launch_error(name, grid.blocks, threads, error);
}

}  // namespace tpk
