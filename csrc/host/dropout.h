// Dropout by a counter: what happens to an element depends on a key and on its index in the unsplit tensor.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace tpk {

// y[e] = round(x[e] * scale + residual[e]) where word(key, index) >= least, else residual[e] or 0. In float32.
// Arrays are dense, of the shape `sizes` [dims]; index = first + sum over d of e_d * steps[d]. word is
// philox_word. residual: null, or of the dtype of x.
// y may be x or residual. Equal bits on every instruction set.
struct Dropout {
  const void* x;
  const void* residual;
  void* y;
  std::size_t dims;
  const std::size_t* sizes;
  const std::size_t* steps;
  std::uint64_t first;
  std::uint64_t key;
  std::uint32_t least;
  float scale;
};

struct DropoutTable {
  void (*of[kReducibleDtypes])(const Dropout&);  // by Dtype
};

extern const DropoutTable kDropoutScalar;
#ifdef TPK_HAVE_AVX2
extern const DropoutTable kDropoutAvx2;
#endif
#ifdef TPK_HAVE_AVX512
extern const DropoutTable kDropoutAvx512;
#endif

// What goes with an instruction set. Throws std::invalid_argument for other dtypes.
void dropout(const Isa& isa, const Dropout& call, Dtype dtype);

}  // namespace tpk
