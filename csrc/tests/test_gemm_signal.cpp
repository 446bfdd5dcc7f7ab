// Products whose rows are counted group by group.
#include "gemm.h"
#include "gemm_sm90/signal.h"
#include "named.h"

using namespace tpk;
using namespace tpk::test;

namespace {

struct Case {
  std::vector<std::int64_t> counts;  // rows of the parts
  std::int64_t size;                 // of a group
  std::int64_t width;
  std::vector<std::int64_t> ks;
  int blocks;
  int offset = 0;  // of the result, from 16 bytes
};

// Counts of a group have to be complete when its rows are: another thread reads them meanwhile.
template <class Config>
void check(const Case& c, std::uint64_t seed) {
  using Number = typename Config::Number;
  Random random(static_cast<unsigned>(seed));
  std::int64_t rows = 0;
  for (const std::int64_t count : c.counts) rows += count;
  std::vector<Matrix<Number>> as, bs;
  Operands operands{};
  for (std::size_t pair = 0; pair < c.ks.size(); ++pair) {
    as.emplace_back(rows, c.ks[pair], Config::kMajorA, random);
    bs.emplace_back(c.width, c.ks[pair], Config::kMajorB, random);
    operands.k[pair] = static_cast<std::int32_t>(c.ks[pair]);
  }
  for (std::size_t pair = 0; pair < c.ks.size(); ++pair) {
    operands.a[pair] = as[pair].map(Config::kM);
    operands.b[pair] = bs[pair].map(Config::kN);
  }
  const RowGroups groups{divided(c.counts), c.size, static_cast<std::int32_t>(c.counts.size())};
  const std::int64_t columns = ceil_div(c.width, Config::kN);
  std::int64_t tiles = 0;
  for (std::int64_t g = 0; g < groups.count(); ++g) {
    tiles += groups.tiles(g, Config::kM, columns);
  }
  std::vector<std::int32_t> counters(groups.count(), 0);
  Poisoned out(rows * c.width, c.offset);

  std::thread reader([&] {
    for (std::int64_t group = 0; group < groups.count(); ++group) {
      const auto expected = static_cast<std::int32_t>(groups.tiles(group, Config::kM, columns));
      while (simt::atomic(&counters[group]).load(std::memory_order_acquire) < expected) {
        std::this_thread::yield();
      }
      for (int part = 0; part < groups.parts; ++part) {
        const std::int64_t first = groups.division.start(part) + group * groups.size;
        for (std::int64_t row = 0; row < groups.rows(group, part); ++row) {
          for (std::int64_t column = 0; column < c.width; ++column) {
            Near near;
            for (std::size_t pair = 0; pair < c.ks.size(); ++pair) {
              near.add(as[pair], first + row, bs[pair], column);
            }
            const auto got = out[(groups.target(group, part) + row) * c.width + column];
            if (!near.template holds<Number>(got)) {
              std::cerr << "row " << first + row << " column " << column << ": "
                        << decode<Number>(got) << ", not " << near.value << std::endl;
              std::abort();
            }
          }
        }
      }
    }
  });
  run_blocks<Config, Signal<Config>>(
      c.blocks, seed, operands,
      {groups, out.data(), counters.data(), c.width, columns, tiles,
       static_cast<std::int32_t>(c.ks.size())});
  reader.join();
  out.check_guards();
  for (std::int64_t g = 0; g < groups.count(); ++g) {
    CHECK_EQUAL(counters[g], groups.tiles(g, Config::kM, columns));
  }
}

using Half = device::Float16;
using Brain = device::Bfloat16;

template <class Number, Major b>
void both_schedules(const Case& c, std::uint64_t seed) {
  constexpr int kN = b == Major::K ? 32 : 64;
  check<Config<Number, Major::K, b, 128, kN, 1, 2>>(c, seed);
  check<Config<Number, Major::K, b, 64, kN, 2, 3>>(c, seed + 1);
}

void test_edges() { both_schedules<Brain, Major::K>({{70, 70, 69}, 40, 40, {136}, 2}, 1); }
void test_several_pairs() { both_schedules<Half, Major::MN>({{300}, 129, 65, {72, 40}, 2}, 3); }
// A part without rows; a result that is not aligned.
void test_empty_part() {
  both_schedules<Brain, Major::MN>({{5, 5, 0}, 64, 130, {64, 16}, 3, 1}, 5);
}
void test_one_row() { both_schedules<Half, Major::K>({{1}, 8, 7, {8}, 1}, 7); }
// Two warpgroups with tiles of 128 rows each, as on the device.
void test_tall_tiles() {
  check<Config<Brain, Major::K, Major::K, 128, 32, 2, 3>>({{200}, 100, 40, {136}, 1}, 9);
}
// The ring of stages goes round many times.
void test_ring() { both_schedules<Brain, Major::K>({{128}, 64, 32, {392}, 1}, 11); }

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"edges", test_edges},
                    {"several_pairs", test_several_pairs},
                    {"empty_part", test_empty_part},
                    {"one_row", test_one_row},
                    {"tall_tiles", test_tall_tiles},
                    {"ring", test_ring}});
}
