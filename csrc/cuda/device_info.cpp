#include "device_info.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace tpk {

namespace {

// A function of the driver, which the module must not be linked to; null if this driver lacks it.
template <typename Function>
Function* driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
  return found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function*>(function) : nullptr;
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  cudaDeviceGetAttribute(&value, which, device);
  return value;
}

bool multicast(int device) {
  auto* device_get = driver_function<decltype(cuDeviceGet)>("cuDeviceGet");
  auto* get = driver_function<decltype(cuDeviceGetAttribute)>("cuDeviceGetAttribute");
  CUdevice handle = 0;
  int value = 0;
  return device_get != nullptr && get != nullptr && device_get(&handle, device) == CUDA_SUCCESS &&
         get(&value, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, handle) == CUDA_SUCCESS && value != 0;
}

Device describe(int device) {
  cudaDeviceProp properties{};
  cudaGetDeviceProperties(&properties, device);
  return {properties.name,
          10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
              attribute(cudaDevAttrComputeCapabilityMinor, device),
          attribute(cudaDevAttrMultiProcessorCount, device), multicast(device)};
}

}  // namespace

Versions versions() {
  Versions found;
  cudaRuntimeGetVersion(&found.runtime);
  cudaDriverGetVersion(&found.driver);
  return found;
}

DeviceInfo device_info() {
  DeviceInfo info;
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    info.problem = std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
  }
  for (int device = 0; device < count; ++device) {
    info.devices.push_back(describe(device));
    std::vector<bool> reached;
    for (int peer = 0; peer < count; ++peer) {
      int can = peer == device;
      if (peer != device) cudaDeviceCanAccessPeer(&can, device, peer);
      reached.push_back(can != 0);
    }
    info.peers.push_back(reached);
  }
  cudaGetLastError();  // else the next launch of this thread would report what failed here
  return info;
}

}  // namespace tpk
