// Sums and stores by the switch between GPUs; see tp_kernels/kernels/_multicast.py. For compute
// capability 9.0 and later. On the host, where there is no multicast address, in the order of
// ranks.
#pragma once

#include "channel.h"
#include "lines.h"

namespace tpk::device {

#if defined(__CUDACC__)

template <class Number>
struct Switch;

#if __CUDA_ARCH__ >= 900
#define TPK_SUM_AND_MULTICAST(sum, type)                                                \
  asm volatile(                                                                         \
      "{ .reg .b32 a, b, c, d;"                                                         \
      " multimem.ld_reduce.relaxed.sys.global.add" sum ".v4" type                       \
      " {a, b, c, d}, [%0];"                                                            \
      " multimem.st.relaxed.sys.global.v4" type " [%1], {a, b, c, d}; }" ::"l"(source), \
      "l"(target)                                                                       \
      : "memory")
#else
#define TPK_SUM_AND_MULTICAST(sum, type) __trap()
#endif

template <>
struct Switch<Float32> {
  TPK_DEVICE static void move(std::int64_t source, std::int64_t target) {
    TPK_SUM_AND_MULTICAST("", ".f32");
  }
};
template <>
struct Switch<Bfloat16> {
  TPK_DEVICE static void move(std::int64_t source, std::int64_t target) {
    TPK_SUM_AND_MULTICAST(".acc::f32", ".bf16x2");
  }
};
template <>
struct Switch<Float16> {
  TPK_DEVICE static void move(std::int64_t source, std::int64_t target) {
    TPK_SUM_AND_MULTICAST(".acc::f32", ".f16x2");
  }
};
#undef TPK_SUM_AND_MULTICAST

// Sum the line at byte `source` of all regions, in float32, rounded; store it at `target` of all
// regions.
template <class Number>
TPK_DEVICE void sum_and_multicast(const Workspace&, std::int64_t multicast, std::int64_t source,
                                  std::int64_t target) {
  Switch<Number>::move(multicast + source, multicast + target);
}

#else

template <class Number>
void sum_and_multicast(const Workspace& w, std::int64_t, std::int64_t source, std::int64_t target) {
  float totals[kPerLine<Number>], values[kPerLine<Number>];
  for (float& total : totals) total = -0.0f;
  for (int owner = 0; owner < w.world; ++owner) {
    widen<Number>(load<Line>(region(w, owner) + source), values);
    for (int i = 0; i < kPerLine<Number>; ++i) totals[i] += values[i];
  }
  const Line line = narrow<Number>(totals);
  for (int owner = 0; owner < w.world; ++owner) store(region(w, owner) + target, line);
}

#endif

}  // namespace tpk::device
