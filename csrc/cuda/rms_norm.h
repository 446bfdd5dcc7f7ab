// all_reduce_rms_norm: the sum over ranks, bias, residual and RMS norm in one launch; what
// tp_kernels/kernels/all_reduce_rms_norm.py computes, y up to the order in which squares are
// summed:
//
//     s = round(round(x_0 + ... + x_{W-1} + bias) + residual)        in float32, in rank order
//     y = round(weight * round(s / sqrt(mean(s^2) + epsilon)))
//
// or y in float8 e4m3, y / scale rounded from the y above. In two shots every rank norms all rows
// itself.
#pragma once

#include "sum.h"
#include "tpk/norm.h"

namespace tpk::device {

// Sum of `value` over the block, the same for all threads; in shared memory of norm_shared_bytes.
TPK_DEVICE float sum_of_block(float value) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  const int thread = thread_index(), threads = block_threads();
  shared[thread] = value;
  sync_block();
  if (thread < kPartialSums) {
    float partial = 0;
    for (int i = thread; i < threads; i += kPartialSums) partial += shared[i];
    shared[threads + thread] = partial;
  }
  sync_block();
  float total = 0;
  for (int i = 0; i < kPartialSums && i < threads; ++i) total += shared[threads + i];
  return total;
}

// The rows of a tensor in chunks, where each starts a line.
template <class Number>
struct NormRows {
  using Piece = typename Number::Piece;
  const NormOperands& o;
  std::int32_t bytes;  // of a row
  std::int32_t lines;  // of a row in a chunk

  TPK_DEVICE explicit NormRows(const NormOperands& operands)
      : o(operands),
        bytes(operands.width * static_cast<int>(sizeof(Piece))),
        lines(lines_of(bytes)) {}

  // Byte of line i of rows `row`, row + 1, ...; and how much there is of it.
  TPK_DEVICE std::int64_t place(std::int64_t row, std::int32_t i) const {
    return (row + i / lines) * bytes + i % lines * kLineBytes;
  }
  TPK_DEVICE std::int32_t length(std::int64_t row, std::int32_t i) const {
    return row + i / lines < o.rows ? bytes - i % lines * kLineBytes : 0;
  }

  // s of a line: bias into the float32 sums, residual as an operation of its own.
  TPK_DEVICE Line add(const float* sums, std::int64_t at, std::int32_t i) const {
    const std::int32_t left = bytes - i * kLineBytes;
    float values[kPerLine<Number>], more[kPerLine<Number>];
    TPK_UNROLL
    for (int k = 0; k < kPerLine<Number>; ++k) values[k] = sums[k];
    if (o.bias != nullptr) {
      widen<Number>(load_line<Piece>(o.bias + i * kLineBytes, left), more);
      TPK_UNROLL
      for (int k = 0; k < kPerLine<Number>; ++k) values[k] += more[k];
    }
    Line line = narrow<Number>(values);
    if (o.residual != nullptr) {
      widen<Number>(line, values);
      widen<Number>(load_line<Piece>(o.residual + at + i * kLineBytes, left), more);
      TPK_UNROLL
      for (int k = 0; k < kPerLine<Number>; ++k) values[k] += more[k];
      line = narrow<Number>(values);
    }
    return line;
  }

  // Keep line i of the row at byte `at`, and its squares.
  // What is beyond the end of a row is zero.
  TPK_DEVICE void keep(const Line& line, std::int64_t at, std::int32_t i, float& squares) const {
    store_line<Piece>(o.s + at + i * kLineBytes, bytes - i * kLineBytes, line);
    float values[kPerLine<Number>];
    widen<Number>(line, values);
    TPK_UNROLL
    for (int k = 0; k < kPerLine<Number>; ++k) squares += values[k] * values[k];
  }

  // y of the row at byte `at`, of which each thread has kept the lines that it reads here.
  TPK_DEVICE void norm(std::int64_t at, float squares) const {
    const float mean = sum_of_block(squares) / static_cast<float>(o.width);
    const float factor = 1.0f / square_root(mean + o.epsilon);
    move_lines(
        lines,
        [&](std::int32_t i) {
          return load_line<Piece>(o.s + at + i * kLineBytes, bytes - i * kLineBytes);
        },
        [&](std::int32_t i, const Line& line) { finish(line, at, i, factor); });
  }

  TPK_DEVICE void finish(const Line& line, std::int64_t at, std::int32_t i, float factor) const {
    const std::int32_t left = bytes - i * kLineBytes;
    float values[kPerLine<Number>], weights[kPerLine<Number>];
    widen<Number>(line, values);
    TPK_UNROLL
    for (int k = 0; k < kPerLine<Number>; ++k) values[k] *= factor;
    widen<Number>(narrow<Number>(values), values);
    widen<Number>(load_line<Piece>(o.weight + i * kLineBytes, left), weights);
    TPK_UNROLL
    for (int k = 0; k < kPerLine<Number>; ++k) values[k] *= weights[k];
    const Line y = narrow<Number>(values);
    if (o.scale == nullptr) {
      store_line<Piece>(o.y + at + i * kLineBytes, left, y);
    } else {
      store_quantized(y, (at + i * kLineBytes) / static_cast<int>(sizeof(Piece)),
                      left / static_cast<int>(sizeof(Piece)));
    }
  }

  // `left` numbers of y, from number `place` on, in float8.
  TPK_DEVICE void store_quantized(const Line& y, std::int64_t place, std::int32_t left) const {
    const float scale = *o.scale;
    float values[kPerLine<Number>];
    widen<Number>(y, values);
    TPK_UNROLL
    for (int k = 0; k < kPerLine<Number>; ++k) values[k] /= scale;
    TPK_UNROLL
    for (int k = 0; k < kPerLine<Number>; k += 4) {
      const std::uint32_t word = narrow_to_e4m3(values + k);
      std::byte* target = o.y + place + k;
      if (left >= k + 4 && reinterpret_cast<std::uintptr_t>(target) % sizeof(word) == 0) {
        store(target, word);
        continue;
      }
      TPK_UNROLL
      for (int j = 0; j < 4; ++j) {
        if (k + j < left) store(target + j, static_cast<std::uint8_t>(word >> 8 * j));
      }
    }
  }
};

// A round of a channel takes `part` rows.
template <class Number>
TPK_DEVICE void all_reduce_rms_norm_one_shot(const NormOperands& o, std::int32_t part,
                                             const Workspace& w) {
  const NormRows<Number> rows(o);
  Channel c = enter(w);
  const std::int64_t step = std::int64_t{part} * grid_blocks();
  for (std::int64_t first = c.index * part; first < o.rows; first += step) {
    const std::int32_t taken = length_of(o.rows, first, part);
    advance(c);
    const bool permitted = move_lines(
        taken * rows.lines,
        [&](std::int32_t i) {
          return load_line<typename Number::Piece>(o.x + rows.place(first, i),
                                                   rows.length(first, i));
        },
        [&] { return observe(c, kCredit, earlier(c.epoch, w.depth)); },
        [&](std::int32_t i, const Line& line) { store_to_peers(c, c.epoch, i, line); });
    if (!permitted) return;
    publish(c, kReady, c.epoch);
    if (!observe(c, kReady, c.epoch)) return;
    let_start(first + step >= o.rows);
    for (std::int32_t row = 0; row < taken; ++row) {
      const std::int64_t at = (first + row) * rows.bytes;
      float squares = 0;
      sum_lines<Number>(c, c.epoch, row * rows.lines, o.x + at, rows.bytes,
                        [&](std::int32_t i, const float* sums) {
                          rows.keep(rows.add(sums, at, i), at, i, squares);
                        });
      rows.norm(at, squares);
    }
    publish(c, kCredit, c.epoch);
  }
  leave(c);
}

// Two rounds of a channel take `part` rows for every rank to sum.
template <class Number>
TPK_DEVICE void all_reduce_rms_norm_two_shots(const NormOperands& o, std::int32_t part,
                                              const Workspace& w) {
  const NormRows<Number> rows(o);
  Channel c = enter(w);
  const std::int64_t all = std::int64_t{part} * w.world;
  const std::int64_t step = all * grid_blocks();
  for (std::int64_t first = c.index * all; first < o.rows; first += step) {
    const PeerLines lines{w, part * rows.lines};
    const auto theirs = [&](int peer) { return first + peer * std::int64_t{part}; };
    const auto length = [&](std::int32_t i) {
      return rows.length(theirs(lines.peer(i)), lines.line(i));
    };
    const std::int32_t scattered = advance(c);
    const bool permitted = move_lines(
        lines.count(),
        [&](std::int32_t i) {
          const std::int64_t place = rows.place(theirs(lines.peer(i)), lines.line(i));
          return load_line<typename Number::Piece>(o.x + place, length(i));
        },
        [&] { return observe(c, kCredit, earlier(scattered, w.depth)); },
        [&](std::int32_t i, const Line& line) {
          if (length(i) == 0) return;
          store(buffer(w, lines.peer(i), c.index, scattered, w.rank) + lines.at(i), line);
        });
    if (!permitted) return;
    publish(c, kReady, scattered);
    if (!observe(c, kReady, scattered)) return;
    advance(c);  // no credit to wait for: who has begun the last round has ended those before
    const std::int32_t mine = length_of(o.rows, theirs(w.rank), part);
    for (std::int32_t row = 0; row < mine; ++row) {
      const std::int64_t at = (theirs(w.rank) + row) * rows.bytes;
      float squares = 0;
      sum_lines<Number>(c, scattered, row * rows.lines, o.x + at, rows.bytes,
                        [&](std::int32_t i, const float* sums) {
                          const Line line = rows.add(sums, at, i);
                          store_to_peers(c, c.epoch, row * rows.lines + i, line);
                          rows.keep(line, at, i, squares);
                        });
      rows.norm(at, squares);
    }
    publish(c, kReady, c.epoch);
    tell(c, kCredit, scattered);
    if (!observe(c, kReady, c.epoch)) return;
    let_start(first + step >= o.rows);
    for (int next = 1; next < w.world; ++next) {
      const int peer = (w.rank + next) % w.world;
      const std::byte* chunk = buffer(w, w.rank, c.index, c.epoch, peer);
      const std::int32_t taken = length_of(o.rows, theirs(peer), part);
      for (std::int32_t row = 0; row < taken; ++row) {
        const std::int64_t at = (theirs(peer) + row) * rows.bytes;
        const std::byte* sent = chunk + std::int64_t{row} * rows.lines * kLineBytes;
        float squares = 0;
        move_lines(
            rows.lines,
            [&](std::int32_t i) { return load<Line>(sent + i * std::int64_t{kLineBytes}); },
            [&](std::int32_t i, const Line& line) { rows.keep(line, at, i, squares); });
        rows.norm(at, squares);
      }
    }
    publish(c, kCredit, c.epoch);
  }
  leave(c);
}

}  // namespace tpk::device
