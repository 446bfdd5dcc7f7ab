// How blocks of different ranks tell each other about data; the protocol is that of
// tp_kernels/kernels/_signals.py. A round, with `epoch` counting rounds for ever:
//
//   epoch = advance()
//   observe(kCredit, epoch - depth)   every peer has read what this rank sent it `depth` rounds ago
//   plain stores into the buffers of the peers
//   publish(kReady, epoch)
//   observe(kReady, epoch)            every peer's data is here
//   plain loads from the own buffers
//   publish(kCredit, epoch)           the peers may overwrite them
//
// A wait that expires fills the record of the workspace, once, and the block ends without another
// store or signal: no peer takes for data what was never complete. Kernels that start later see the
// record.
#pragma once

#include "device.h"

namespace tpk::device {

// Polls before a wait looks at the clock, which takes longer than a poll.
inline constexpr int kEagerPolls = 64;

TPK_DEVICE bool reached(std::int32_t seen, std::int32_t expected) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(seen) -
                                   static_cast<std::uint32_t>(expected)) >= 0;
}

// Round `epoch` - `rounds`, which may wrap.
TPK_DEVICE std::int32_t earlier(std::int32_t epoch, std::int32_t rounds) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(epoch) -
                                   static_cast<std::uint32_t>(rounds));
}

TPK_DEVICE std::byte* region(const Workspace& w, int owner) {
  return reinterpret_cast<std::byte*>(load_constant(w.table + owner));
}

// Word of `channel` at byte `offset`, in the memory of `owner`.
TPK_DEVICE std::int32_t* word(const Workspace& w, int owner, std::int64_t channel,
                              std::int64_t offset) {
  return reinterpret_cast<std::int32_t*>(region(w, owner) + channel * w.stride + offset);
}

// What rank `source` sends rank `owner` in round `epoch`: w.chunk bytes.
TPK_DEVICE std::byte* buffer(const Workspace& w, int owner, std::int64_t channel,
                             std::int32_t epoch, int source) {
  return region(w, owner) + buffer_offset(w, channel, epoch, source);
}

// One thread: wait until `flag` is at least `expected`, for `timeout` nanoseconds. False if it
// never was; `record` then says so, unless it has something to say already.
TPK_DEVICE bool await(const std::int32_t* flag, std::int32_t expected, const Wait& wait,
                      std::int64_t timeout, std::int32_t* record) {
  std::int64_t begin = 0;
  for (int polls = 0;; polls += polls <= kEagerPolls) {
    const std::int32_t seen = load_acquire(flag);
    if (reached(seen, expected)) return true;
    if (polls < kEagerPolls) continue;
    const std::int64_t now = nanoseconds();
    if (polls == kEagerPolls) begin = now;
    if (now - begin > timeout) {
      if (claim(record + kState, kIntact, kFilling)) {
        record[kRank] = wait.rank;
        record[kOperation] = wait.operation;
        record[kChannel] = wait.channel;
        record[kSignal] = wait.signal;
        record[kPeer] = wait.peer;
        record[kExpected] = expected;
        record[kSeen] = seen;
        store_release(record + kState, kFailed);
      }
      return false;
    }
    rest();
  }
}

// A block's view of its channel.
struct Channel {
  const Workspace& workspace;
  std::int64_t index;
  std::int32_t epoch;  // rounds that this channel has made
  bool alive;          // the threads of the block agree about it from the first `observe` on
};

// Before anything else. The kernel before in the stream may still be running: it stores the epoch.
TPK_DEVICE Channel enter(const Workspace& w) {
  await_predecessor();
  const std::int64_t index = block_index();
  return {w, index, *word(w, w.rank, index, kEpoch), load_relaxed(w.record + kState) == kIntact};
}

// Begin the next round; returns its number.
TPK_DEVICE std::int32_t advance(Channel& c) { return c.epoch = earlier(c.epoch, -1); }

// Keep the epoch for the next launch: after everything else, of a block that has made a round,
// whose last `publish` comes after all threads have read the epoch.
TPK_DEVICE void leave(const Channel& c) {
  if (thread_index() == 0) *word(c.workspace, c.workspace.rank, c.index, kEpoch) = c.epoch;
}

// Wait until every peer has published `expected` or later; false if one has not, or if the
// workspace had failed before. The block has at least as many threads as there are ranks.
TPK_DEVICE bool observe(Channel& c, std::int64_t signal, std::int32_t expected) {
  const Workspace& w = c.workspace;
  const int peer = thread_index();
  bool failed = !c.alive;
  if (c.alive && peer < w.world && peer != w.rank) {
    const Wait wait{w.rank, w.operation, static_cast<std::int32_t>(c.index),
                    static_cast<std::int32_t>(signal), peer};
    failed = !await(word(w, w.rank, c.index, signal) + peer, expected, wait, w.timeout, w.record);
  }
  c.alive = !sync_block_or(failed);  // what one thread has observed holds for the block
  return c.alive;
}

// Store `epoch` to this rank's word of every peer, behind a barrier of the block.
TPK_DEVICE void tell(const Channel& c, std::int64_t signal, std::int32_t epoch) {
  const Workspace& w = c.workspace;
  const int peer = thread_index();
  if (peer < w.world && peer != w.rank) {
    store_release(word(w, peer, c.index, signal) + w.rank, epoch);
  }
}

// After the last wait of a block, if this `is_last`: the next kernel in the stream may start, to
// wait for the end of this one. Not earlier: on a device that several ranks share it could take the
// place of a kernel of a peer, for which this one waits.
TPK_DEVICE void let_start(bool is_last) {
  if (is_last) release_successor();
}

// Tell every peer that all threads of this block have finished reading or writing round `epoch`.
TPK_DEVICE void publish(const Channel& c, std::int64_t signal, std::int32_t epoch) {
  sync_block();  // one thread releases for the whole block
  tell(c, signal, epoch);
}

}  // namespace tpk::device
