// Sums over ranks of what a round has brought.
#pragma once

#include "channel.h"
#include "lines.h"

namespace tpk::device {

template <class Number, int kLines>
struct Totals {
  float values[kLines][kPerLine<Number>];
};

// float32 sums over the ranks, in rank order, of lines first, first + stride, ... below `count`:
// those of this rank are `own`, the others have come in round `epoch`. Lines of kRanks ranks are
// loaded before one is added.
template <class Number, int kRanks, int kLines>
TPK_DEVICE Totals<Number, kLines> sum_of_ranks(const Channel& c, std::int32_t epoch,
                                               std::int32_t first, std::int32_t stride,
                                               std::int32_t count, const Line* own) {
  const Workspace& w = c.workspace;
  Totals<Number, kLines> totals;
  TPK_UNROLL
  for (int k = 0; k < kLines; ++k) {
    TPK_UNROLL
    for (float& value : totals.values[k]) value = -0.0f;  // what keeps the sign of a zero
  }
  for (int base = 0; base < w.world; base += kRanks) {
    Line parts[kRanks][kLines];
    TPK_UNROLL
    for (int r = 0; r < kRanks; ++r) {
      const int source = base + r;
      if (source >= w.world) continue;
      const std::byte* chunk = buffer(w, w.rank, c.index, epoch, source);
      TPK_UNROLL
      for (int k = 0; k < kLines; ++k) {
        const std::int64_t line = first + k * stride;
        parts[r][k] = own[k];
        if (line < count && source != w.rank) {
          parts[r][k] = load<Line>(chunk + line * kLineBytes);
        }
      }
    }
    TPK_UNROLL
    for (int r = 0; r < kRanks; ++r) {
      if (base + r >= w.world) continue;
      TPK_UNROLL
      for (int k = 0; k < kLines; ++k) {
        float values[kPerLine<Number>];
        widen<Number>(parts[r][k], values);
        TPK_UNROLL
        for (int i = 0; i < kPerLine<Number>; ++i) totals.values[k][i] += values[i];
      }
    }
  }
  return totals;
}

template <class Number, int kRanks, int kLines, class Take>
TPK_DEVICE void sum_lines_of(const Channel& c, std::int32_t epoch, std::int32_t chunk_line,
                             const std::byte* own, std::int32_t bytes, Take take) {
  const std::int32_t threads = block_threads();
  const std::int32_t count = lines_of(bytes);
  for (std::int32_t first = thread_index(); first < count; first += kLines * threads) {
    Line mine[kLines];
    TPK_UNROLL
    for (int k = 0; k < kLines; ++k) {
      const std::int32_t at = (first + k * threads) * kLineBytes;
      mine[k] = load_line<typename Number::Piece>(own + at, bytes - at);
    }
    const auto totals = sum_of_ranks<Number, kRanks, kLines>(c, epoch, chunk_line + first, threads,
                                                             chunk_line + count, mine);
    TPK_UNROLL
    for (int k = 0; k < kLines; ++k) {
      const std::int32_t i = first + k * threads;
      if (i < count) take(i, totals.values[k]);
    }
  }
}

// Calls take(i, float32 sums over the ranks of line i) for every line i of a message of `bytes`
// bytes, in this thread's turn: this rank's are at `own`, the others from line `chunk_line` of
// their chunks on.
template <class Number, class Take>
TPK_DEVICE void sum_lines(const Channel& c, std::int32_t epoch, std::int32_t chunk_line,
                          const std::byte* own, std::int32_t bytes, Take take) {
  // As many loads under way with few ranks as with many.
  if (c.workspace.world <= 4) {
    sum_lines_of<Number, 4, 2>(c, epoch, chunk_line, own, bytes, take);
  } else {
    sum_lines_of<Number, 8, 1>(c, epoch, chunk_line, own, bytes, take);
  }
}

}  // namespace tpk::device
