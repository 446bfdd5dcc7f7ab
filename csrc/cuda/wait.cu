#include "wait.h"

#include "collectives_launch.h"
#include "driver.h"

namespace tpk {
namespace {

__global__ void wait(const std::int32_t* flag, std::int32_t expected,
                     const __grid_constant__ Wait what, std::int64_t timeout,
                     std::int32_t* record) {
  device::wait_for(flag, expected, what, timeout, record);
}

__global__ void write(std::int32_t* flag, std::int32_t value) {
  device::store_release(flag, value);
}

// Without the early start of launch(): what waits for the flag here reads nothing itself, and what
// follows, in another library, need not know how to wait.
void check(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw launch_error(kernel, 1, 1, error);
}

}  // namespace

void launch_wait(const std::int32_t* flag, std::int32_t expected, const Wait& what,
                 std::int64_t timeout, std::int32_t* record, cudaStream_t stream) {
  wait<<<1, 1, 0, stream>>>(flag, expected, what, timeout, record);
  check("wait");
}

void write_flag(std::int32_t* flag, std::int32_t value, cudaStream_t stream) {
  static auto* const by_driver =
      driver_function<decltype(cuStreamWriteValue32)>("cuStreamWriteValue32");
  // By default the driver orders the write behind all before it, for the whole system.
  if (by_driver != nullptr &&
      by_driver(stream, reinterpret_cast<CUdeviceptr>(flag), static_cast<cuuint32_t>(value),
                CU_STREAM_WRITE_VALUE_DEFAULT) == CUDA_SUCCESS) {
    return;
  }
  write<<<1, 1, 0, stream>>>(flag, value);
  check("write_flag");
}

}  // namespace tpk
