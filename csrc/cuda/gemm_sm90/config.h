// Shapes of a product: which tiles, by how many threads, through how much shared memory.
#pragma once

#include "gemm_sm90/operands.h"
#include "hopper.h"
#include "tpk/order.h"

namespace tpk::device {

// A block of the result, as the thread that loads finds it and tells those that multiply, so that only one
// thread divides integers. A policy sets the first lines.
struct Tile {
  std::int32_t row, column;  // first rows of a and b
  std::int32_t rows;         // of the result in it; none: nothing is multiplied
  std::int32_t pair, stop;   // pairs whose products are summed
  std::int32_t to;           // first row in the result
  std::int32_t mark;         // of the policy
  bool more;                 // false: there is none any more
  std::int32_t stages, stage;  // how many, the first
  std::uint32_t parity;
};

// Three warpgroups: one loads, two multiply. They share a tile (`kTeams` 1, cooperative): the largest
// tiles, so the fewest loads. Or each has tiles of its own (2, ping-pong): while one multiplies, the
// other stores, and there are twice as many tiles to divide over the multiprocessors.
template <class Number_, Major kMajorA_, Major kMajorB_, int kM_, int kN_, int kTeams_, int kStages_>
struct Config {
  using Number = Number_;
  static constexpr Major kMajorA = kMajorA_, kMajorB = kMajorB_;
  static constexpr int kM = kM_, kN = kN_, kTeams = kTeams_, kStages = kStages_;
  static constexpr int kGroups = 2 / kTeams;  // warpgroups that share a tile
  static constexpr int kAtoms = kM / kGroups / 64;
  static constexpr int kTeamThreads = 128 * kGroups;
  static constexpr int kThreads = 3 * 128;
  static constexpr int kStageBytes = (kM + kN) * kBlockK * 2;
  // Sums leave by way of shared memory, so many columns of 16 rows of a warp at a time.
  static constexpr int kSlice = kN < 64 ? kN : 64;
  // 16 bytes more than a row: eight rows, written at the same time, lie in different banks.
  static constexpr int kSlicePitch = kSlice * 2 + 16;

  static_assert(kTeams == 1 || kTeams == 2);
  static_assert(kAtoms * kGroups * 64 == kM && kM <= 256 && kN <= 256 && kN % kSlice == 0);
  static_assert(kMajorB == Major::K || kN % 64 == 0);
};

template <class Config>
struct Shared {
  alignas(kSwizzleBytes) std::byte a[Config::kStages][Config::kM * kBlockK * 2];
  alignas(kSwizzleBytes) std::byte b[Config::kStages][Config::kN * kBlockK * 2];
  alignas(16) std::byte slices[8][16 * Config::kSlicePitch];
  Barrier full[Config::kStages];
  Barrier empty[Config::kStages];
  Barrier turn[2];  // of a team, to multiply
  Tile tile[4];     // for the teams in turn
  Barrier told[4];  // it is there
  Barrier done[4];  // it may be replaced
  std::int32_t alive[Config::kStages];  // whether what was loaded may be used
  std::int32_t intact;                  // the same of all the block does
  std::int32_t failed[2][kMostRanks];   // see send.h
};
// Of a thread that multiplies, see Products.
template <class Config>
using Sums = float[Config::kAtoms][Config::kN / 2];

// Of a multiprocessor of sm_90, for one block.
inline constexpr int kMostSharedBytes = 227 << 10;

// A stage of the pipeline, and the parity of its phase.
template <int kStages>
struct Place {
  int stage = 0;
  std::uint32_t parity = 0;

  TPK_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// (row block, column block) of `index`: down the rows of a band, then to the next column block, so that
// what is multiplied at the same time shares rows and columns.
inline constexpr std::int32_t kBand = 16;
struct Cell {
  std::int32_t row, column;
};
TPK_DEVICE Cell cell(std::int32_t index, std::int32_t rows, std::int32_t columns) {
  const std::int32_t band = index / (kBand * columns), rest = index % (kBand * columns);
  const std::int32_t left = rows - band * kBand, height = left < kBand ? left : kBand;
  return {band * kBand + rest % height, rest / height};
}

}  // namespace tpk::device
