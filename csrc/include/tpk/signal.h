// How ranks tell each other about data in shared memory. Every memory order of the host side is here.
//
// A round of a slot, on each rank:
//   begin    wait until every peer's `done` covers the round that used this buffer before (credit)
//   fill     plain stores into this rank's own buffer
//   publish  `ready`
//   read     observe a peer's `ready`, then plain loads from its buffer
//   finish   publish `done`: this rank has read all it needs
// Ready is not consumed: without the credit a producer could overwrite what a slow peer still reads,
// and more buffers would only move that race to a later round.
//
// A ring from one rank to another does the same cell by cell: the source waits for credit (`received`),
// fills the cell and publishes `sent`; the destination observes `sent`, reads and publishes `received`.
//
// A rank that waits for any of several rings sleeps on its bell, which those who publish ring behind it.
#pragma once

#include <atomic>
#include <cstdint>

namespace tpk {

// A counter of rounds or cells with one writer, alone on its cache line.
struct alignas(64) Signal {
  std::atomic<std::uint32_t> value;    // also the futex word
  std::atomic<std::uint32_t> waiters;  // threads asleep on `value`, or about to be
};
static_assert(sizeof(Signal) == 64 && std::atomic<std::uint32_t>::is_always_lock_free);

// Counters wrap. The comparison holds while the two are less than 2^31 rounds apart.
inline bool reached(std::uint32_t seen, std::uint32_t expected) {
  return static_cast<std::int32_t>(seen - expected) >= 0;
}

// Counts from 1: round `round` overwrites the buffer of round `round - buffers`.
inline std::uint32_t credit_for(std::uint32_t round, std::uint32_t buffers) {
  return round - buffers;
}

// Everything stored before is visible to whoever observes `epoch`. True if sleepers must be woken.
// Sequential consistency, here and in `prepare_to_sleep`, rules out that the publisher misses a
// sleeper which in turn misses the new value.
[[nodiscard]] inline bool publish(Signal& signal, std::uint32_t epoch) {
  signal.value.store(epoch, std::memory_order_seq_cst);
  return signal.waiters.load(std::memory_order_seq_cst) != 0;
}

inline std::uint32_t observe(const Signal& signal) {
  return signal.value.load(std::memory_order_acquire);
}

// Returns the value to sleep on; the caller sleeps only if it has not reached what it waits for.
inline std::uint32_t prepare_to_sleep(Signal& signal) {
  signal.waiters.fetch_add(1, std::memory_order_seq_cst);
  return signal.value.load(std::memory_order_seq_cst);
}

inline void finish_sleep(Signal& signal) {
  signal.waiters.fetch_sub(1, std::memory_order_relaxed);
}

// The bell of a rank counts events, not rounds, and has many writers. Whoever has published something that the
// rank may wait for rings it: true if sleepers must be woken. A rank that is awake costs a load.
[[nodiscard]] inline bool ring(Signal& bell) {
  if (bell.waiters.load(std::memory_order_seq_cst) == 0) return false;
  bell.value.fetch_add(1, std::memory_order_seq_cst);
  return true;
}

// Between `prepare_to_sleep` on the bell and sleeping, a rank looks once more at what it waits for. Sequential
// consistency rules out that it misses the value while whoever published that misses the sleeper.
inline std::uint32_t observe_before_sleep(const Signal& signal) {
  return signal.value.load(std::memory_order_seq_cst);
}

// Words nobody sleeps on, such as the state of a rank.
inline void publish(std::atomic<std::uint32_t>& word, std::uint32_t value) {
  word.store(value, std::memory_order_release);
}

inline std::uint32_t observe(const std::atomic<std::uint32_t>& word) {
  return word.load(std::memory_order_acquire);
}

}  // namespace tpk
