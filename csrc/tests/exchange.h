// Ranks whose kernels run on the host (simt.h): regions of a workspace, and what kernels must
// compute.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "simt.h"
#include "tpk/channel.h"
#include "tpk/number.h"
#include "values.h"

namespace tpk::test {

// Of waits that nobody keeps waiting; less in tests of mutants, which do.
#if !defined(TPK_PATIENCE_SECONDS)
#define TPK_PATIENCE_SECONDS 50
#endif
inline constexpr std::int64_t kPatience = std::int64_t{TPK_PATIENCE_SECONDS} * 1'000'000'000;

// Memory of `bytes` bytes, `shift` bytes beyond a multiple of 16, full of NaN. Nothing follows it.
class Memory {
 public:
  explicit Memory(std::size_t bytes, std::size_t shift = 0) : bytes_(bytes), shift_(shift) {
    void* memory = nullptr;
    if (::posix_memalign(&memory, 16, bytes + shift) != 0) std::abort();
    memory_.reset(static_cast<std::byte*>(memory));
    std::memset(memory, static_cast<int>(kPoison), bytes + shift);
  }
  Memory(const Bytes& content, std::size_t shift) : Memory(content.size(), shift) {
    std::copy(content.begin(), content.end(), data());
  }
  std::byte* data() { return memory_.get() + shift_; }
  Bytes bytes() {
    Bytes copy(bytes_);
    std::copy_n(data(), bytes_, copy.begin());
    return copy;
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::size_t bytes_, shift_;
  std::unique_ptr<std::byte, Free> memory_;
};

struct ExchangeOptions {
  int channels = 2;
  std::int64_t chunk = 64;
  int depth = 2;
  std::int32_t epoch = 0;
  std::int64_t timeout = kPatience;
  std::byte left = kPoison;  // what the buffers are full of
};

// The workspaces of `world` ranks, and kernels of all of them at the same time.
class Exchange {
 public:
  explicit Exchange(int world, const ExchangeOptions& options = {})
      : channels_(options.channels), regions_(world), table_(world), records_(world) {
    const std::int64_t stride = kSignalBytes + options.depth * world * options.chunk;
    for (int rank = 0; rank < world; ++rank) {
      regions_[rank] = std::make_unique<Memory>(stride * options.channels);
      std::byte* base = regions_[rank]->data();
      table_[rank] = reinterpret_cast<std::int64_t>(base);
      std::memset(base, static_cast<int>(options.left), stride * options.channels);
      for (int channel = 0; channel < options.channels; ++channel) {
        auto* words = reinterpret_cast<std::int32_t*>(base + channel * stride);
        std::fill(words, words + kSignalBytes / 4, 0);
        std::fill(words, words + kDone / 4, options.epoch);
      }
      records_[rank].fill(0);
      workspaces_.push_back({table_.data(), records_[rank].data(), stride, options.chunk,
                             options.timeout, rank, world, options.depth, kOperationCode});
    }
  }

  // call(rank) on a thread for every rank that takes part.
  template <class Call>
  void run(Call&& call, const std::vector<int>& absent = {}) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world(); ++rank) {
      if (std::count(absent.begin(), absent.end(), rank)) continue;
      threads.emplace_back([&call, rank] { call(rank); });
    }
    for (auto& thread : threads) thread.join();
  }

  int world() const { return static_cast<int>(workspaces_.size()); }
  int channels() const { return channels_; }
  Workspace& workspace(int rank) { return workspaces_[rank]; }
  std::array<std::int32_t, kRecordWords>& record(int rank) { return records_[rank]; }
  bool intact() const {
    return std::all_of(records_.begin(), records_.end(),
                       [](const auto& record) { return record[kState] == kIntact; });
  }

  static constexpr std::int32_t kOperationCode = 7;

 private:
  int channels_;
  std::vector<std::unique_ptr<Memory>> regions_;
  std::vector<std::int64_t> table_;
  std::vector<std::array<std::int32_t, kRecordWords>> records_;
  std::vector<Workspace> workspaces_;
};

// Calls what(number) with a value of the type that kernels have for `dtype`.
template <class What>
void with_number(Dtype dtype, What&& what) {
  if (dtype == Dtype::float32) return what(device::Float32{});
  if (dtype == Dtype::bfloat16) return what(device::Bfloat16{});
  what(device::Float16{});
}

// round(x_0 + x_1 + ...) of element `index`, in float32, in rank order.
inline float sum_of(Dtype dtype, const std::vector<Bytes>& xs, std::size_t index) {
  float total = static_cast<float>(decode(dtype, xs[0].data(), index));
  for (std::size_t rank = 1; rank < xs.size(); ++rank) {
    total += static_cast<float>(decode(dtype, xs[rank].data(), index));
  }
  return total;
}

inline Bytes sums(Dtype dtype, const std::vector<Bytes>& xs, std::size_t first, std::size_t count) {
  Bytes result(count * width_of(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    encode(dtype, sum_of(dtype, xs, first + i), result.data() + i * width_of(dtype));
  }
  return result;
}

inline void pause(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

}  // namespace tpk::test
