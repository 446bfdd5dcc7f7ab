// The kernels that there are. Each is one policy, dtype, layout and tile, compiled in a file of its own.
#pragma once

#include "gemm_sm90/gemm_launch.h"

namespace tpk::gemm {

struct Instance {
  Kind kind;
  const void* kernel;
  int threads;
  int shared_bytes;
};

// instances.inc, which instances.cmake writes, lists them.
#define TPK_GEMM(name) Instance name();
#include "instances.inc"
#undef TPK_GEMM

}  // namespace tpk::gemm
