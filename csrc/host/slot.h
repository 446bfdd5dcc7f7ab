// One rank's end of a slot: rounds of the protocol in tpk/signal.h, and reductions over a round.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "domain.h"
#include "exclusive.h"

namespace tpk {

std::uint64_t size_of(Dtype dtype);
bool is_reducible(Dtype dtype);

// Added once, after the sum over ranks, to element i of a buffer: data[(first + i) % period].
struct Bias {
  const void* data = nullptr;  // null: none
  std::uint64_t period = 0;
  std::uint64_t first = 0;
};

// How `reduce_all` shares the work. All ways give the same bits.
enum class Shots {
  automatic,
  one,  // every rank reduces everything: one exchange, ranks * count elements read
  two,  // every rank reduces its part and copies the others' parts: two exchanges, less to read
};

// One step of an all-reduce: out[i] = sum over ranks of element i of the oldest round, plus bias.
struct Reduction {
  void* out;
  std::uint64_t count;
  Dtype dtype;
  Bias bias = {};
  Shots shots = Shots::automatic;
  bool streaming = false;  // in two shots: write `out` around the caches
};

// Adds the time of its life to a total.
class Stopwatch {
 public:
  explicit Stopwatch(double& total) : total_(total) {}
  ~Stopwatch() { total_ += std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  double& total_;
  Clock::time_point start_ = Clock::now();
};

class Slot {
 public:
  Slot(std::shared_ptr<Domain> domain, int index);

  // All functions below are to be called inside of this one.
  template <class Call>
  auto exclusive(const char* op, Call&& call) {
    const auto timed = [&] {
      op_.store(op, std::memory_order_relaxed);
      const Stopwatch stopwatch(seconds_);
      return call();
    };
    return exclusive_.run(*domain_, {op, "this slot", index_}, timed, [&] { return Progress{published_, finished_}; });
  }

  // Steps of a round. Rounds may overlap: up to `buffers` begun and not finished.
  std::uint32_t begin(double timeout);  // returns the index of the buffer to fill
  // Fills the buffer with the `count` elements at `source`, which stay there unchanged until the round
  // is finished: this rank reads them there, so that elements [kept, kept_end) need not be copied.
  void fill(const void* source, std::uint64_t count, Dtype dtype, std::uint64_t kept,
            std::uint64_t kept_end);
  // Half of `fill`: this rank's element `index` of the round is at `source`, and so on.
  void read_own_at(const void* source, std::uint64_t index, Dtype dtype);
  // `fill` for reduce_all: keeps this rank's part if that will take two shots.
  void fill_summands(const void* source, std::uint64_t count, Dtype dtype,
                     Shots shots = Shots::automatic);
  void publish(const Descriptor& descriptor);
  void wait(int peer, double timeout);  // for the oldest round that is not finished
  void wait_all(double timeout);
  // Waits for one of `peers` (not empty), whoever is first; returns its index in `peers`.
  std::size_t wait_any(const std::vector<int>& peers, double timeout);
  void finish();
  // Returns when all peers have finished the rounds that this rank has: nobody reads its buffers.
  void settle(double timeout);

  // out[i] = sum over ranks of element offset + i of the oldest round, plus bias, rounded once.
  void reduce(void* out, std::uint64_t offset, std::uint64_t count, Dtype dtype, Bias bias,
              double timeout);
  // The same for elements 0..count, as one collective step: all ranks must call it.
  void reduce_all(const Reduction& reduction, double timeout);

  // The same with the result in the buffer of every rank, where the summands were: nothing is copied.
  void reduce_in_place(std::uint64_t count, Dtype dtype, double timeout);

  // First element of a rank's part when `count` elements are divided over the ranks. Parts end with
  // cache lines: no two ranks write to one.
  std::uint64_t part_start(int owner, std::uint64_t count, Dtype dtype) const;

  // Spent in `exclusive` calls: waiting and reducing.
  double seconds() const { return seconds_; }
  void reset_seconds() { seconds_ = 0; }

  std::byte* buffer(int rank, std::uint32_t index) const;
  std::uint32_t round_buffer() const;  // of the oldest round that is not finished
  bool idle() const { return !begun_ && published_ == finished_; }
  std::uint32_t open_rounds() const { return published_ - finished_; }

  Domain& domain() const { return *domain_; }
  int index() const { return index_; }
  int rank() const { return domain_->rank(); }
  int world() const { return domain_->world(); }
  std::uint32_t buffers() const { return domain_->layout().shape().buffers; }
  std::uint64_t capacity() const { return domain_->layout().shape().capacity; }

 private:
  Signals& signals(int rank) const;
  Descriptor& descriptor(int rank, std::uint32_t index) const;
  std::uint32_t await(Signal& signal, std::uint32_t expected, int peer, double timeout,
                      WaitPolicy& policy, const char* what);
  void compare_descriptors(int peer) const;
  void check_range(std::uint64_t offset, std::uint64_t count, Dtype dtype) const;
  // out[i] = sum over ranks of element first + i of the oldest round, plus bias.
  void sum(void* out, std::uint64_t first, std::uint64_t count, Dtype dtype, Bias bias);
  bool takes_two_shots(std::uint64_t bytes, bool filled, Shots shots) const;

  std::shared_ptr<Domain> domain_;
  int index_;
  Exclusive exclusive_;
  double seconds_ = 0;
  std::atomic<const char*> op_ = "";  // for the messages of waits

  // Rounds are counted modulo 2^32, which `buffers` need not divide: buffers are counted apart.
  // One thread may fill and publish while another waits, reduces and finishes: see overlap.h.
  bool begun_ = false;
  std::uint32_t fill_buffer_ = 0;      // of round published_ + 1
  std::vector<std::uint32_t> credit_;  // by peer: rounds it is known to have read
  WaitPolicy fill_policy_;
  std::atomic<std::uint32_t> published_;

  std::atomic<std::uint32_t> finished_;
  std::uint32_t read_buffer_ = 0;     // of round finished_ + 1
  std::vector<std::uintptr_t> own_;   // by buffer: where this rank reads its element 0; 0: in it
  std::vector<std::uint32_t> seen_;   // by peer: the round whose descriptor was compared last
  std::vector<const void*> sources_;  // of `sum`, kept to allocate once
  WaitPolicy read_policy_;
};

}  // namespace tpk
