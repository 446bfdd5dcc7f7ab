// all_gather: the rows of all ranks, one after the other, on every rank. Bytes are moved, never
// looked at.
#pragma once

#include "lines.h"

namespace tpk::device {

// x: the rows of this rank, out: those of all, divided by `division` in bytes; all addresses and
// sizes are multiples of sizeof(Piece). A round of a channel takes `part` bytes of every rank's
// rows, a multiple of 16.
template <class Piece>
TPK_DEVICE void all_gather(const std::byte* x, std::byte* out, const Division& division,
                           std::int32_t part, const Workspace& w) {
  Channel c = enter(w);
  const std::int64_t step = std::int64_t{part} * grid_blocks();
  for (std::int64_t first = c.index * part; first < division.most(); first += step) {
    const std::int32_t mine = length_of(division.rows(w.rank), first, part);
    advance(c);
    const bool permitted = move_lines(
        lines_of(mine),
        [&](std::int32_t i) {
          return load_line<Piece>(x + first + i * kLineBytes, mine - i * kLineBytes);
        },
        [&] { return observe(c, kCredit, earlier(c.epoch, w.depth)); },
        [&](std::int32_t i, const Line& line) {
          store_to_peers(c, c.epoch, i, line);
          store_line<Piece>(out + division.start(w.rank) + first + i * kLineBytes,
                            mine - i * kLineBytes, line);
        });
    if (!permitted) return;
    publish(c, kReady, c.epoch);
    if (!observe(c, kReady, c.epoch)) return;
    let_start(first + step >= division.most());
    const PeerLines lines{w, lines_of(length_of(division.most(), first, part))};
    move_lines(
        lines.count(),
        [&](std::int32_t i) {
          return load<Line>(buffer(w, w.rank, c.index, c.epoch, lines.peer(i)) + lines.at(i));
        },
        [&](std::int32_t i, const Line& line) {
          const int peer = lines.peer(i);
          store_line<Piece>(out + division.start(peer) + first + lines.at(i),
                            length_of(division.rows(peer), first + lines.at(i), kLineBytes), line);
        });
    publish(c, kCredit, c.epoch);
  }
  leave(c);
}

}  // namespace tpk::device
