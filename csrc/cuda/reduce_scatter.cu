#include "reduce_scatter.h"

#include "collectives_launch.h"

namespace tpk {
namespace {

template <class Number>
__global__ void __launch_bounds__(kMostThreads, 1)
    scatter(const std::byte* x, std::byte* out, const __grid_constant__ Division division,
            std::int32_t part, const __grid_constant__ Workspace workspace) {
  device::reduce_scatter<Number>(x, out, division, part, workspace);
}

}  // namespace

void launch_reduce_scatter(NumberType type, const std::byte* x, std::byte* out,
                           const Division& division, std::int32_t part, const Workspace& workspace,
                           const Grid& grid) {
  auto* kernel = type == NumberType::float32    ? scatter<device::Float32>
                 : type == NumberType::bfloat16 ? scatter<device::Bfloat16>
                                                : scatter<device::Float16>;
  launch("reduce_scatter", kernel, grid, threads_for(part, kMostThreads), 0, x, out, division, part,
         workspace);
}

}  // namespace tpk
