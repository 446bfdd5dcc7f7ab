// In which order rows are computed, sent and awaited: integers only, the same on host and device.
#pragma once

#include <cstdint>

#include "tpk/channel.h"

namespace tpk {

TPK_SHARED_CODE std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
TPK_SHARED_CODE std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
TPK_SHARED_CODE std::int64_t larger(std::int64_t a, std::int64_t b) { return a < b ? b : a; }

// Rows divided over ranks: `small` each, and the first `more` ranks `unit` more.
struct Division {
  std::int64_t small;
  std::int64_t unit;
  std::int32_t more;

  TPK_SHARED_CODE std::int64_t start(int rank) const {
    return small * rank + unit * smaller(rank, more);
  }
  TPK_SHARED_CODE std::int64_t rows(int rank) const { return small + (rank < more ? unit : 0); }
  TPK_SHARED_CODE std::int64_t most() const { return rows(0); }
  // Rank that has row `row`, of `world`.
  TPK_SHARED_CODE int owner(std::int64_t row, int world) const {
    int rank = 0;
    while (rank + 1 < world && row >= start(rank + 1)) ++rank;
    return rank;
  }
};

// Rows of all ranks that arrive chunk by chunk: chunk j of every rank, `part` elements of its rows of
// `width`, comes through channel j % channels in round j / channels.
struct Arrival {
  Division division;
  std::int64_t width;
  std::int64_t part;
  std::int32_t channels;
  std::int32_t world;

  // Rounds of `channel` that have to be done before rows [first, stop) of the gathered tensor are there.
  TPK_SHARED_CODE std::int32_t rounds(std::int64_t first, std::int64_t stop, int channel) const {
    std::int32_t needed = 0;
    for (int rank = 0; rank < world; ++rank) {
      const std::int64_t start = division.start(rank);
      const std::int64_t low = larger(first, start) - start;
      const std::int64_t high = smaller(stop, start + division.rows(rank)) - start;
      if (high <= low) continue;
      const std::int64_t oldest = low * width / part;
      const std::int64_t latest = (high * width - 1) / part;
      // The latest chunk of this channel that is not after `latest`.
      const std::int64_t chunk =
          latest - (latest - channel + channels * std::int64_t{kMostRanks}) % channels;
      if (chunk >= oldest && chunk >= 0) {
        needed = static_cast<std::int32_t>(larger(needed, chunk / channels + 1));
      }
    }
    return needed;
  }
};

// Blocks of `block` rows in the order in which rows arrive: those that start in this rank's own part,
// then one of each peer in turn, since all peers arrive at the same rate.
struct ArrivalOrder {
  Division division;
  std::int64_t block;
  std::int32_t rank;
  std::int32_t world;

  TPK_SHARED_CODE std::int64_t first_block(int part) const {
    return ceil_div(division.start(part), block);
  }
  TPK_SHARED_CODE std::int64_t blocks(int part) const {
    return first_block(part + 1) - first_block(part);
  }
  // Turns to ask for; a peer that has less than others leaves its last ones out.
  TPK_SHARED_CODE std::int64_t turns() const {
    std::int64_t most = 0;
    for (int part = 0; part < world; ++part) {
      if (part != rank) most = larger(most, blocks(part));
    }
    return blocks(rank) + most * (world - 1);
  }
  // The block of turn `turn`, or -1.
  TPK_SHARED_CODE std::int64_t at(std::int64_t turn) const {
    const std::int64_t own = blocks(rank);
    if (turn < own) return first_block(rank) + turn;
    const std::int64_t after = turn - own;
    const int part = static_cast<int>((rank + 1 + after % (world - 1)) % world);
    const std::int64_t index = after / (world - 1);
    return index < blocks(part) ? first_block(part) + index : -1;
  }
};

struct GroupedTile {
  std::int32_t group;
  std::int64_t source;  // first row in the operand
  std::int64_t target;  // first row in the buffer
  std::int64_t rows;    // of the result in this tile, 1 to block_m
  std::int64_t column;
};

// Rows of a product in the order in which they are sent: group g takes, of every part, rows
// [g * size, (g + 1) * size) of that part. In the buffer groups follow each other, and within a group
// the parts. For an all-reduce there is one part. See tp_kernels/comm/row_groups.py.
struct RowGroups {
  Division division;
  std::int64_t size;
  std::int32_t parts;

  TPK_SHARED_CODE std::int64_t count() const {
    return division.most() == 0 ? 0 : ceil_div(division.most(), size);
  }
  // Rows of `part` in group `group`.
  TPK_SHARED_CODE std::int64_t rows(std::int64_t group, int part) const {
    return smaller(larger(division.rows(part) - group * size, 0), size);
  }
  // First row of `part` in `group`, in the buffer.
  TPK_SHARED_CODE std::int64_t target(std::int64_t group, int part) const {
    std::int64_t row = 0;
    for (int p = 0; p < parts; ++p) {
      row += smaller(division.rows(p), group * size);
      if (p < part) row += rows(group, p);
    }
    return row;
  }
  TPK_SHARED_CODE std::int64_t row_blocks(std::int64_t group, std::int64_t block_m) const {
    std::int64_t blocks = 0;
    for (int part = 0; part < parts; ++part) blocks += ceil_div(rows(group, part), block_m);
    return blocks;
  }
  TPK_SHARED_CODE std::int64_t tiles(std::int64_t group, std::int64_t block_m,
                                     std::int64_t columns) const {
    return row_blocks(group, block_m) * columns;
  }
  // Tile `index` of a result that is `columns` tiles of block_n wide, `group` by group; within a group
  // row blocks come first, so that what runs at the same time shares a panel of the weight.
  TPK_SHARED_CODE GroupedTile tile(std::int64_t index, std::int64_t block_m, std::int64_t block_n,
                                   std::int64_t columns) const {
    // All groups but the last few are alike: skip those that every part fills.
    const std::int64_t full = division.rows(parts - 1) / size;
    const std::int64_t each = parts * ceil_div(size, block_m) * columns;
    std::int64_t group = smaller(full, index / each);
    index -= group * each;
    std::int64_t blocks = row_blocks(group, block_m);
    while (index >= blocks * columns) {
      index -= blocks * columns;
      blocks = row_blocks(++group, block_m);
    }
    std::int64_t block = index % blocks;
    int part = 0;
    while (block >= ceil_div(rows(group, part), block_m)) {
      block -= ceil_div(rows(group, part++), block_m);
    }
    const std::int64_t down = block * block_m;
    return {static_cast<std::int32_t>(group), division.start(part) + group * size + down,
            target(group, part) + down, smaller(rows(group, part) - down, block_m),
            index / blocks * block_n};
  }
};

}  // namespace tpk
