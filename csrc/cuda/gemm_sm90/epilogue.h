// How sums leave the registers: rounded, in 16-byte pieces of rows.
#pragma once

#include <cmath>

#include "gemm_sm90/config.h"

namespace tpk::device {

enum class Activation : std::int32_t { none, gelu, gelu_tanh, silu, relu };

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
TPK_DEVICE Vector activated(Vector vector, Activation activation) {
  if (activation == Activation::none) return vector;
  TPK_UNROLL
  for (std::uint32_t& pair : vector.pair) {
    pair = Number::pack(activate(Number::widen(pair & 0xffff), activation),
                        activate(Number::widen(pair >> 16), activation));
  }
  return vector;
}

// A block of a matrix in memory, `rows` x `columns`, from its corner on.
struct Target {
  std::uint16_t* corner;
  std::int64_t pitch;  // numbers from one row to the next
  std::int64_t rows, columns;
};
// Whether rows of a matrix consist of whole 16-byte pieces.
TPK_DEVICE bool in_vectors(const void* base, std::int64_t pitch, std::int64_t columns) {
  return (reinterpret_cast<std::uintptr_t>(base) | (pitch | columns) * 2) % 16 == 0;
}

// Eight numbers to columns `column` .. `column` + 7 of a row, as far as there are so many.
TPK_DEVICE void store_piece(std::uint16_t* row, std::int64_t column, std::int64_t columns,
                            const Vector& vector, bool in_vectors) {
  if (in_vectors) {
    if (column < columns) store_vector(row + column, vector);
    return;
  }
  TPK_UNROLL
  for (int i = 0; i < 8; ++i) {
    if (column + i < columns) {
      row[column + i] = static_cast<std::uint16_t>(vector.pair[i / 2] >> (16 * (i % 2)));
    }
  }
}

// round(act(round(sums + bias))) to `target`, by all threads of a team. Plain stores: what is released
// afterwards covers them, in the memory of peers too. bias: of the tile's columns, or null.
template <class Config>
TPK_DEVICE void store_tile(const float (&sums)[Config::kAtoms][Config::kN / 2],
                           Shared<Config>& shared, const Target& target, const std::uint16_t* bias,
                           Activation activation) {
  using Number = typename Config::Number;
  constexpr int kPieces = Config::kSlice / 8;
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  std::byte* slice = shared.slices[warp];
  const bool vectors = in_vectors(target.corner, target.pitch, target.columns);
  TPK_UNROLL
  for (int atom = 0; atom < Config::kAtoms; ++atom) {
    // Of the tile, the 16 rows of this warp.
    const int first = (warp / 4 % Config::kGroups * Config::kAtoms + atom) * 64 + warp % 4 * 16;
    TPK_UNROLL
    for (int start = 0; start < Config::kN; start += Config::kSlice) {
      TPK_UNROLL
      for (int j = 0; j < kPieces; ++j) {
        const float* part = sums[atom] + (start / 8 + j) * 4;
        const int column = 8 * j + 2 * (lane % 4);
        float added[2] = {0, 0};
        if (bias != nullptr) {
          TPK_UNROLL
          for (int e = 0; e < 2; ++e) {
            if (start + column + e < target.columns) {
              added[e] = Number::widen(bias[start + column + e]);
            }
          }
        }
        TPK_UNROLL
        for (int h = 0; h < 2; ++h) {
          *reinterpret_cast<std::uint32_t*>(slice + (lane / 4 + 8 * h) * Config::kSlicePitch +
                                            column * 2) =
              Number::pack(part[2 * h] + added[0], part[2 * h + 1] + added[1]);
        }
      }
      sync_warp();
      TPK_NO_UNROLL
      for (int piece = lane; piece < 16 * kPieces; piece += 32) {
        const int row = piece / kPieces, column = piece % kPieces * 8;
        if (first + row < target.rows) {
          const Vector vector = load_vector(slice + row * Config::kSlicePitch + column * 2);
          store_piece(target.corner + (first + row) * target.pitch, start + column, target.columns,
                      activated<Number>(vector, activation), vectors);
        }
      }
      sync_warp();
    }
  }
}

}  // namespace tpk::device
