// Entries of the kernels that exchange data: what bindings_collectives.cpp and C++ programs call. Sizes and
// parts are in bytes; `part` is a multiple of 16 and no longer than a chunk. Every function launches one
// kernel and waits for nothing; it throws std::invalid_argument or std::runtime_error before or instead.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "launch.h"
#include "tpk/channel.h"

namespace tpk {

enum class NumberType { float32, bfloat16, float16 };
enum class Way { one_shot, two_shots, by_switch };

// x, out [bytes]; multicast: of `by_switch`.
void launch_all_reduce(Way way, NumberType type, const std::byte* x, std::byte* out,
                       std::int64_t bytes, std::int32_t part, std::int64_t multicast,
                       const Workspace& workspace, const Grid& grid);

}  // namespace tpk
