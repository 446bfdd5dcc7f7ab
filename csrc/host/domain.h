// One rank's membership in the group that shares a segment, and its view of its peers.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "fault.h"
#include "isa.h"
#include "process.h"
#include "segment.h"
#include "tpk/layout.h"
#include "wait.h"

namespace tpk {

// What a wait is for; it ends up in the fault when the wait fails.
struct WaitFor {
  int slot;  // -1: a ring
  const char* op;
  int peer;
  const char* what;  // "did not ..."
};

class Domain {
 public:
  // Runs every few milliseconds while a call waits and may throw to abandon it.
  using Hook = std::function<void()>;

  // One rank does this before any rank makes its Domain. All counters start at `epoch`.
  // tuning: instead of what is known about this machine.
  static void format(Segment& segment, const Shape& shape, std::uint32_t epoch = 0,
                     std::optional<Tuning> tuning = {});

  Domain(std::shared_ptr<Segment> segment, int rank, const Shape& shape, double timeout,
         Hook hook = {});
  ~Domain();
  Domain(const Domain&) = delete;
  Domain& operator=(const Domain&) = delete;

  void join();
  void open_peers(double timeout);         // waits until all ranks have joined
  void fail(const std::string& message);   // peers that wait for this rank raise, now and later
  void close();                            // leaves in order; waits for nobody

  void check_process() const;                           // throws in a forked child
  void check_member(int slot, const char* op) const;    // throws unless joined, opened, not closed

  // Waits for a peer's signal and returns how far it is; throws a Fault at the deadline or if the
  // peer cannot come any more.
  std::uint32_t await(Signal& signal, std::uint32_t expected, double timeout, WaitPolicy& policy,
                      const WaitFor& wait) const;

  void run_hook() const {
    if (hook_) hook_();
  }
  // Throws a Fault if `signal` has not come to `expected` and never will.
  void check_peer(const Signal& signal, std::uint32_t expected, const WaitFor& wait) const;
  // Throws a Fault if nothing more comes from the peer of the wait.
  void check_left(const WaitFor& wait) const;
  // Throws a Fault if any rank has failed or its process has ended. One that left in order has done its part.
  void check_others(const WaitFor& wait) const;

  // A slot has one user: its counters would part ways with those in the segment.
  void claim(int slot);
  void claim_ring(std::uint32_t ring);  // this rank's end of it

  int rank() const { return rank_; }
  int world() const { return static_cast<int>(layout_.shape().world); }
  double timeout() const { return timeout_; }
  const Layout& layout() const { return layout_; }
  std::byte* base() const { return segment_->base(); }
  const Isa& isa() const { return *isa_; }
  // For waits of this rank; from when its peers are open.
  WaitPolicy wait_policy() const { return WaitPolicy::of(crowded_); }
  const Tuning& tuning() const { return layout_.control(base()).tuning; }

 private:
  RankStatus& status(int rank) const { return layout_.status(base(), rank); }
  RankState state(int rank) const { return static_cast<RankState>(observe(status(rank).state)); }
  void leave(RankState state, const std::string& message);
  std::optional<std::string> loss(int peer) const;  // why nothing more comes from `peer`
  void wake_waiters() const;

  std::shared_ptr<Segment> segment_;
  int rank_;
  Layout layout_;
  double timeout_;
  Hook hook_;
  const Isa* isa_;
  pid_t pid_;
  unsigned generation_;
  bool open_ = false;
  bool crowded_ = false;  // more ranks may run on the cores of this one than those are
  std::mutex mutex_;
  std::vector<bool> claimed_;
  std::vector<bool> claimed_rings_;
  std::vector<std::unique_ptr<ProcessWatch>> peers_;  // null: this process
};

}  // namespace tpk
