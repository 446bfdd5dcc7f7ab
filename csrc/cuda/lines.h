// Lines of 16 bytes between memory of the caller, of any length and alignment, and buffers of a
// channel, which are aligned and have room for whole lines.
#pragma once

#include "channel.h"
#include "tpk/number.h"
#include "tpk/order.h"

namespace tpk::device {

// Lines that a thread has under way at a time: 24 KiB of a block of 384. To keep its share of the
// memory of an H200 busy, a multiprocessor needs 18 KiB (4.8 TB/s for 0.5 us, over 132).
inline constexpr int kBatch = 4;

TPK_DEVICE std::int32_t lines_of(std::int64_t bytes) {
  return static_cast<std::int32_t>(ceil_div(larger(bytes, 0), kLineBytes));
}

// Bytes from `first` on that are left of `bytes`, at most `most`.
TPK_DEVICE std::int32_t length_of(std::int64_t bytes, std::int64_t first, std::int32_t most) {
  return static_cast<std::int32_t>(larger(smaller(bytes - first, most), 0));
}

TPK_DEVICE bool is_whole(const std::byte* at, std::int32_t bytes) {
  return bytes >= kLineBytes && reinterpret_cast<std::uintptr_t>(at) % kLineBytes == 0;
}

// The line at `at`, of which `bytes` are there; zero beyond. `at` is aligned to Piece.
template <class Piece>
TPK_DEVICE Line load_line(const std::byte* at, std::int32_t bytes) {
  if (is_whole(at, bytes)) return load<Line>(at);
  constexpr int kPieces = sizeof(std::uint32_t) / sizeof(Piece);
  Line line;
  TPK_UNROLL
  for (int i = 0; i < kLineWords; ++i) {
    line.words[i] = 0;
    TPK_UNROLL
    for (int j = 0; j < kPieces; ++j) {
      const int place = (i * kPieces + j) * static_cast<int>(sizeof(Piece));
      if (place >= bytes) continue;
      line.words[i] |= std::uint32_t{load<Piece>(at + place)} << (8 * sizeof(Piece) * j);
    }
  }
  return line;
}

template <class Piece>
TPK_DEVICE void store_line(std::byte* at, std::int32_t bytes, const Line& line) {
  if (is_whole(at, bytes)) return store(at, line);
  constexpr int kPieces = sizeof(std::uint32_t) / sizeof(Piece);
  TPK_UNROLL
  for (int i = 0; i < kLineWords; ++i) {
    TPK_UNROLL
    for (int j = 0; j < kPieces; ++j) {
      const int place = (i * kPieces + j) * static_cast<int>(sizeof(Piece));
      if (place >= bytes) continue;
      store(at + place, static_cast<Piece>(line.words[i] >> (8 * sizeof(Piece) * j)));
    }
  }
}

// `lines` lines for every peer, counted through: those of the next rank first, so that not all
// ranks send to the same one at once.
struct PeerLines {
  const Workspace& workspace;
  std::int32_t lines;

  TPK_DEVICE std::int32_t count() const { return (workspace.world - 1) * lines; }
  TPK_DEVICE int peer(std::int32_t i) const {
    const int rank = workspace.rank + 1 + i / lines;
    return rank < workspace.world ? rank : rank - workspace.world;
  }
  // Among those for the peer.
  TPK_DEVICE std::int32_t line(std::int32_t i) const { return i % lines; }
  TPK_DEVICE std::int32_t at(std::int32_t i) const { return line(i) * kLineBytes; }  // first byte
};

// Store `line` to every peer, as line `i` of what this rank sends in round `epoch`.
TPK_DEVICE void store_to_peers(const Channel& c, std::int32_t epoch, std::int32_t i,
                               const Line& line) {
  const Workspace& w = c.workspace;
  TPK_NO_UNROLL  // stores wait for nothing; the registers are wanted for lines
  for (int step = 1; step < w.world; ++step) {  // as PeerLines
    const int next = w.rank + step;
    const int peer = next < w.world ? next : next - w.world;
    store(buffer(w, peer, c.index, epoch, w.rank) + i * std::int64_t{kLineBytes}, line);
  }
}

// Calls take(i, load(i)) for every i below `count`, in this thread's turn, a batch of loads before
// what is done with them. `permit`, which all threads call, comes after the first loads: its wait
// hides theirs. False if it says so; nothing is taken then.
template <class Load, class Permit, class Take>
TPK_DEVICE bool move_lines(std::int32_t count, Load load, Permit permit, Take take) {
  const std::int32_t threads = block_threads();
  for (std::int32_t first = 0; first == 0 || first < count; first += kBatch * threads) {
    Line lines[kBatch];
    TPK_UNROLL
    for (int k = 0; k < kBatch; ++k) {
      const std::int32_t i = first + k * threads + thread_index();
      if (i < count) lines[k] = load(i);
    }
    if (first == 0 && !permit()) return false;
    TPK_UNROLL
    for (int k = 0; k < kBatch; ++k) {
      const std::int32_t i = first + k * threads + thread_index();
      if (i < count) take(i, lines[k]);
    }
  }
  return true;
}

template <class Load, class Take>
TPK_DEVICE void move_lines(std::int32_t count, Load load, Take take) {
  move_lines(count, load, [] { return true; }, take);
}

}  // namespace tpk::device
