// Products of a few rows with a weight, bound by reading the weight once. Written once for all
// instruction sets, like reduce_vector.h, which also says what a `Vector` is. It gives besides
//   zero(), multiply_add(sum, a, b), total(sum)
//   kTile: weight rows that are read at once for one row of x; its sums fit into the registers
//
// Sums are in float32, in an order that depends on the instruction set, as it does in any library.
#pragma once

#include <cstddef>

#include "tpk/convert.h"

namespace tpk {
namespace {

// y[m][n] = x[m] . w[n] + bias[n] for kRows rows of x and kColumns rows of w.
template <class Vector, class Element, std::size_t kRows, std::size_t kColumns>
void product_tile(const typename Vector::Storage* x, std::size_t ldx,
                  const typename Vector::Storage* w, std::size_t ldw,
                  const typename Vector::Storage* bias, typename Vector::Storage* y,
                  std::size_t ldy, std::size_t depth) {
  typename Vector::Sum sums[kRows][kColumns];
#pragma GCC unroll 8
  for (std::size_t m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (std::size_t n = 0; n < kColumns; ++n) sums[m][n] = Vector::zero();
  }
  const auto step = [&](auto load) __attribute__((always_inline)) {
    typename Vector::Sum weights[kColumns];
#pragma GCC unroll 8
    for (std::size_t n = 0; n < kColumns; ++n) weights[n] = load(w + n * ldw);
#pragma GCC unroll 8
    for (std::size_t m = 0; m < kRows; ++m) {
      const auto row = load(x + m * ldx);
#pragma GCC unroll 8
      for (std::size_t n = 0; n < kColumns; ++n) {
        sums[m][n] = Vector::multiply_add(sums[m][n], row, weights[n]);
      }
    }
  };
  std::size_t k = 0;
  for (; k + Vector::kLanes <= depth; k += Vector::kLanes) {
    step([&](const auto* from) { return Vector::load(from + k); });
  }
  if (const std::size_t lanes = depth - k; lanes != 0) {
    step([&](const auto* from) { return Vector::load_part(from + k, lanes); });
  }
#pragma GCC unroll 8
  for (std::size_t m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (std::size_t n = 0; n < kColumns; ++n) {
      float sum = Vector::total(sums[m][n]);
      if (bias != nullptr) sum += Element::widen(bias[n]);
      y[m * ldy + n] = Element::narrow(canonical(sum));
    }
  }
}

template <class Vector, class Element, std::size_t kColumns>
void product_rows(const typename Vector::Storage* x, std::size_t ldx,
                  const typename Vector::Storage* w, std::size_t ldw,
                  const typename Vector::Storage* bias, typename Vector::Storage* y,
                  std::size_t ldy, std::size_t rows, std::size_t depth) {
  constexpr std::size_t kFour = kColumns < 4 ? 1 : kColumns / 4;
  constexpr std::size_t kTwo = kColumns < 2 ? 1 : kColumns / 2;
  const auto all = [&](auto tile, std::size_t m, std::size_t columns) {
    for (std::size_t n = 0; n < kColumns; n += columns) {
      tile(x + m * ldx, ldx, w + n * ldw, ldw, bias == nullptr ? nullptr : bias + n,
           y + m * ldy + n, ldy, depth);
    }
  };
  std::size_t m = 0;
  for (; m + 4 <= rows; m += 4) all(product_tile<Vector, Element, 4, kFour>, m, kFour);
  for (; m + 2 <= rows; m += 2) all(product_tile<Vector, Element, 2, kTwo>, m, kTwo);
  for (; m < rows; ++m) all(product_tile<Vector, Element, 1, kColumns>, m, kColumns);
}

// See ProductFunction.
template <class Vector, class Element>
void product(const void* x, std::size_t ldx, const void* w, std::size_t ldw, const void* bias,
             void* y, std::size_t rows, std::size_t columns, std::size_t depth) {
  using Storage = typename Vector::Storage;
  const auto run = [&](auto some_columns, std::size_t n) {
    some_columns(static_cast<const Storage*>(x), ldx, static_cast<const Storage*>(w) + n * ldw, ldw,
                 bias == nullptr ? nullptr : static_cast<const Storage*>(bias) + n,
                 static_cast<Storage*>(y) + n, columns, rows, depth);
  };
  std::size_t n = 0;
  for (; n + Vector::kTile <= columns; n += Vector::kTile) {
    run(product_rows<Vector, Element, Vector::kTile>, n);
  }
  for (; n < columns; ++n) run(product_rows<Vector, Element, 1>, n);
}

}  // namespace
}  // namespace tpk
