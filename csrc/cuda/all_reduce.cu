#include "all_reduce.h"

#include "collectives_launch.h"

namespace tpk {
namespace {

using device::Bfloat16;
using device::Float16;
using device::Float32;

template <class Number>
__global__ void __launch_bounds__(kMostThreads, 1)
    one_shot(const std::byte* x, std::byte* out, std::int64_t bytes, std::int32_t part,
             device::Bias bias, const __grid_constant__ Workspace workspace) {
  device::all_reduce_one_shot<Number>(x, out, bytes, part, bias, workspace);
}

template <class Number>
__global__ void __launch_bounds__(kMostThreads, 1)
    two_shots(const std::byte* x, std::byte* out, std::int64_t bytes, std::int32_t part,
              device::Bias bias, const __grid_constant__ Workspace workspace) {
  device::all_reduce_two_shots<Number>(x, out, bytes, part, bias, workspace);
}

template <class Number>
__global__ void __launch_bounds__(kMostThreads, 1)
    by_switch(const std::byte* x, std::byte* out, std::int64_t bytes, std::int32_t part,
              std::int64_t multicast, const __grid_constant__ Workspace workspace) {
  device::all_reduce_by_switch<Number>(x, out, bytes, part, multicast, workspace);
}

template <class Number>
void launch_as(Way way, const std::byte* x, std::byte* out, std::int64_t bytes, std::int32_t part,
               const device::Bias& bias, std::int64_t multicast, const Workspace& workspace,
               const Grid& grid) {
  const int threads = threads_for(part, kMostThreads);
  switch (way) {
    case Way::one_shot:
      return launch("all_reduce one_shot", one_shot<Number>, grid, threads, 0, x, out, bytes, part,
                    bias, workspace);
    case Way::two_shots:
      return launch("all_reduce two_shots", two_shots<Number>, grid, threads, 0, x, out, bytes,
                    part, bias, workspace);
    case Way::by_switch:
      return launch("all_reduce by_switch", by_switch<Number>, grid, threads, 0, x, out, bytes,
                    part, multicast, workspace);
  }
}

}  // namespace

void launch_all_reduce(Way way, NumberType type, const std::byte* x, std::byte* out,
                       std::int64_t bytes, std::int32_t part, const std::byte* bias,
                       std::int64_t width, std::int64_t multicast, const Workspace& workspace,
                       const Grid& grid) {
  const device::Bias added{bias, width};
  switch (type) {
    case NumberType::float32:
      return launch_as<Float32>(way, x, out, bytes, part, added, multicast, workspace, grid);
    case NumberType::bfloat16:
      return launch_as<Bfloat16>(way, x, out, bytes, part, added, multicast, workspace, grid);
    case NumberType::float16:
      return launch_as<Float16>(way, x, out, bytes, part, added, multicast, workspace, grid);
  }
}

}  // namespace tpk
