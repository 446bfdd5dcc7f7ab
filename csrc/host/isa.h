// Arithmetic, one table of functions per instruction set. All tables give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tpk {

enum class Dtype : std::uint32_t { float32 = 0, bfloat16 = 1, float16 = 2, uint8 = 3, int64 = 4 };

inline constexpr int kReducibleDtypes = 3;  // the first ones of Dtype

// out[i] = round(sources[0][i] + ... + sources[ranks - 1][i] + bias[i]), in float32 and in this
// order, rounded once (to nearest, ties to even). A NaN result is the quiet NaN with no payload
// and no sign, so that it does not depend on the instruction set. `out` may be one of the sources.
// bias: null or `count` elements. All arrays have one dtype; none needs any alignment.
using ReduceFunction = void (*)(const void* const* sources, std::size_t ranks, const void* bias,
                                void* out, std::size_t count);

// y[m * columns + n] = bias[n] + sum over k of x[m * ldx + k] * w[n * ldw + k] for m < rows,
// n < columns, k < depth; bias: or null. Summed in float32, rounded once. For few rows: every weight is
// read once. Row by row the same bits, however many there are. Unlike reductions, products have other
// bits on other instruction sets.
using ProductFunction = void (*)(const void* x, std::size_t ldx, const void* w, std::size_t ldw,
                                 const void* bias, void* y, std::size_t rows,
                                 std::size_t columns, std::size_t depth);

struct Isa {
  const char* name;
  ReduceFunction reduce[kReducibleDtypes];    // by Dtype
  ProductFunction product[kReducibleDtypes];  // null: the library of the caller is faster
};

extern const Isa kScalarIsa;
#ifdef TPK_HAVE_AVX2
extern const Isa kAvx2Isa;
#endif
#ifdef TPK_HAVE_AVX512
extern const Isa kAvx512Isa;
#endif
#ifdef TPK_HAVE_NEON
extern const Isa kNeonIsa;
#endif

// What this build and this processor can run, slowest first.
const std::vector<const Isa*>& available_isas();

// The best one, or the one that TP_KERNELS_ISA names; throws std::invalid_argument if that cannot
// run.
const Isa& select_isa();

}  // namespace tpk
