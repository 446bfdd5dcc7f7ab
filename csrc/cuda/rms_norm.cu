#include "rms_norm.h"

#include "collectives_launch.h"

namespace tpk {
namespace {

template <class Number>
__global__ void __launch_bounds__(kMostNormThreads, 1)
    one_shot(const __grid_constant__ NormOperands operands, std::int32_t part,
             const __grid_constant__ Workspace workspace) {
  device::all_reduce_rms_norm_one_shot<Number>(operands, part, workspace);
}

template <class Number>
__global__ void __launch_bounds__(kMostNormThreads, 1)
    two_shots(const __grid_constant__ NormOperands operands, std::int32_t part,
              const __grid_constant__ Workspace workspace) {
  device::all_reduce_rms_norm_two_shots<Number>(operands, part, workspace);
}

template <class Number>
void launch_as(Way way, const NormOperands& operands, std::int32_t part, const Workspace& workspace,
               const Grid& grid) {
  const int piece = sizeof(typename Number::Piece);
  const int threads = threads_for(std::int64_t{operands.width} * piece, kMostNormThreads);
  const std::int64_t shared = norm_shared_bytes(threads);
  if (way == Way::one_shot) {
    launch("all_reduce_rms_norm one_shot", one_shot<Number>, grid, threads, shared, operands, part,
           workspace);
  } else {
    launch("all_reduce_rms_norm two_shots", two_shots<Number>, grid, threads, shared, operands,
           part, workspace);
  }
}

}  // namespace

void launch_all_reduce_rms_norm(Way way, NumberType type, const NormOperands& operands,
                                std::int32_t part, const Workspace& workspace, const Grid& grid) {
  switch (type) {
    case NumberType::float32:
      return launch_as<device::Float32>(way, operands, part, workspace, grid);
    case NumberType::bfloat16:
      return launch_as<device::Bfloat16>(way, operands, part, workspace, grid);
    case NumberType::float16:
      return launch_as<device::Float16>(way, operands, part, workspace, grid);
  }
}

}  // namespace tpk
