// What the products of sm_90 are told, besides their operands. Numbers are bits of 16-bit types.
#pragma once

#include "tpk/order.h"

namespace tpk::device {

inline constexpr int kMostPairs = 4;  // of operands of a launch

enum class Activation : std::int32_t { none, gelu, gelu_tanh, silu, relu };

// See signal.h.
struct SignalArguments {
  RowGroups groups;
  std::uint16_t* out;      // [rows, width], contiguous, in the order of the groups
  std::int32_t* counters;  // of finished tiles, of each group
  std::int64_t width;
  std::int64_t columns;  // tiles across
  std::int64_t tiles;
  std::int32_t pairs;
};

// See await.h.
struct Product {
  std::uint16_t* out;         // [rows, width], contiguous
  const std::uint16_t* bias;  // [width] or null
  std::int64_t rows, width;
  std::int32_t tiles;  // across
};

struct AwaitArguments {
  Workspace workspace;
  Arrival arrival;
  Product products[kMostPairs];  // of the pair of operands of the same index
  std::int32_t tiles;       // across all products
  std::int32_t row_blocks;  // AwaitSum: of the product that has most rows
  Activation activation;
  bool add;  // to what is in `out`
};

// See send.h.
struct SendArguments {
  Workspace workspace;     // of at least two ranks, with chunks that hold a tile
  Division division;
  std::uint16_t* out;         // [own rows, width], contiguous
  const std::uint16_t* bias;  // [width] or null
  std::int64_t width;
  std::int32_t row_blocks, columns;  // tiles of the part of the rank that has most, down and across
  std::int32_t pairs;
};

}  // namespace tpk::device
