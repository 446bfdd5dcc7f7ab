// Products whose rows are summed over the ranks: all ranks at the same time, all bits.
#include "gemm.h"
#include "gemm_sm90/send.h"
#include "named.h"

using namespace tpk;
using namespace tpk::test;

namespace {

struct Case {
  std::vector<std::int64_t> counts;  // rows of the ranks
  std::int64_t width;
  std::vector<std::int64_t> ks;  // of the pairs of operands, a little more on later ranks
  int blocks;
  bool bias = false;
  int depth = 2;
  std::int32_t epoch = 0;  // rounds that were made before
  int calls = 1;
  int slow = -1;    // this rank comes late to every call
  int absent = -1;  // this one never
};

// The sum of a product as the matrix units of the shim add it: in order, in float32.
template <class Number>
struct Pairs {
  std::vector<Matrix<Number>> as, bs;

  float product(std::int64_t row, std::int64_t column) const {
    float total = 0;
    for (std::size_t pair = 0; pair < as.size(); ++pair) {
      for (std::int64_t i = 0; i < as[pair].k(); ++i) {
        total += static_cast<float>(as[pair].at(row, i)) * static_cast<float>(bs[pair].at(column, i));
      }
    }
    return total;
  }
};

template <class Number>
std::uint16_t rounded(double value) {
  std::uint16_t bits;
  encode(kDtype<Number>, value, reinterpret_cast<std::byte*>(&bits));
  return bits;
}

template <class Config>
void check(const Case& c, std::uint64_t seed) {
  using Number = typename Config::Number;
  const int world = static_cast<int>(c.counts.size());
  const Division division = divided(c.counts);
  const std::int64_t rows = division.start(world);
  ExchangeOptions options;
  options.channels = c.blocks + 1;  // more than are used
  options.chunk = Config::kM * Config::kN * 2;
  options.depth = c.depth;
  options.epoch = c.epoch;
  if (c.absent >= 0) options.timeout = kBrief;
  Exchange exchange(world, options);

  std::vector<std::vector<Pairs<Number>>> given(c.calls);
  std::vector<std::vector<Poisoned>> outs(c.calls);
  std::vector<Matrix<Number>> biases;
  Random random(seed);
  for (int call = 0; call < c.calls; ++call) {
    biases.emplace_back(1, c.width, Major::K, random);
    for (int rank = 0; rank < world; ++rank) {
      Pairs<Number> pairs;
      for (const std::int64_t k : c.ks) {
        pairs.as.emplace_back(rows, k + 8 * rank, Config::kMajorA, random);
        pairs.bs.emplace_back(c.width, k + 8 * rank, Config::kMajorB, random);
      }
      given[call].push_back(std::move(pairs));
      outs[call].emplace_back(c.counts[rank] * c.width, rank % 2);
    }
  }
  exchange.run(
      [&](int rank) {
        for (int call = 0; call < c.calls; ++call) {
          if (rank == c.slow) pause(20);
          const Pairs<Number>& pairs = given[call][rank];
          Operands operands{};
          for (std::size_t pair = 0; pair < c.ks.size(); ++pair) {
            operands.a[pair] = pairs.as[pair].map(Config::kM);
            operands.b[pair] = pairs.bs[pair].map(Config::kN);
            operands.k[pair] = static_cast<std::int32_t>(pairs.as[pair].k());
          }
          const SendArguments arguments{
              exchange.workspace(rank),
              division,
              outs[call][rank].data(),
              c.bias ? &biases[call].bits(0, 0) : nullptr,
              c.width,
              static_cast<std::int32_t>(ceil_div(division.most(), Config::kM)),
              static_cast<std::int32_t>(ceil_div(c.width, Config::kN)),
              static_cast<std::int32_t>(c.ks.size())};
          run_blocks<Config, Send<Config>>(c.blocks, seed * 31 + rank + call * 7, operands, arguments);
        }
      },
      c.absent >= 0 ? std::vector<int>{c.absent} : std::vector<int>{});

  if (c.absent >= 0) {
    for (int rank = 0; rank < world; ++rank) {
      if (rank == c.absent) continue;
      const auto& record = exchange.record(rank);
      CHECK_EQUAL(record[kState], static_cast<std::int32_t>(kFailed));
      CHECK_EQUAL(record[kRank], rank);
      // Others give up too, and then say nothing any more; whoever is first has waited for the absent one.
      CHECK(record[kSignal] == kReady || record[kSignal] == kCredit);
      CHECK(record[kExpected] - record[kSeen] > 0);
      for (std::int64_t i = 0; i < c.counts[rank] * c.width; ++i) CHECK_EQUAL(outs[0][rank][i], 0xffff);
    }
    return;
  }
  CHECK(exchange.intact());
  for (int call = 0; call < c.calls; ++call) {
    for (int rank = 0; rank < world; ++rank) {
      outs[call][rank].check_guards();
      for (std::int64_t row = 0; row < c.counts[rank]; ++row) {
        for (std::int64_t column = 0; column < c.width; ++column) {
          float total = -0.0f;
          for (int source = 0; source < world; ++source) {
            const float product = given[call][source].product(division.start(rank) + row, column);
            total += static_cast<float>(decode<Number>(rounded<Number>(product)));
          }
          if (c.bias) total += static_cast<float>(biases[call].at(0, column));
          const std::uint16_t got = outs[call][rank][row * c.width + column];
          if (got != rounded<Number>(total)) {
            std::cerr << "call " << call << " rank " << rank << " row " << row << " column " << column
                      << ": " << decode<Number>(got) << ", not " << total << std::endl;
            std::abort();
          }
        }
      }
    }
  }
}

using Half = device::Float16;
using Brain = device::Bfloat16;
using Usual = Config<Brain, Major::K, Major::K, 128, 32, 1, 2>;

// Several tiles down and across; more tiles than blocks.
void test_edges() { check<Usual>({{150, 149}, 72, {72}, 2, true}, 1); }
// Several pairs; a rank without rows.
void test_empty_rank() {
  check<Config<Half, Major::K, Major::MN, 128, 64, 1, 2>>({{30, 30, 0}, 65, {40, 16}, 1}, 2);
}
// Calls after each other, counters that wrap.
void test_slow_rank() {
  check<Usual>({{5, 5, 5}, 96, {16}, 1, true, 2, 0x7ffffffe, 2, 1}, 3);
  check<Config<Half, Major::K, Major::K, 128, 32, 1, 3>>(
      {{140, 140}, 40, {72}, 1, false, 4, -3, 2, 0}, 4);
}
// More than are summed at a time.
void test_five_ranks() { check<Usual>({{3, 3, 3, 3, 2}, 24, {8}, 1, true}, 5); }
void test_absent_rank() { check<Usual>({{20, 20, 20}, 70, {40}, 1, true, 2, 0, 1, -1, 1}, 6); }

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"edges", test_edges},
                    {"empty_rank", test_empty_rank},
                    {"slow_rank", test_slow_rank},
                    {"five_ranks", test_five_ranks},
                    {"absent_rank", test_absent_rank}});
}
