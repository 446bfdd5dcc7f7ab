// Functions of the driver, which the module must not be linked to: it loads where there is none.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace tpk {

// The function as CUDA 12.0 has it; null if this driver lacks it.
template <class Function>
Function* driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<Function*>(function);
}

}  // namespace tpk
