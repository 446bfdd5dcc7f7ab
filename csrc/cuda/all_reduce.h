// all_reduce: the sum over ranks, on every rank; what tp_kernels/kernels/all_reduce.py computes, to
// the bit.
//
// One shot: every rank sends all of x to every peer and sums for itself. Two shots: rank j gets
// part j of every x, sums it and sends the sum to every peer. By the switch (NVLink SHARP): as two
// shots, but the switch adds, in an order of its own, and stores to all ranks.
//
// What a short message costs. Data has to cross the link, and something has to say that it has. One
// shot does it with one store of data and one of a flag per peer; the release between them waits
// until the data has been acknowledged, so three transfers of latency pass before the peer sees the
// flag. Packing a flag into every word of data (NCCL's LL) would leave one transfer, but doubles
// the bytes and needs memory in which nothing else is ever stored: in buffers that all kernels
// share a stale word could be taken for a flag. All else is hidden or short: the loads of x and of
// the credits, which came long ago in all but the first rounds, are under way together, four
// barriers of a block take some 20 ns each, the last signal is not waited for, and the next kernel
// starts meanwhile.
#pragma once

#include "multicast.h"
#include "sum.h"

namespace tpk::device {

// x, out: `bytes` bytes of Number, may be the same; a round of a channel takes `part`, a multiple
// of 16.
template <class Number>
TPK_DEVICE void all_reduce_one_shot(const std::byte* x, std::byte* out, std::int64_t bytes,
                                    std::int32_t part, const Workspace& w) {
  using Piece = typename Number::Piece;
  Channel c = enter(w);
  const std::int64_t step = std::int64_t{part} * grid_blocks();
  for (std::int64_t first = c.index * part; first < bytes; first += step) {
    const std::int32_t length = length_of(bytes, first, part);
    advance(c);
    const bool permitted = move_lines(
        lines_of(length),
        [&](std::int32_t i) {
          return load_line<Piece>(x + first + i * kLineBytes, length - i * kLineBytes);
        },
        [&] { return observe(c, kCredit, earlier(c.epoch, w.depth)); },
        [&](std::int32_t i, const Line& line) { store_to_peers(c, c.epoch, i, line); });
    if (!permitted) return;
    publish(c, kReady, c.epoch);
    if (!observe(c, kReady, c.epoch)) return;
    let_start(first + step >= bytes);
    sum_lines<Number>(c, c.epoch, 0, x + first, length, [&](std::int32_t i, const float* sum) {
      store_line<Piece>(out + first + i * kLineBytes, length - i * kLineBytes, narrow<Number>(sum));
    });
    publish(c, kCredit, c.epoch);
  }
  leave(c);
}

// As all_reduce_one_shot; two rounds of a channel take `part` bytes for every rank to sum.
template <class Number>
TPK_DEVICE void all_reduce_two_shots(const std::byte* x, std::byte* out, std::int64_t bytes,
                                     std::int32_t part, const Workspace& w) {
  using Piece = typename Number::Piece;
  Channel c = enter(w);
  const std::int64_t all = std::int64_t{part} * w.world;
  const std::int64_t step = all * grid_blocks();
  for (std::int64_t first = c.index * all; first < bytes; first += step) {
    const PeerLines lines{w, lines_of(part)};
    // Where line i of the parts of the peers is, and how much of it there is.
    const auto place = [&](std::int32_t i) {
      return first + lines.peer(i) * std::int64_t{part} + lines.at(i);
    };
    const auto length = [&](std::int32_t i) { return length_of(bytes, place(i), kLineBytes); };
    const std::int32_t scattered = advance(c);
    const bool permitted = move_lines(
        lines.count(), [&](std::int32_t i) { return load_line<Piece>(x + place(i), length(i)); },
        [&] { return observe(c, kCredit, earlier(scattered, w.depth)); },
        [&](std::int32_t i, const Line& line) {
          if (length(i) == 0) return;
          store(buffer(w, lines.peer(i), c.index, scattered, w.rank) + lines.at(i), line);
        });
    if (!permitted) return;
    publish(c, kReady, scattered);
    if (!observe(c, kReady, scattered)) return;
    advance(c);  // no credit to wait for: who has begun the last round has ended those before
    const std::int64_t mine = first + w.rank * std::int64_t{part};
    const std::int32_t my_length = length_of(bytes, mine, part);
    sum_lines<Number>(c, scattered, 0, x + mine, my_length, [&](std::int32_t i, const float* sum) {
      const Line line = narrow<Number>(sum);
      store_to_peers(c, c.epoch, i, line);
      store_line<Piece>(out + mine + i * kLineBytes, my_length - i * kLineBytes, line);
    });
    publish(c, kReady, c.epoch);
    tell(c, kCredit, scattered);
    if (!observe(c, kReady, c.epoch)) return;
    let_start(first + step >= bytes);
    move_lines(
        lines.count(),
        [&](std::int32_t i) {
          return load<Line>(buffer(w, w.rank, c.index, c.epoch, lines.peer(i)) + lines.at(i));
        },
        [&](std::int32_t i, const Line& line) {
          store_line<Piece>(out + place(i), length(i), line);
        });
    publish(c, kCredit, c.epoch);
  }
  leave(c);
}

// As all_reduce_one_shot; two rounds of a channel take `part` bytes, of which every rank has the
// switch sum its share of lines. `multicast` is the address that stands for the regions of all
// ranks.
template <class Number>
TPK_DEVICE void all_reduce_by_switch(const std::byte* x, std::byte* out, std::int64_t bytes,
                                     std::int32_t part, std::int64_t multicast,
                                     const Workspace& w) {
  using Piece = typename Number::Piece;
  Channel c = enter(w);
  const std::int64_t step = std::int64_t{part} * grid_blocks();
  for (std::int64_t first = c.index * part; first < bytes; first += step) {
    const std::int32_t length = length_of(bytes, first, part);
    const std::int32_t lines = lines_of(length);
    const std::int32_t gathered = advance(c);
    std::byte* own = buffer(w, w.rank, c.index, gathered, 0);
    const bool permitted = move_lines(
        lines,
        [&](std::int32_t i) {
          return load_line<Piece>(x + first + i * kLineBytes, length - i * kLineBytes);
        },
        [&] { return observe(c, kCredit, earlier(gathered, w.depth)); },
        [&](std::int32_t i, const Line& line) { store(own + i * std::int64_t{kLineBytes}, line); });
    if (!permitted) return;
    publish(c, kReady, gathered);
    if (!observe(c, kReady, gathered)) return;
    advance(c);  // no credit to wait for: who has begun the last round has ended those before
    const std::int64_t source = buffer_offset(w, c.index, gathered, 0);
    const std::int64_t target = buffer_offset(w, c.index, c.epoch, 0);
    const std::int64_t stop = std::int64_t{lines} * (w.rank + 1) / w.world;
    std::int64_t i = std::int64_t{lines} * w.rank / w.world + thread_index();
    for (; i < stop; i += block_threads()) {
      const std::int64_t at = i * kLineBytes;
      sum_and_multicast<Number>(w, multicast, source + at, target + at);
    }
    publish(c, kReady, c.epoch);
    tell(c, kCredit, gathered);
    if (!observe(c, kReady, c.epoch)) return;
    let_start(first + step >= bytes);
    const std::byte* sums = buffer(w, w.rank, c.index, c.epoch, 0);
    move_lines(
        lines, [&](std::int32_t i) { return load<Line>(sums + i * std::int64_t{kLineBytes}); },
        [&](std::int32_t i, const Line& line) {
          store_line<Piece>(out + first + i * kLineBytes, length - i * kLineBytes, line);
        });
    publish(c, kCredit, c.epoch);
  }
  leave(c);
}

}  // namespace tpk::device
