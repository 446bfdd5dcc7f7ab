#include "device_info.h"

#include "driver.h"

namespace tpk {

namespace {

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
