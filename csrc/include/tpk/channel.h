// The memory through which kernels of different ranks exchange data; tp_kernels/kernels/_signals.py and
// workspace.py have the same numbers, and tests compare them: kernels of both kinds take turns in one
// workspace.
//
//   region of a rank:  channel 0 | channel 1 | ...                              `stride` bytes each
//   channel:           READY, CREDIT, EPOCH, DONE, FINISHED | buffer 0 | ... | buffer depth-1
//   buffer:            chunk from rank 0 | chunk from rank 1 | ...              `chunk` bytes each
//
// A channel is what one block of a kernel exchanges with the block of the same index on every peer. Blocks
// of one launch never wait for each other, so a grid of any size is free of deadlock.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TPK_SHARED_CODE __host__ __device__ inline
#else
#define TPK_SHARED_CODE inline
#endif

namespace tpk {

inline constexpr int kMostRanks = 32;  // a word of READY and CREDIT for each

// Byte offsets in a channel. Each kind has a line of its own; every flag has one writer.
inline constexpr std::int64_t kReady = 0;
inline constexpr std::int64_t kCredit = 128;
inline constexpr std::int64_t kEpoch = 256;
inline constexpr std::int64_t kDone = 320;      // rounds that this rank's own products may use
inline constexpr std::int64_t kFinished = 384;  // of channel 0: blocks that multiply and have ended
inline constexpr std::int64_t kSignalBytes = 512;

// int32 words of the record of a wait that expired; `state` is published last, with release.
enum RecordWord { kState, kRank, kOperation, kChannel, kSignal, kPeer, kExpected, kSeen, kRecordWords };
enum RecordState : std::int32_t { kIntact = 0, kFilling = 1, kFailed = 2 };

// Who waits for what, as the record of a wait that expired has it.
struct Wait {
  std::int32_t rank;
  std::int32_t operation;
  std::int32_t channel;
  std::int32_t signal;
  std::int32_t peer;
};

// What a kernel needs to know of a workspace. Passed by value.
struct Workspace {
  const std::int64_t* table;  // address of the region of every rank, in the memory of the device
  std::int32_t* record;       // kRecordWords
  std::int64_t stride;
  std::int64_t chunk;    // a multiple of 16
  std::int64_t timeout;  // nanoseconds that a wait may last
  std::int32_t rank;
  std::int32_t world;
  std::int32_t depth;  // a power of two
  std::int32_t operation;
};

TPK_SHARED_CODE std::int64_t buffer_offset(const Workspace& w, std::int64_t channel,
                                           std::int32_t epoch, int source) {
  const std::int64_t place = (epoch & (w.depth - 1)) * w.world + source;
  return channel * w.stride + kSignalBytes + place * w.chunk;
}

}  // namespace tpk
