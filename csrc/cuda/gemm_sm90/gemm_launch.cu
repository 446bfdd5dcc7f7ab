#include "gemm_sm90/gemm_launch.h"

#include <stdexcept>
#include <string>

#include "driver.h"
#include "gemm_sm90/instance.h"
#include "gemm_sm90/operands.h"

namespace tpk::gemm {
namespace {

using device::Operands;

std::vector<Instance> instances() {
  return {
#define TPK_GEMM(name) name(),
#include "instances.inc"
#undef TPK_GEMM
  };
}

bool same(const Kind& x, const Kind& y) {
  return x.policy == y.policy && x.number == y.number && x.a_k_major == y.a_k_major &&
         x.b_k_major == y.b_k_major && x.block_m == y.block_m && x.block_n == y.block_n &&
         x.teams == y.teams;
}

Instance find(const Kind& kind) {
  for (const Instance& instance : instances()) {
    if (same(instance.kind, kind)) return instance;
  }
  throw std::runtime_error("no product of sm_90 has tiles of " + std::to_string(kind.block_m) + " x " +
                           std::to_string(kind.block_n) + " by " + std::to_string(kind.teams) +
                           " teams for this policy, dtype and layout");
}

using Encode = decltype(cuTensorMapEncodeTiled);

Encode& find_encoder() {
  auto* function = driver_function<Encode>("cuTensorMapEncodeTiled");
  if (function != nullptr) return *function;
  throw std::runtime_error("the CUDA driver has no cuTensorMapEncodeTiled: it is older than 12.0");
}

Encode& encoder() {
  static Encode& function = find_encoder();  // if it throws, the next call looks again
  return function;
}

// For loads of blocks of `block` rows, zero outside of the matrix.
CUtensorMap map_of(const Matrix& matrix, bool k_major, int block, NumberType number) {
  const auto k = static_cast<cuuint64_t>(matrix.k), rows = static_cast<cuuint64_t>(matrix.rows);
  const cuuint64_t sizes[2] = {k_major ? k : rows, k_major ? rows : k};
  const cuuint64_t pitch[1] = {static_cast<cuuint64_t>(matrix.pitch) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(k_major ? block : device::kBlockK)};
  const cuuint32_t steps[2] = {1, 1};
  CUtensorMap map;
  const CUresult result = encoder()(
      &map,
      number == NumberType::bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                     : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      2, reinterpret_cast<void*>(matrix.address), sizes, pitch, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled refuses a matrix of " +
                             std::to_string(matrix.rows) + " x " + std::to_string(matrix.k) +
                             " with a pitch of " + std::to_string(matrix.pitch) + ": error " +
                             std::to_string(static_cast<int>(result)));
  }
  return map;
}

Operands operands_of(const Kind& kind, const std::vector<Pair>& pairs) {
  if (pairs.empty() || pairs.size() > device::kMostPairs) {
    throw std::runtime_error(std::to_string(pairs.size()) + " pairs of operands; 1 to " +
                             std::to_string(device::kMostPairs) + " are possible");
  }
  Operands operands{};
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    operands.a[i] = map_of(pairs[i].a, kind.a_k_major, kind.block_m, kind.number);
    operands.b[i] = map_of(pairs[i].b, kind.b_k_major, kind.block_n, kind.number);
    operands.k[i] = static_cast<std::int32_t>(pairs[i].a.k);
  }
  return operands;
}

template <class Arguments>
void launch_product(const Kind& kind, const std::vector<Pair>& pairs, const Arguments& arguments,
                    const Grid& grid) {
  const Instance instance = find(kind);
  // First, because it makes the context of the device current in this thread: the encoder is of the driver
  // and fails without one, as in autograd's thread.
  cudaError_t error = cudaFuncSetAttribute(
      instance.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, instance.shared_bytes);
  if (error == cudaSuccess) {
    Operands operands = operands_of(kind, pairs);
    void* given[2] = {&operands, const_cast<Arguments*>(&arguments)};
    error = cudaLaunchKernel(instance.kernel, dim3(grid.blocks), dim3(instance.threads), given,
                             instance.shared_bytes, grid.stream);
  }
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next call that asks would report it again
  throw launch_error("a product of sm_90", grid.blocks, instance.threads, error);
}

}  // namespace

void launch_signal(const Kind& kind, const std::vector<Pair>& pairs,
                   const device::SignalArguments& arguments, const Grid& grid) {
  launch_product(kind, pairs, arguments, grid);
}
void launch_await(const Kind& kind, const std::vector<Pair>& pairs,
                  const device::AwaitArguments& arguments, const Grid& grid) {
  launch_product(kind, pairs, arguments, grid);
}
void launch_send(const Kind& kind, const std::vector<Pair>& pairs,
                 const device::SendArguments& arguments, const Grid& grid) {
  launch_product(kind, pairs, arguments, grid);
}

std::vector<Kind> kinds() {
  std::vector<Kind> all;
  for (const Instance& instance : instances()) all.push_back(instance.kind);
  return all;
}

}  // namespace tpk::gemm
