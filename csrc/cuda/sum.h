// Sums over ranks of what a round has brought.
#pragma once

#include "channel.h"
#include "lines.h"

namespace tpk::device {

// Ranks whose lines are loaded before the first is added, and lines of a rank: what a thread has under way.
inline constexpr int kRanksTogether = 8;
inline constexpr int kLinesTogether = 2;

template <class Number>
struct Totals {
  float values[kLinesTogether][kPerLine<Number>];
};

// float32 sums over the ranks, in rank order, of lines first, first + stride, ... below `count`: those of this
// rank are `own`, the others have come in round `epoch`.
template <class Number>
TPK_DEVICE Totals<Number> sum_of_ranks(const Channel& c, std::int32_t epoch, std::int32_t first,
                                       std::int32_t stride, std::int32_t count, const Line* own) {
  const Workspace& w = c.workspace;
  Totals<Number> totals;
  TPK_UNROLL
  for (int k = 0; k < kLinesTogether; ++k) {
    TPK_UNROLL
    for (float& value : totals.values[k]) value = -0.0f;  // what keeps the sign of a zero
  }
  for (int base = 0; base < w.world; base += kRanksTogether) {
    Line parts[kRanksTogether][kLinesTogether];
    TPK_UNROLL
    for (int r = 0; r < kRanksTogether; ++r) {
      if (base + r >= w.world) continue;
      const std::byte* chunk = buffer(w, w.rank, c.index, epoch, base + r);
      TPK_UNROLL
      for (int k = 0; k < kLinesTogether; ++k) {
        const std::int64_t line = first + k * stride;
        parts[r][k] = own[k];
        if (line < count && base + r != w.rank) {
          parts[r][k] = load<Line>(chunk + line * kLineBytes);
        }
      }
    }
    TPK_UNROLL
    for (int r = 0; r < kRanksTogether; ++r) {
      if (base + r >= w.world) continue;
      TPK_UNROLL
      for (int k = 0; k < kLinesTogether; ++k) {
        float values[kPerLine<Number>];
        widen<Number>(parts[r][k], values);
        TPK_UNROLL
        for (int i = 0; i < kPerLine<Number>; ++i) totals.values[k][i] += values[i];
      }
    }
  }
  return totals;
}

// Calls take(i, sum over the ranks of line i, rounded) for every line i of a message of this rank of `bytes`
// bytes from `own` on, in this thread's turn.
template <class Number, class Take>
TPK_DEVICE void sum_lines(const Channel& c, std::int32_t epoch, const std::byte* own,
                          std::int32_t bytes, Take take) {
  const std::int32_t threads = block_threads();
  const std::int32_t count = lines_of(bytes);
  for (std::int32_t first = thread_index(); first < count; first += kLinesTogether * threads) {
    Line mine[kLinesTogether];
    TPK_UNROLL
    for (int k = 0; k < kLinesTogether; ++k) {
      const std::int32_t at = (first + k * threads) * kLineBytes;
      mine[k] = load_line<typename Number::Piece>(own + at, bytes - at);
    }
    const Totals<Number> totals = sum_of_ranks<Number>(c, epoch, first, threads, count, mine);
    TPK_UNROLL
    for (int k = 0; k < kLinesTogether; ++k) {
      const std::int32_t i = first + k * threads;
      if (i < count) take(i, narrow<Number>(totals.values[k]));
    }
  }
}

}  // namespace tpk::device
