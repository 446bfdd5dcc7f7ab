// How sums leave the registers: rounded, in 16-byte lines of rows.
#pragma once

#include <cmath>

#include "gemm_sm90/config.h"
#include "lines.h"

namespace tpk::device {

// As tp_kernels/kernels/_activation.py computes them.
TPK_DEVICE float sigmoid(float x) {
  const float small = expf(-fabsf(x));
  return (x >= 0 ? 1.0f : small) / (1.0f + small);
}
TPK_DEVICE float activate(float x, Activation activation) {
  switch (activation) {
    case Activation::gelu:
      return x * (0.5f * (1.0f + erff(0.7071067811865476f * x)));
    case Activation::gelu_tanh:
      return x * sigmoid(1.5957691216057308f * x * (1.0f + 0.044715f * (x * x)));
    case Activation::silu:
      return x * sigmoid(x);
    case Activation::relu:
      return x > 0 ? x : x != x ? x : 0.0f;  // NaN stays
    default:
      return x;
  }
}

template <class Number>
TPK_DEVICE Line activated(const Line& line, Activation activation) {
  if (activation == Activation::none) return line;
  float values[kPerLine<Number>];
  widen<Number>(line, values);
  TPK_UNROLL
  for (float& value : values) value = activate(value, activation);
  return narrow<Number>(values);
}

// `line`, or those of its bytes that are `left` of a row.
TPK_DEVICE void put_line(std::byte* to, std::int32_t left, const Line& line) {
  const std::int32_t bytes = left < kLineBytes ? left : kLineBytes;
  if (is_whole(to, bytes)) {
    store_global(to, line);
  } else {
    store_line<std::uint16_t>(to, bytes, line);
  }
}

// A block of a matrix in memory, `rows` x `columns`, from its corner on.
struct Target {
  std::uint16_t* corner;
  std::int64_t pitch;  // numbers from one row to the next
  std::int32_t rows, columns;
};
// Of a result that is `width` columns wide, in a tile.
template <class Config>
TPK_DEVICE std::int32_t columns_left(std::int64_t width, const Tile& tile) {
  return static_cast<std::int32_t>(smaller(width - tile.column, Config::kN));
}

// What is added to the sums before they are rounded, from the corner of the tile on: rows of a matrix, or
// a bias, which has pitch 0. Or nothing: null.
struct Added {
  const std::uint16_t* corner;
  std::int64_t pitch;

  template <class Number>
  TPK_DEVICE float at(std::int32_t row, std::int32_t column, const Target& target) const {
    if (corner == nullptr || row >= target.rows || column >= target.columns) return 0;
    float pair[Number::kPerWord];
    Number::widen(corner[row * pitch + column], pair);
    return pair[0];
  }
};

// round(act(round(sums + added))) to `target`, by all threads of a team. Plain stores: what is released
// afterwards covers them, in the memory of peers too.
template <class Config>
TPK_DEVICE void store_tile(const Sums<Config>& sums, Shared<Config>& shared, const Target& target,
                           const Added& added, Activation activation) {
  using Number = typename Config::Number;
  constexpr int kLines = Config::kSlice * 2 / kLineBytes;  // of a row of a slice
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  std::byte* slice = shared.slices[warp];
  TPK_UNROLL
  for (int atom = 0; atom < Config::kAtoms; ++atom) {
    // Of the tile, the 16 rows of this warp.
    const int first = (warp / 4 % Config::kGroups * Config::kAtoms + atom) * 64 + warp % 4 * 16;
    TPK_UNROLL
    for (int start = 0; start < Config::kN; start += Config::kSlice) {
      TPK_UNROLL
      for (int j = 0; j < kLines; ++j) {
        const float* part = sums[atom] + (start / 8 + j) * 4;
        const int column = 8 * j + 2 * (lane % 4);
        TPK_UNROLL
        for (int h = 0; h < 2; ++h) {
          const int row = lane / 4 + 8 * h;
          float values[2];
          TPK_UNROLL
          for (int e = 0; e < 2; ++e) {
            values[e] = part[2 * h + e] +
                        added.template at<Number>(first + row, start + column + e, target);
          }
          store(slice + row * Config::kSlicePitch + column * 2, Number::narrow(values));
        }
      }
      sync_warp();
      TPK_NO_UNROLL
      for (int i = lane; i < 16 * kLines; i += 32) {
        const int row = i / kLines, column = i % kLines * 8;
        const std::int32_t left = (target.columns - start - column) * 2;
        if (first + row < target.rows && left > 0) {
          const Line line = activated<Number>(
              load<Line>(slice + row * Config::kSlicePitch + column * 2), activation);
          auto* to = reinterpret_cast<std::byte*>(
              target.corner + (first + row) * target.pitch + start + column);
          put_line(to, left, line);
        }
      }
      sync_warp();
    }
  }
}

}  // namespace tpk::device
