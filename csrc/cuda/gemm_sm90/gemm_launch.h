// Launches of the products of sm_90: addresses, sizes and a stream; no torch, no Python. What is asked for has
// been checked by the caller, tp_kernels/native/gemm.py.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "collectives_launch.h"
#include "gemm_sm90/arguments.h"

namespace tpk::gemm {

enum class PolicyName { signal, await_rows, await_sum, send };

// Which kernel. `teams`: 1 that shares a tile, or 2 that take turns.
struct Kind {
  PolicyName policy;
  NumberType number;
  bool a_k_major, b_k_major;
  int block_m, block_n, teams;
};

// An operand [rows, k] of 16-bit numbers: `pitch` numbers from one row to the next, or, if not k_major,
// from one k to the next; the other dimension is contiguous.
struct Matrix {
  std::uint64_t address;
  std::int64_t rows, k, pitch;
};
struct Pair {
  Matrix a, b;
};

// Throw std::runtime_error if there is no such kernel, or the driver refuses an operand or the launch.
void launch_signal(const Kind& kind, const std::vector<Pair>& pairs,
                   const device::SignalArguments& arguments, const Grid& grid);
void launch_await(const Kind& kind, const std::vector<Pair>& pairs,
                  const device::AwaitArguments& arguments, const Grid& grid);
void launch_send(const Kind& kind, const std::vector<Pair>& pairs,
                 const device::SendArguments& arguments, const Grid& grid);

std::vector<Kind> kinds();

}  // namespace tpk::gemm
