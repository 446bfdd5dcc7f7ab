#include "all_gather.h"

#include "collectives_launch.h"

namespace tpk {
namespace {

template <class Piece>
__global__ void __launch_bounds__(kMostThreads, 1)
    gather(const std::byte* x, std::byte* out, const __grid_constant__ Division division,
           std::int32_t part, const __grid_constant__ Workspace workspace) {
  device::all_gather<Piece>(x, out, division, part, workspace);
}

}  // namespace

void launch_all_gather(int piece, const std::byte* x, std::byte* out, const Division& division,
                       std::int32_t part, const Workspace& workspace, const Grid& grid) {
  auto* kernel = piece == 1   ? gather<std::uint8_t>
                 : piece == 2 ? gather<std::uint16_t>
                              : gather<std::uint32_t>;
  launch("all_gather", kernel, grid, threads_for(part, kMostThreads), 0, x, out, division, part,
         workspace);
}

}  // namespace tpk
