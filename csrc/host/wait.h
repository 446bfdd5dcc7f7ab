// Waiting for a signal: spin, then yield, then sleep in short slices.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "tpk/signal.h"

namespace tpk {

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC

void check_timeout(double seconds);  // refuses what is negative, infinite or undefined
Clock::time_point deadline_after(double seconds);

// How long to try before sleeping. Every waiter has its own and adapts it: a spin is wasted on a peer
// that needs this very core, so the next one is shorter; one that was too short by little is longer.
struct WaitPolicy {
  int spins;  // about ten nanoseconds each
  int max_spins;

  // crowded: peers need this very core from the start.
  static WaitPolicy of(bool crowded);
};

// True once the signal has reached `expected`, false at the deadline. `on_slice` runs before every
// sleep; it looks after everything but the signal and may throw to give up.
bool wait_until(Signal& signal, std::uint32_t expected, Clock::time_point deadline,
                WaitPolicy& policy, const std::function<void()>& on_slice);

// As `wait_until`, for anything that `ready(look)` finds by looking at signals with `look`, and whose publishers
// ring `bell`.
using Look = std::uint32_t (*)(const Signal&);
bool wait_for_bell(Signal& bell, const std::function<bool(Look)>& ready, Clock::time_point deadline,
                   WaitPolicy& policy, const std::function<void()>& on_slice);

void wake(Signal& signal);

// Publishes and wakes whoever sleeps.
inline void raise(Signal& signal, std::uint32_t epoch) {
  if (publish(signal, epoch)) wake(signal);
}

// Also for a rank that waits for more than this signal.
inline void raise(Signal& signal, std::uint32_t epoch, Signal& bell) {
  raise(signal, epoch);
  if (ring(bell)) wake(bell);
}

}  // namespace tpk
