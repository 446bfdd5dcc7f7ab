// Entries of the kernels that exchange data, and of waits: raw pointers, sizes and a stream, no
// torch. Parts are in bytes, multiples of 16 and no longer than a chunk, but where rows are meant.
// Every function launches one kernel, waits for nothing, and throws std::runtime_error where it
// could not.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "launch.h"
#include "tpk/channel.h"
#include "tpk/norm.h"
#include "tpk/order.h"

namespace tpk {

enum class NumberType { float32, bfloat16, float16 };
enum class Way { one_shot, two_shots, by_switch };

// x, out [bytes]; multicast: of `by_switch`.
void launch_all_reduce(Way way, NumberType type, const std::byte* x, std::byte* out,
                       std::int64_t bytes, std::int32_t part, std::int64_t multicast,
                       const Workspace& workspace, const Grid& grid);

// x [division.start(world)], out [division.rows(rank)].
void launch_reduce_scatter(NumberType type, const std::byte* x, std::byte* out,
                           const Division& division, std::int32_t part, const Workspace& workspace,
                           const Grid& grid);

// x [division.rows(rank)], out [division.start(world)]; addresses and sizes are multiples of
// `piece`: 1, 2, 4.
void launch_all_gather(int piece, const std::byte* x, std::byte* out, const Division& division,
                       std::int32_t part, const Workspace& workspace, const Grid& grid);

// A round takes `part` rows. way: one_shot or two_shots.
void launch_all_reduce_rms_norm(Way way, NumberType type, const NormOperands& operands,
                                std::int32_t part, const Workspace& workspace, const Grid& grid);

// The stream goes on when `flag` is at least `expected`, or when a record says why not; see wait.h.
void launch_wait(const std::int32_t* flag, std::int32_t expected, const Wait& wait,
                 std::int64_t timeout, std::int32_t* record, cudaStream_t stream);

// Store `value` to `flag` when all before it in the stream is done, and can be seen by whoever sees
// it: by the front end of the device where the driver does that, which takes no multiprocessor,
// else by a kernel.
void write_flag(std::int32_t* flag, std::int32_t value, cudaStream_t stream);

}  // namespace tpk
