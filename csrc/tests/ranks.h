// Ranks as threads of one process, and data to give them.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "collectives.h"

namespace tpk::test {

using Bytes = std::vector<std::byte>;
using Random = std::mt19937_64;

inline constexpr double kTimeout = 50;
inline constexpr std::byte kPoison{0xff};  // NaN in every dtype

class Ranks {
 public:
  explicit Ranks(const Shape& shape, std::uint32_t epoch = 0, double timeout = kTimeout,
                 std::optional<Tuning> tuning = {}) {
    static std::atomic<int> count{0};
    const std::string name =
        "/tpk-test-" + std::to_string(::getpid()) + "-" + std::to_string(count++);
    const Layout layout(shape);
    segment_ = Segment::create(name, layout.bytes());
    segment_->unlink();
    std::memset(segment_->base(), static_cast<int>(kPoison), segment_->size());
    Domain::format(*segment_, shape, epoch, tuning);
    for (std::uint32_t rank = 0; rank < shape.world; ++rank) {
      domains_.push_back(std::make_shared<Domain>(segment_, rank, shape, timeout));
      domains_.back()->join();
    }
    for (auto& domain : domains_) {
      domain->open_peers(timeout);
      slots_.push_back(std::make_unique<Slot>(domain, 0));
    }
  }

  // Runs call(slot) on every rank at the same time, as one exclusive call.
  template <class Call>
  void run(Call&& call) {
    std::vector<std::thread> threads;
    for (auto& slot : slots_) {
      threads.emplace_back([&] { slot->exclusive("test", [&] { call(*slot); }); });
    }
    for (auto& thread : threads) thread.join();
  }

  Slot& slot(int rank) { return *slots_[rank]; }
  Domain& domain(int rank) { return *domains_[rank]; }
  const std::shared_ptr<Segment>& segment() { return segment_; }

 private:
  std::shared_ptr<Segment> segment_;
  std::vector<std::shared_ptr<Domain>> domains_;
  std::vector<std::unique_ptr<Slot>> slots_;
};

inline std::uint16_t load16(const std::byte* at) {
  std::uint16_t value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

// Bits of a 16-bit dtype as a number, written without the code under test.
inline double decode16(Dtype dtype, std::uint16_t bits) {
  const int exponent_bits = dtype == Dtype::bfloat16 ? 8 : 5;
  const int fraction_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return fraction ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

inline double decode(Dtype dtype, const std::byte* data, std::size_t index) {
  if (dtype != Dtype::float32) return decode16(dtype, load16(data + index * 2));
  float value;
  std::memcpy(&value, data + index * 4, sizeof(value));
  return value;
}

// Relative error of one rounding.
inline double epsilon(Dtype dtype) {
  return std::ldexp(1, dtype == Dtype::float32 ? -24 : dtype == Dtype::bfloat16 ? -8 : -11);
}

// Values of both signs between 2^-9 and 4, all fraction bits random.
inline Bytes random_values(Dtype dtype, std::size_t count, Random& random) {
  Bytes data(count * size_of(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(random());
    const std::uint32_t power = random() % 11;
    if (dtype == Dtype::float32) {
      const std::uint32_t word = (bits & 0x807fffff) | ((118 + power) << 23);
      std::memcpy(data.data() + i * 4, &word, 4);
    } else {
      const std::uint16_t word = static_cast<std::uint16_t>(
          dtype == Dtype::bfloat16 ? (bits & 0x807f) | ((118 + power) << 7)
                                   : (bits & 0x83ff) | ((6 + power) << 10));
      std::memcpy(data.data() + i * 2, &word, 2);
    }
  }
  return data;
}

inline Bytes poisoned(std::size_t bytes) { return Bytes(bytes, kPoison); }

// result[i] is the sum of element first + i over all inputs (and the bias), rounded once.
inline void check_sum(Dtype dtype, const Bytes& result, const std::vector<Bytes>& inputs,
                      std::size_t first, std::size_t count, const Bytes* bias = nullptr) {
  const std::size_t period = bias ? bias->size() / size_of(dtype) : 1;
  for (std::size_t i = 0; i < count; ++i) {
    double exact = 0, magnitude = 0;
    for (const Bytes& input : inputs) {
      const double value = decode(dtype, input.data(), first + i);
      exact += value;
      magnitude += std::abs(value);
    }
    if (bias) {
      const double value = decode(dtype, bias->data(), (first + i) % period);
      exact += value;
      magnitude += std::abs(value);
    }
    const double bound = 1.01 * epsilon(dtype) * std::abs(exact) +
                         std::ldexp(static_cast<double>(inputs.size()), -24) * magnitude +
                         std::ldexp(1, -25);
    const double error = std::abs(decode(dtype, result.data(), i) - exact);
    CHECK(error <= bound);  // false for NaN, so also for what was not written
  }
}

}  // namespace tpk::test
