// Launches of kernels between ranks. No torch, no Python: raw pointers, sizes and a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace tpk {

// Of a launch that exchanges data through a channel per block.
struct Grid {
  int blocks;
  int threads;
  cudaStream_t stream;
};

inline constexpr int kMostThreads = 384;  // of a block: leaves each 168 registers

inline std::runtime_error launch_error(const char* kernel, const Grid& grid, cudaError_t error) {
  return std::runtime_error(std::string(kernel) + " with " + std::to_string(grid.blocks) + " blocks of " +
                            std::to_string(grid.threads) + " threads: " + cudaGetErrorString(error));
}

// Whether `kernel` may start while the one before it in the stream still runs: where the image that runs
// has the instruction to wait for that one (await_predecessor).
template <class... Parameters>
bool starts_early(void (*kernel)(Parameters...)) {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) {
    return false;
  }
  cudaFuncAttributes attributes;
  return major >= 9 && cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess &&
         attributes.ptxVersion >= 90;
}

// Throws std::runtime_error, which names the kernel and the grid.
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), const Grid& grid,
            Arguments... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(grid.threads);
  config.stream = grid.stream;
  config.attrs = &attribute;
  config.numAttrs = starts_early(kernel) ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next call that asks would report it again
  throw launch_error(name, grid, error);
}

}  // namespace tpk
