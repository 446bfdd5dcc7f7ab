#include "elementwise.h"

#include <cmath>
#include <cstdint>
#include <stdexcept>

#include "tpk/convert.h"

namespace tpk {
namespace {

constexpr std::size_t kLanes = 16;  // sums kept apart, so that vectors and scalars add alike

template <class Element>
void rms_norm_rows(const void* x, const void* weight, void* out, std::size_t rows,
                   std::size_t columns, float epsilon) {
  using Storage = typename Element::Storage;
  const auto* w = static_cast<const Storage*>(weight);
  for (std::size_t row = 0; row < rows; ++row) {
    const auto* in = static_cast<const Storage*>(x) + row * columns;
    auto* y = static_cast<Storage*>(out) + row * columns;
    float lanes[kLanes] = {};
    std::size_t i = 0;
    for (; i + kLanes <= columns; i += kLanes) {
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        const float value = Element::widen(in[i + lane]);
        lanes[lane] += value * value;
      }
    }
    for (std::size_t lane = 0; i < columns; ++i, ++lane) {
      const float value = Element::widen(in[i]);
      lanes[lane] += value * value;
    }
    for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
      for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    const float scale = 1.0f / std::sqrt(lanes[0] / static_cast<float>(columns) + epsilon);
    for (i = 0; i < columns; ++i) {
      const float unit = Element::widen(Element::narrow(Element::widen(in[i]) * scale));
      y[i] = Element::narrow(Element::widen(w[i]) * unit);
    }
  }
}

template <class Element>
void add_rms_norm_rows(void* sum, const void* residual, const void* weight, void* out,
                       std::size_t rows, std::size_t columns, float epsilon) {
  using Storage = typename Element::Storage;
  for (std::size_t row = 0; row < rows; ++row) {  // row by row: the norm finds the sum in the cache
    auto* x = static_cast<Storage*>(sum) + row * columns;
    if (residual != nullptr) {
      const auto* r = static_cast<const Storage*>(residual) + row * columns;
      for (std::size_t i = 0; i < columns; ++i) {
        x[i] = Element::narrow(Element::widen(x[i]) + Element::widen(r[i]));
      }
    }
    rms_norm_rows<Element>(x, weight, static_cast<Storage*>(out) + row * columns, 1, columns,
                           epsilon);
  }
}

// Every product and the sum are rounded to the dtype, as the separate tensor operations would.
template <class Element>
void rotate_rows(const void* x, const void* cosines, const void* sines, void* out,
                 std::size_t batch, std::size_t length, std::size_t heads, std::size_t dim,
                 std::size_t table_batch) {
  using Storage = typename Element::Storage;
  const auto round = [](float value) { return Element::widen(Element::narrow(value)); };
  const std::size_t half = dim / 2;
  for (std::size_t b = 0; b < batch; ++b) {
    for (std::size_t s = 0; s < length; ++s) {
      const std::size_t row = ((table_batch == 1 ? 0 : b) * length + s) * dim;
      const auto* cos = static_cast<const Storage*>(cosines) + row;
      const auto* sin = static_cast<const Storage*>(sines) + row;
      for (std::size_t h = 0; h < heads; ++h) {
        const auto* in = static_cast<const Storage*>(x) + ((b * length + s) * heads + h) * dim;
        auto* y = static_cast<Storage*>(out) + ((b * heads + h) * length + s) * dim;
        for (std::size_t i = 0; i < half; ++i) {
          const float first = Element::widen(in[i]);
          const float second = Element::widen(in[i + half]);
          y[i] = Element::narrow(round(first * Element::widen(cos[i])) +
                                 round(-second * Element::widen(sin[i])));
          y[i + half] = Element::narrow(round(second * Element::widen(cos[i + half])) +
                                        round(first * Element::widen(sin[i + half])));
        }
      }
    }
  }
}

// e^x to a unit in the last place, of operations that every processor rounds alike and a compiler can do
// for several x at once: 2^n and, for |r| <= ln(2) / 2, the Taylor series of e^r. Beyond |x| = 120, and
// for NaN, that of 120.
float exponential(float x) {
  const std::uint32_t magnitude = bits_of(x) & 0x7fffffff, limit = bits_of(120.0f);
  const bool beyond = static_cast<std::int32_t>(magnitude) > static_cast<std::int32_t>(limit);
  x = float_of(choose(beyond, limit, magnitude) | (bits_of(x) & 0x80000000));
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a sum with it has no fraction
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln(2) in two parts
  float series = 1.0f / 5040.0f;
  series = series * r + 1.0f / 720.0f;
  series = series * r + 1.0f / 120.0f;
  series = series * r + 1.0f / 24.0f;
  series = series * r + 1.0f / 6.0f;
  series = series * r + 0.5f;
  series = 1.0f + (r + r * r * series);  // the larger terms last: one rounding that counts
  // 2^n in two factors, so that the result may be infinite or subnormal.
  const std::int32_t whole = static_cast<std::int32_t>(bits_of(shifted) - bits_of(kRound));
  const std::int32_t half = whole >> 1;
  const auto power = [](std::int32_t exponent) {
    return float_of(static_cast<std::uint32_t>(exponent + 127) << 23);
  };
  return series * power(half) * power(whole - half);
}

template <class Element>
void swiglu_elements(const void* gate, const void* up, void* out, std::size_t count) {
  using Storage = typename Element::Storage;
  const auto* g = static_cast<const Storage*>(gate);
  const auto* u = static_cast<const Storage*>(up);
  auto* y = static_cast<Storage*>(out);
  for (std::size_t i = 0; i < count; ++i) {
    const float x = Element::widen(g[i]);
    const float silu = Element::widen(Element::narrow(x / (1.0f + exponential(-x))));
    y[i] = Element::narrow(silu * Element::widen(u[i]));
  }
}

template <class... Arguments>
void by_dtype(Dtype dtype, void (*float32)(Arguments...), void (*bfloat16)(Arguments...),
              void (*float16)(Arguments...), Arguments... arguments) {
  switch (dtype) {
    case Dtype::float32: return float32(arguments...);
    case Dtype::bfloat16: return bfloat16(arguments...);
    case Dtype::float16: return float16(arguments...);
    default: throw std::invalid_argument("element-wise kernels take float32, bfloat16 and float16");
  }
}

}  // namespace

void rms_norm(const void* x, const void* weight, void* out, std::size_t rows, std::size_t columns,
              float epsilon, Dtype dtype) {
  by_dtype(dtype, rms_norm_rows<Float32>, rms_norm_rows<Bfloat16>, rms_norm_rows<Float16>, x, weight,
           out, rows, columns, epsilon);
}

void add_rms_norm(void* sum, const void* residual, const void* weight, void* out, std::size_t rows,
                  std::size_t columns, float epsilon, Dtype dtype) {
  by_dtype(dtype, add_rms_norm_rows<Float32>, add_rms_norm_rows<Bfloat16>,
           add_rms_norm_rows<Float16>, sum, residual, weight, out, rows, columns, epsilon);
}

void swiglu(const void* gate, const void* up, void* out, std::size_t count, Dtype dtype) {
  by_dtype(dtype, swiglu_elements<Float32>, swiglu_elements<Bfloat16>, swiglu_elements<Float16>, gate,
           up, out, count);
}

void rotary(const void* x, const void* cosines, const void* sines, void* out, std::size_t batch,
            std::size_t length, std::size_t heads, std::size_t dim, std::size_t table_batch,
            Dtype dtype) {
  by_dtype(dtype, rotate_rows<Float32>, rotate_rows<Bfloat16>, rotate_rows<Float16>, x, cosines,
           sines, out, batch, length, heads, dim, table_batch);
}

}  // namespace tpk
