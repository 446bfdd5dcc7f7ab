// reduce_scatter: every rank gets its rows of the sum over ranks; what
// tp_kernels/kernels/reduce_scatter.py computes, to the bit. A rank that has no rows still signals.
#pragma once

#include "sum.h"

namespace tpk::device {

// x: the rows of all ranks, out: those of this rank, divided by `division` in bytes of Number. A
// round of a channel takes `part` bytes of every rank's rows, a multiple of 16.
template <class Number>
TPK_DEVICE void reduce_scatter(const std::byte* x, std::byte* out, const Division& division,
                               std::int32_t part, const Workspace& w) {
  using Piece = typename Number::Piece;
  Channel c = enter(w);
  const std::int64_t step = std::int64_t{part} * grid_blocks();
  for (std::int64_t first = c.index * part; first < division.most(); first += step) {
    const PeerLines lines{w, lines_of(length_of(division.most(), first, part))};
    // How much there is of line i of the rows of the peers.
    const auto length = [&](std::int32_t i) {
      return length_of(division.rows(lines.peer(i)), first + lines.at(i), kLineBytes);
    };
    advance(c);
    const bool permitted = move_lines(
        lines.count(),
        [&](std::int32_t i) {
          return load_line<Piece>(x + division.start(lines.peer(i)) + first + lines.at(i),
                                  length(i));
        },
        [&] { return observe(c, kCredit, earlier(c.epoch, w.depth)); },
        [&](std::int32_t i, const Line& line) {
          if (length(i) == 0) return;
          store(buffer(w, lines.peer(i), c.index, c.epoch, w.rank) + lines.at(i), line);
        });
    if (!permitted) return;
    publish(c, kReady, c.epoch);
    if (!observe(c, kReady, c.epoch)) return;
    let_start(first + step >= division.most());
    const std::int32_t mine = length_of(division.rows(w.rank), first, part);
    const std::byte* own = x + division.start(w.rank) + first;
    sum_lines<Number>(c, c.epoch, 0, own, mine, [&](std::int32_t i, const float* sum) {
      store_line<Piece>(out + first + i * kLineBytes, mine - i * kLineBytes, narrow<Number>(sum));
    });
    publish(c, kCredit, c.epoch);
  }
  leave(c);
}

}  // namespace tpk::device
