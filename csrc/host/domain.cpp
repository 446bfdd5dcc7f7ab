#include "domain.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

#include "tuning.h"

namespace tpk {
namespace {

void check_size(const Segment& segment, const Layout& layout) {
  if (segment.size() != layout.bytes()) {
    throw std::invalid_argument("the segment has " + std::to_string(segment.size()) +
                                " bytes; this world, slots, capacity and buffers need " +
                                std::to_string(layout.bytes()));
  }
}

bool same(const Shape& a, const Shape& b) {
  return a.world == b.world && a.slots == b.slots && a.capacity == b.capacity &&
         a.buffers == b.buffers && a.ring_cells == b.ring_cells &&
         a.ring_cell_bytes == b.ring_cell_bytes && a.ring_reach == b.ring_reach &&
         a.ring_far_cells == b.ring_far_cells;
}

}  // namespace

void Domain::format(Segment& segment, const Shape& shape, std::uint32_t epoch,
                    std::optional<Tuning> tuning) {
  const Layout layout(shape);
  check_size(segment, layout);
  std::byte* base = segment.base();
  Control& control = *new (&layout.control(base)) Control{};
  for (std::uint32_t rank = 0; rank < shape.world; ++rank) {
    new (&layout.status(base, rank)) RankStatus{};
    new (&layout.bell(base, rank)) Signal{};
    for (std::uint32_t slot = 0; slot < shape.slots; ++slot) {
      Signals& signals = *new (&layout.signals(base, slot, rank)) Signals{};
      for (Signal* signal : {&signals.ready, &signals.reduced, &signals.done}) {
        static_cast<void>(publish(*signal, epoch));
      }
    }
  }
  for (std::uint32_t ring = 0; ring < layout.ring_count(); ++ring) {
    RingSignals& signals = *new (&layout.ring_signals(base, ring)) RingSignals{};
    for (Signal* signal : {&signals.sent, &signals.received}) {
      static_cast<void>(publish(*signal, epoch));
    }
  }
  control.version = kLayoutVersion;
  control.shape = shape;
  control.bytes = layout.bytes();
  control.tuning = tuning ? *tuning : tuning_for(select_isa().name, shape.world);
  publish(control.magic, kMagic);
}

Domain::Domain(std::shared_ptr<Segment> segment, int rank, const Shape& shape, double timeout,
               Hook hook)
    : segment_(std::move(segment)), rank_(rank), layout_(shape), timeout_(timeout),
      hook_(std::move(hook)), isa_(&select_isa()), pid_(::getpid()),
      generation_(fork_generation()), claimed_(shape.slots), claimed_rings_(layout_.ring_count()) {
  check_size(*segment_, layout_);
  check_timeout(timeout);
  if (rank < 0 || rank >= world()) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " is not in a group of " +
                                std::to_string(world()));
  }
  const Control& control = layout_.control(base());
  if (observe(control.magic) != kMagic || control.version != kLayoutVersion ||
      !same(control.shape, shape)) {
    throw std::invalid_argument(
        "the segment was not formatted by this version for this world, slots, capacity and buffers");
  }
}

Domain::~Domain() {
  if (generation_ == fork_generation() && state(rank_) == RankState::alive) leave(RankState::closed, "");
}

void Domain::check_process() const {
  if (generation_ != fork_generation()) {
    throw std::logic_error("this process was forked from rank " + std::to_string(rank_) +
                           " after it had joined the group (pid " + std::to_string(pid_) +
                           "); a forked child cannot use it: spawn the child, or make a group in it");
  }
}

void Domain::join() {
  check_process();
  std::lock_guard lock(mutex_);
  RankStatus& own = status(rank_);
  if (state(rank_) != RankState::absent) {
    throw std::logic_error("rank " + std::to_string(rank_) + " has joined this group before");
  }
  own.pid = pid_;
  own.start_time = process_start_time(pid_);
  publish(own.state, static_cast<std::uint32_t>(RankState::alive));
}

void Domain::open_peers(double timeout) {
  check_process();
  if (state(rank_) != RankState::alive) {
    throw std::logic_error("rank " + std::to_string(rank_) + " must join before it opens its peers");
  }
  const auto deadline = deadline_after(timeout);
  std::vector<std::unique_ptr<ProcessWatch>> peers(world());
  for (int peer = 0; peer < world(); ++peer) {
    auto pause = std::chrono::microseconds(50);
    while (state(peer) == RankState::absent) {
      run_hook();
      if (Clock::now() >= deadline) {
        throw Fault(FaultKind::timeout, peer, -1, "open_peers", 0, 0,
                    "rank " + std::to_string(peer) + " did not join the group in time");
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(5000));
    }
    const RankStatus& other = status(peer);
    if (other.pid != pid_) {
      peers[peer] = std::make_unique<ProcessWatch>(static_cast<pid_t>(other.pid), other.start_time);
    }
  }
  std::vector<pid_t> processes;
  for (int rank = 0; rank < world(); ++rank) processes.push_back(static_cast<pid_t>(status(rank).pid));
  crowded_ = share_cores(processes);
  peers_ = std::move(peers);
  open_ = true;
  // A rank may leave right after it has joined; whoever needs it will be told when it waits.
}

void Domain::leave(RankState next, const std::string& message) {
  RankStatus& own = status(rank_);
  {
    std::lock_guard lock(mutex_);
    const RankState now = state(rank_);
    if (now == RankState::closed || now == RankState::failed) return;  // the first word counts
    const std::size_t length = std::min(message.size(), sizeof(own.message) - 1);
    std::memcpy(own.message, message.data(), length);
    own.message[length] = '\0';
    publish(own.state, static_cast<std::uint32_t>(next));
  }
  wake_waiters();
}

void Domain::fail(const std::string& message) {
  check_process();
  leave(RankState::failed, message);
}

void Domain::close() {
  if (generation_ == fork_generation()) leave(RankState::closed, "");  // a forked child has nothing to leave
}

void Domain::wake_waiters() const {
  for (std::uint32_t slot = 0; slot < layout_.shape().slots; ++slot) {
    Signals& own = layout_.signals(base(), slot, rank_);
    for (Signal* signal : {&own.ready, &own.reduced, &own.done}) wake(*signal);
  }
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank_) continue;
    Signal& bell = layout_.bell(base(), peer);
    if (ring(bell)) wake(bell);
    if (layout_.ring_count() == 0) continue;
    wake(layout_.ring_signals(base(), layout_.ring(rank_, peer)).sent);
    wake(layout_.ring_signals(base(), layout_.ring(peer, rank_)).received);
  }
}

void Domain::check_member(int slot, const char* op) const {
  switch (state(rank_)) {
    case RankState::alive:
      break;
    case RankState::absent:
      throw std::logic_error(std::string(op) + ": this rank has not joined the group");
    case RankState::closed:
      throw Fault(FaultKind::closed, rank_, slot, op, 0, 0, "this rank has closed the group");
    case RankState::failed:
      throw Fault(FaultKind::closed, rank_, slot, op, 0, 0,
                  std::string("this rank has failed: ") + status(rank_).message);
  }
  if (!open_) throw std::logic_error(std::string(op) + ": call open_peers first");
}

std::optional<std::string> Domain::loss(int peer) const {
  const std::string rank = "rank " + std::to_string(peer);
  const RankStatus& other = status(peer);
  switch (state(peer)) {
    case RankState::closed:
      return rank + " closed the group";
    case RankState::failed:
      return rank + " failed: " + other.message;
    default:
      break;
  }
  if (peers_[peer] && peers_[peer]->ended()) {
    return rank + " is gone: process " + std::to_string(other.pid) + " has ended";
  }
  return std::nullopt;
}

void Domain::check_peer(const Signal& signal, std::uint32_t expected, const WaitFor& wait) const {
  const auto reason = loss(wait.peer);
  // What a peer published before it left is as good as ever, so the signal is read once more.
  if (reason && !reached(observe(signal), expected)) {
    throw Fault(FaultKind::peer_lost, wait.peer, wait.slot, wait.op, expected, observe(signal),
                *reason);
  }
}

void Domain::check_left(const WaitFor& wait) const {
  if (const auto reason = loss(wait.peer)) {
    throw Fault(FaultKind::peer_lost, wait.peer, wait.slot, wait.op, 0, 0, *reason);
  }
}

void Domain::check_others(const WaitFor& wait) const {
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank_ || state(peer) == RankState::closed) continue;
    if (const auto reason = loss(peer)) {
      throw Fault(FaultKind::peer_lost, peer, wait.slot, wait.op, 0, 0, *reason);
    }
  }
}

std::uint32_t Domain::await(Signal& signal, std::uint32_t expected, double timeout,
                            WaitPolicy& policy, const WaitFor& wait) const {
  if (const std::uint32_t seen = observe(signal); reached(seen, expected)) return seen;
  const auto deadline = deadline_after(timeout);
  const auto on_slice = [&] {
    run_hook();
    check_member(wait.slot, wait.op);  // another thread may close this rank meanwhile
    check_peer(signal, expected, wait);
  };
  if (wait_until(signal, expected, deadline, policy, on_slice)) return observe(signal);
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%g s", timeout);
  std::string detail =
      "rank " + std::to_string(wait.peer) + " did not " + wait.what + " within " + seconds;
  if (const auto& peer = peers_[wait.peer]; peer && peer->stopped()) {
    detail += "; process " + std::to_string(peer->pid()) + " is stopped";
  }
  throw Fault(FaultKind::timeout, wait.peer, wait.slot, wait.op, expected, observe(signal), detail);
}

void Domain::claim(int slot) {
  std::lock_guard lock(mutex_);
  if (slot < 0 || slot >= static_cast<int>(claimed_.size())) {
    throw std::invalid_argument("slot " + std::to_string(slot) + " is not one of the " +
                                std::to_string(claimed_.size()) + " slots of the segment");
  }
  if (claimed_[slot]) {
    throw std::logic_error("slot " + std::to_string(slot) + " is already in use by this rank");
  }
  claimed_[slot] = true;
}

void Domain::claim_ring(std::uint32_t ring) {
  std::lock_guard lock(mutex_);
  if (claimed_rings_.at(ring)) {
    throw std::logic_error("this end of ring " + std::to_string(ring) +
                           " is already in use by this rank");
  }
  claimed_rings_[ring] = true;
}

}  // namespace tpk
