#include "tuning.h"

#include <limits>

namespace tpk {
namespace {

constexpr std::uint64_t KiB = 1 << 10;
constexpr std::uint64_t MiB = 1 << 20;
constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

struct Row {
  const char* isa;  // "": any
  std::uint32_t world;
  Tuning tuning;
};

// Measured with bench/tune_collectives.py, float32, AVX-512, on 2 cores of a Xeon with 2 MiB of L2 cache
// a core; worlds above 2 therefore with more ranks than cores. What is in buffers already saves one
// of the copies that two shots avoid: there the threshold is assumed to be twice as high. AVX2 and
// scalar code of two ranks cross between 64 and 128 KiB too, within 12 % at 64 KiB, so they have no rows
// of their own. Rows of one instruction set would stand in order of world size; "" is for all others.
constexpr Row kRows[] = {
    //       two_shot   two_shot_resident  piece  streaming
    {"", 2, {128 * KiB, kNever, 128 * KiB, 32 * MiB}},
    {"", 3, {8 * KiB, 16 * KiB, 128 * KiB, 32 * MiB}},
    {"", 4, {12 * KiB, 24 * KiB, 128 * KiB, 32 * MiB}},
    {"", 8, {24 * KiB, 48 * KiB, 128 * KiB, 32 * MiB}},
};

}  // namespace

Tuning tuning_for(const std::string& isa, std::uint32_t world) {
  const Row* best = &kRows[0];
  for (const Row& row : kRows) {
    const bool fits = row.world <= world && (row.isa[0] == '\0' || isa == row.isa);
    const bool closer = row.isa[0] != '\0' || best->isa[0] == '\0';
    if (fits && closer) best = &row;
  }
  return best->tuning;
}

}  // namespace tpk
