// Collectives of any length, made of rounds: long messages move in pieces through the buffers.
//
// All ranks of the slot call the same one with the same counts; ranks that disagree get a mismatch
// fault. Sizes are in elements. `timeout` bounds every single wait, not the whole call.
#pragma once

#include <cstdint>
#include <vector>

#include "slot.h"

namespace tpk {

// Codes in descriptors; 1..15 belong to this file. Callers may pass their own code for a collective
// that is part of something larger.
enum Op : std::uint32_t { op_barrier = 1, op_all_reduce, op_reduce_scatter, op_all_gather };

// out[i] = sum over ranks of in[i], plus bias; `out` may be `in`. detail: compared over the ranks.
void all_reduce(Slot& slot, const void* in, void* out, std::uint64_t count, Dtype dtype,
                std::uint32_t op, double timeout, Shots shots = Shots::automatic, Bias bias = {},
                std::int64_t detail = 0);

// `in` holds counts[0] + counts[1] + ... elements, `out` the counts[rank] sums of this rank's part.
// Bias: to out[i], so that it must repeat within a part.
void reduce_scatter(Slot& slot, const void* in, void* out, const std::vector<std::uint64_t>& counts,
                    Dtype dtype, std::uint32_t op, double timeout, Bias bias = {});

// The inverse: `in` holds counts[rank] elements, `out` those of all ranks one after the other.
// Any dtype; `in` may be this rank's place in `out`.
void all_gather(Slot& slot, const void* in, void* out, const std::vector<std::uint64_t>& counts,
                Dtype dtype, std::uint32_t op, double timeout);

void barrier(Slot& slot, double timeout);

}  // namespace tpk
