// Fused element-wise work of one decoding step, where a dozen small tensor operations cost more than
// their arithmetic. Plain C++ in a fixed order of operations: equal bits on every instruction set.
#pragma once

#include <cstddef>

#include "isa.h"

namespace tpk {

// out[r] = w * round(x[r] / sqrt(mean(x[r]^2) + eps)), rows of `columns` elements; float32 inside.
void rms_norm(const void* x, const void* weight, void* out, std::size_t rows, std::size_t columns,
              float epsilon, Dtype dtype);

// sum = round(sum + residual), if there is one, and out = rms_norm(sum); all [rows, columns].
void add_rms_norm(void* sum, const void* residual, const void* weight, void* out, std::size_t rows,
                  std::size_t columns, float epsilon, Dtype dtype);

// out = round(silu(gate)) * up, silu(x) = x / (1 + e^-x); arrays of `count`.
void swiglu(const void* gate, const void* up, void* out, std::size_t count, Dtype dtype);

// Rotates the pairs (i, i + dim / 2) of x [batch, length, heads, dim] by the angles whose cosines and
// sines [table_batch, length, dim] are given (table_batch: 1 or batch); out [batch, heads, length, dim].
void rotary(const void* x, const void* cosines, const void* sines, void* out, std::size_t batch,
            std::size_t length, std::size_t heads, std::size_t dim, std::size_t table_batch,
            Dtype dtype);

}  // namespace tpk
