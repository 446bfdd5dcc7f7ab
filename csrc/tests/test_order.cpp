// Orders and maps of rows (order.h) against what they mean, written out; sizes past 2^31.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "named.h"
#include "tpk/order.h"

using namespace tpk;

namespace {

using Random = std::mt19937_64;

std::int64_t draw(Random& random, std::int64_t first, std::int64_t last) {
  return first + static_cast<std::int64_t>(random() % (last - first + 1));
}

// Rows of any rank may be none; `unit` more of the first ranks.
Division random_division(Random& random, int world) {
  return {draw(random, 0, 9), draw(random, 1, 5),
          static_cast<std::int32_t>(draw(random, 0, world - 1))};
}

// The rank that has each row.
std::vector<int> owners(const Division& division, int world) {
  std::vector<int> ranks;
  for (int rank = 0; rank < world; ++rank) {
    const std::int64_t rows = division.small + (rank < division.more ? division.unit : 0);
    ranks.insert(ranks.end(), rows, rank);
  }
  return ranks;
}

void check_division(Random& random, int world) {
  const Division division = random_division(random, world);
  const std::vector<int> ranks = owners(division, world);
  for (int rank = 0; rank < world; ++rank) {
    CHECK_EQUAL(division.rows(rank), std::count(ranks.begin(), ranks.end(), rank));
    const auto first = std::lower_bound(ranks.begin(), ranks.end(), rank);
    CHECK_EQUAL(division.start(rank), first - ranks.begin());
    CHECK(division.rows(rank) <= division.most());
  }
  for (std::size_t row = 0; row < ranks.size(); ++row) {
    CHECK_EQUAL(division.owner(row, world), ranks[row]);
  }
  CHECK_EQUAL(division.start(world), static_cast<std::int64_t>(ranks.size()));
}

void check_arrival(Random& random, int world) {
  const Division division = random_division(random, world);
  const Arrival arrival{division, draw(random, 1, 6), draw(random, 1, 12),
                        static_cast<std::int32_t>(draw(random, 1, 5)), world};
  const std::vector<int> ranks = owners(division, world);
  const std::int64_t all = ranks.size();
  const std::int64_t first = draw(random, 0, all), stop = draw(random, first, all);
  std::vector<std::int32_t> needed(arrival.channels, 0);
  for (std::int64_t row = first; row < stop; ++row) {
    const std::int64_t start =
        std::lower_bound(ranks.begin(), ranks.end(), ranks[row]) - ranks.begin();
    for (std::int64_t i = 0; i < arrival.width; ++i) {
      const std::int64_t chunk = ((row - start) * arrival.width + i) / arrival.part;
      std::int32_t& rounds = needed[chunk % arrival.channels];
      rounds = std::max(rounds, static_cast<std::int32_t>(chunk / arrival.channels + 1));
    }
  }
  for (int channel = 0; channel < arrival.channels; ++channel) {
    CHECK_EQUAL(arrival.rounds(first, stop, channel), needed[channel]);
  }
}

void check_arrival_order(Random& random, int world) {
  const Division division = random_division(random, world);
  const std::int64_t block = draw(random, 1, 7);
  const int rank = static_cast<int>(draw(random, 0, world - 1));
  const ArrivalOrder order{division, block, rank, world};
  const std::vector<int> ranks = owners(division, world);
  // Blocks by the rank that has their first row.
  std::vector<std::vector<std::int64_t>> blocks(world);
  for (std::size_t row = 0; row < ranks.size(); row += block) {
    blocks[ranks[row]].push_back(row / block);
  }
  std::vector<std::int64_t> expected = blocks[rank];
  for (std::size_t index = 0; index < ranks.size(); ++index) {
    for (int step = 1; step < world; ++step) {
      const auto& theirs = blocks[(rank + step) % world];
      if (index < theirs.size()) expected.push_back(theirs[index]);
    }
  }
  std::vector<std::int64_t> found;
  for (std::int64_t turn = 0; turn < order.turns(); ++turn) {
    if (order.at(turn) >= 0) found.push_back(order.at(turn));
  }
  CHECK(found == expected);
}

void check_row_groups(Random& random, int parts) {
  const Division division = random_division(random, parts);
  const RowGroups groups{division, draw(random, 1, 7), parts};
  const std::int64_t block_m = draw(random, 1, 5), block_n = 8, columns = draw(random, 1, 3);
  // Rows of the operand in the order of the buffer, and the group of each.
  std::vector<std::int64_t> rows, group_of;
  std::int64_t count = 0;
  for (std::int64_t group = 0; group * groups.size < division.most(); ++group, ++count) {
    for (int part = 0; part < parts; ++part) {
      CHECK_EQUAL(groups.target(group, part), static_cast<std::int64_t>(rows.size()));
      const std::int64_t stop = std::min((group + 1) * groups.size, division.rows(part));
      for (std::int64_t row = group * groups.size; row < stop; ++row) {
        rows.push_back(division.start(part) + row);
        group_of.push_back(group);
      }
    }
  }
  CHECK_EQUAL(groups.count(), count);
  std::int64_t tiles = 0, last_group = 0;
  for (std::int64_t group = 0; group < count; ++group)
    tiles += groups.tiles(group, block_m, columns);
  std::map<std::int64_t, std::int64_t> in_group;
  std::set<std::pair<std::int64_t, std::int64_t>> seen;  // rows of the buffer, columns
  for (std::int64_t index = 0; index < tiles; ++index) {
    const GroupedTile tile = groups.tile(index, block_m, block_n, columns);
    CHECK(tile.group >= last_group && tile.rows >= 1 && tile.rows <= block_m);
    CHECK(tile.column % block_n == 0 && tile.column / block_n < columns);
    last_group = tile.group;
    ++in_group[tile.group];
    for (std::int64_t row = 0; row < tile.rows; ++row) {
      CHECK_EQUAL(rows.at(tile.target + row), tile.source + row);
      CHECK_EQUAL(group_of[tile.target + row], tile.group);
      CHECK(seen.insert({tile.target + row, tile.column}).second);
    }
  }
  CHECK_EQUAL(seen.size(), rows.size() * columns);
  for (const auto& [group, found] : in_group) {
    CHECK_EQUAL(groups.tiles(group, block_m, columns), found);
  }
}

void test_large_sizes() {
  const std::int64_t rows = (std::int64_t{1} << 33) + 5;
  const Division division{rows, 1, 3};
  CHECK_EQUAL(division.start(5), 5 * rows + 3);
  CHECK_EQUAL(division.owner(4 * rows + 3, 8), 4);
  const Arrival arrival{{std::int64_t{1} << 20, 1, 0}, 1 << 16, 1 << 12, 4, 2};
  // Element 2^36 - 1 is in chunk 2^24 - 1.
  CHECK_EQUAL(arrival.rounds((1 << 20) - 1, 1 << 20, 3), 1 << 22);
  const RowGroups groups{{std::int64_t{1} << 32, 1, 0}, std::int64_t{1} << 30, 2};
  const GroupedTile last = groups.tile((std::int64_t{1} << 26) - 1, 256, 256, 2);
  CHECK_EQUAL(last.group, 3);
  CHECK_EQUAL(last.source, (std::int64_t{1} << 33) - 256);
  CHECK_EQUAL(last.target, (std::int64_t{1} << 33) - 256);
  CHECK_EQUAL(last.column, 256);
  Workspace w{};
  w.stride = std::int64_t{1} << 32;
  w.chunk = std::int64_t{1} << 30;
  w.world = 8;
  w.depth = 2;
  CHECK_EQUAL(buffer_offset(w, 3, 1, 7), 3 * w.stride + kSignalBytes + 15 * w.chunk);
  CHECK_EQUAL(buffer_offset(w, 0, -1, 0), kSignalBytes + 8 * w.chunk);  // epochs wrap
}

void many(void (*check)(Random& random, int world)) {
  Random random(1);
  for (int round = 0; round < 3000; ++round) check(random, static_cast<int>(draw(random, 1, 8)));
}

}  // namespace

int main(int argc, char** argv) {
  return test::run_tests(argc, argv,
                         {{"division", [] { many(check_division); }},
                          {"arrival", [] { many(check_arrival); }},
                          {"arrival_order", [] { many(check_arrival_order); }},
                          {"row_groups", [] { many(check_row_groups); }},
                          {"large_sizes", test_large_sizes}});
}
