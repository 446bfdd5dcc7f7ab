#include "wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <stdexcept>
#include <string>

namespace tpk {
namespace {

constexpr std::chrono::nanoseconds kSlice = std::chrono::milliseconds(20);
constexpr std::chrono::nanoseconds kYield = std::chrono::microseconds(100);
constexpr int kMinSpins = 20;
constexpr int kMaxSpins = 2000;

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The futex is shared by processes, so it has no FUTEX_PRIVATE_FLAG.
long futex(const std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* timeout) {
  return ::syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

// Sleeps unless `ready(value)`, which is asked after this thread has said that it is about to.
template <class Ready>
void sleep_on(Signal& signal, std::chrono::nanoseconds limit, Ready&& ready) {
  const std::uint32_t seen = prepare_to_sleep(signal);
  if (!ready(seen)) {
    timespec timeout{};
    timeout.tv_sec = static_cast<time_t>(limit.count() / 1'000'000'000);
    timeout.tv_nsec = static_cast<long>(limit.count() % 1'000'000'000);
    // Woken, changed before it slept, interrupted or timed out: the caller looks again.
    futex(signal.value, FUTEX_WAIT, seen, &timeout);
  }
  finish_sleep(signal);
}

// Spins, yields, then sleeps in slices. `ready()` looks, `sleep(limit)` sleeps.
template <class Ready, class Sleep>
bool wait_in_stages(Ready&& ready, Sleep&& sleep, Clock::time_point deadline, WaitPolicy& policy,
                    const std::function<void()>& on_slice) {
  for (int spin = 0; spin < policy.spins; ++spin) {
    if (ready()) {
      policy.spins = std::min(policy.spins * 2, policy.max_spins);
      return true;
    }
    relax();
  }
  const int shorter = std::max(policy.spins / 2, kMinSpins);
  // Bounded by time: on a busy machine a single yield may cost a slice of another thread.
  const auto yield_until = std::min(deadline, Clock::now() + kYield);
  int yields = 0;
  do {
    if (ready()) {
      // A peer on another core comes while yields of nobody's use return at once: a longer spin meets it. One
      // that comes with the first yield needed this core.
      policy.spins = yields > 1 ? std::min(policy.spins * 2, policy.max_spins) : shorter;
      return true;
    }
    ::sched_yield();
    ++yields;
  } while (Clock::now() < yield_until);
  policy.spins = shorter;
  while (!ready()) {
    on_slice();
    const auto left = deadline - Clock::now();
    if (left <= left.zero()) return ready();
    sleep(std::min<std::chrono::nanoseconds>(left, kSlice));
  }
  return true;
}

}  // namespace

void check_timeout(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) {
    throw std::invalid_argument("timeout=" + std::to_string(seconds) +
                                ": use a number of seconds that is not negative");
  }
}

Clock::time_point deadline_after(double seconds) {
  check_timeout(seconds);
  const double bounded = std::min(seconds, 1e9);  // 31 years: the sum cannot overflow
  return Clock::now() + std::chrono::nanoseconds(static_cast<std::int64_t>(bounded * 1e9));
}

WaitPolicy WaitPolicy::of(bool crowded) {
  return crowded ? WaitPolicy{kMinSpins, kMinSpins} : WaitPolicy{kMaxSpins, kMaxSpins};
}

bool wait_until(Signal& signal, std::uint32_t expected, Clock::time_point deadline,
                WaitPolicy& policy, const std::function<void()>& on_slice) {
  return wait_in_stages(
      [&] { return reached(observe(signal), expected); },
      [&](std::chrono::nanoseconds limit) {
        sleep_on(signal, limit, [&](std::uint32_t seen) { return reached(seen, expected); });
      },
      deadline, policy, on_slice);
}

bool wait_for_bell(Signal& bell, const std::function<bool(Look)>& ready, Clock::time_point deadline,
                   WaitPolicy& policy, const std::function<void()>& on_slice) {
  return wait_in_stages(
      [&] { return ready(observe); },
      [&](std::chrono::nanoseconds limit) {
        sleep_on(bell, limit, [&](std::uint32_t) { return ready(observe_before_sleep); });
      },
      deadline, policy, on_slice);
}

void wake(Signal& signal) { futex(signal.value, FUTEX_WAKE, INT_MAX, nullptr); }

}  // namespace tpk
