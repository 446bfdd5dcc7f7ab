// Operands, results and bounds for tests of the products in csrc/cuda/gemm_sm90.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#include "exchange.h"
#include "gemm_sm90/mainloop.h"

namespace tpk::test {

using namespace tpk::device;

inline Division divided(const std::vector<std::int64_t>& counts) {
  const std::int64_t small = counts.back(), most = counts.front();
  const auto more = static_cast<std::int32_t>(std::count(counts.begin(), counts.end(), most));
  return {small, most - small, most > small ? more : 0};
}

inline constexpr std::int64_t kBrief = 100'000'000;  // nanoseconds: a wait that is to expire

template <class Number>
inline constexpr Dtype kDtype =
    std::is_same_v<Number, device::Bfloat16> ? Dtype::bfloat16 : Dtype::float16;

template <class Number>
double decode(std::uint16_t bits) {
  return decode16(kDtype<Number>, bits);
}

// A matrix [rows, k] of 16-bit numbers, either dimension contiguous, in memory that begins on 16 bytes.
// Between the lines there is NaN, which a product must not read.
template <class Number>
class Matrix {
 public:
  Matrix(std::int64_t rows, std::int64_t k, Major major, Random& random)
      : rows_(rows), k_(k), major_(major) {
    const std::int64_t inner = major == Major::K ? k : rows;
    pitch_ = (inner + 7) / 8 * 8 + 8;
    memory_.assign((major == Major::K ? rows : k) * pitch_, 0xffff);
    const Bytes values = random_values(kDtype<Number>, rows * k, random);
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t i = 0; i < k; ++i) bits(row, i) = load16(&values[(row * k + i) * 2]);
    }
  }

  std::int64_t rows() const { return rows_; }
  std::int64_t k() const { return k_; }
  std::uint16_t& bits(std::int64_t row, std::int64_t i) {
    return memory_[major_ == Major::K ? row * pitch_ + i : i * pitch_ + row];
  }
  double at(std::int64_t row, std::int64_t i) const {
    return decode<Number>(const_cast<Matrix*>(this)->bits(row, i));
  }
  // For loads of blocks of `block` rows.
  TensorMap map(int block) const {
    if (major_ == Major::K) return {memory_.data(), k_, rows_, pitch_, kBlockK, block};
    return {memory_.data(), rows_, k_, pitch_, 64, kBlockK};
  }
  // Of a K-major matrix, whose rows are summed over, for blocks of its columns.
  TensorMap transposed_map() const { return {memory_.data(), k_, rows_, pitch_, 64, kBlockK}; }

 private:
  std::int64_t rows_, k_;
  Major major_;
  std::int64_t pitch_;
  std::vector<std::uint16_t> memory_;
};

// What a result may be.
struct Near {
  double value = 0;
  double magnitude = 0;  // sum of the sizes of the summands

  template <class Number>
  void add(const Matrix<Number>& a, std::int64_t row, const Matrix<Number>& b, std::int64_t column) {
    for (std::int64_t i = 0; i < a.k(); ++i) {
      value += a.at(row, i) * b.at(column, i);
      magnitude += std::abs(a.at(row, i) * b.at(column, i));
    }
  }
  // Rounded once from a float32 sum, or `roundings` times.
  template <class Number>
  bool holds(std::uint16_t bits, int roundings = 1) const {
    const double error = std::abs(decode<Number>(bits) - value);
    return error <= roundings * epsilon(kDtype<Number>) * std::abs(value) * 1.01 + 0x1p-20 * magnitude;
  }
};

// Memory that begins `offset` numbers after 16 bytes, full of NaN, with guards around it.
class Poisoned {
 public:
  explicit Poisoned(std::int64_t size, int offset = 0)
      : memory_(size + 16 + 2 * kGuard, 0xffff), size_(size) {
    std::uint16_t* first = memory_.data() + kGuard;
    while (reinterpret_cast<std::uintptr_t>(first) % 16) ++first;
    data_ = first + offset;
  }
  std::uint16_t* data() { return data_; }
  std::uint16_t operator[](std::int64_t i) const { return data_[i]; }
  void check_guards() const {
    for (const std::uint16_t& word : memory_) {
      if (&word < data_ || &word >= data_ + size_) CHECK_EQUAL(word, 0xffff);
    }
  }

 private:
  static constexpr int kGuard = 512;
  std::vector<std::uint16_t> memory_;
  std::int64_t size_;
  std::uint16_t* data_;
};

template <class Config, class Policy>
void run_blocks(int blocks, std::uint64_t seed, const Operands& operands,
                const typename Policy::Arguments& arguments) {
  simt::run({blocks, Config::kThreads, sizeof(Shared<Config>), seed},
            [&] { run_products<Config, Policy>(operands, arguments); });
}

}  // namespace tpk::test
