// Ranks as threads of one process, and what their sums have to be.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "collectives.h"
#include "values.h"

namespace tpk::test {

inline constexpr double kTimeout = 50;

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
