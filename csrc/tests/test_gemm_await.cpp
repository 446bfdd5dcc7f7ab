// Products of rows that somebody else brings, chunk by chunk, while they go on.
#include "gemm.h"
#include "gemm_sm90/await.h"
#include "named.h"

using namespace tpk;
using namespace tpk::test;

namespace {

struct Case {
  std::vector<std::int64_t> counts;  // rows of the ranks
  std::int64_t inner;                // width of the rows that arrive
  std::vector<std::int64_t> widths;  // of the products
  int rank;
  int channels;
  std::int64_t part;  // numbers of a rank in a chunk
  int blocks;
  Activation activation = Activation::none;
  bool bias = false, add = false;
  std::int64_t never = -1;  // the chunk that does not come
};

template <class Number>
class Rows {
 public:
  Rows(const Case& c, Major major, Random& random)
      : of_(c),
        division_(divided(c.counts)),
        all_(division_.start(world()), c.inner, major, random),
        gathered_(all_) {
    // What has not arrived is NaN.
    for (std::int64_t row = 0; row < all_.rows(); ++row) {
      const bool own = division_.owner(row, world()) == c.rank;
      for (std::int64_t i = 0; i < c.inner && !own; ++i) gathered_.bits(row, i) = 0xffff;
    }
  }
  int world() const { return static_cast<int>(of_.counts.size()); }
  Arrival arrival() const {
    return {division_, of_.inner, of_.part, of_.channels, world()};
  }
  // As the copy engine does: a chunk of every peer, then the flag.
  void bring(const Workspace& w) {
    const std::int64_t chunks = ceil_div(division_.most() * of_.inner, of_.part);
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
      if (chunk == of_.never) return;
      for (int rank = 0; rank < world(); ++rank) {
        const std::int64_t start = division_.start(rank) * of_.inner;
        const std::int64_t stop = smaller((chunk + 1) * of_.part, division_.rows(rank) * of_.inner);
        for (std::int64_t i = chunk * of_.part; i < stop && rank != of_.rank; ++i) {
          const std::int64_t row = (start + i) / of_.inner, column = (start + i) % of_.inner;
          gathered_.bits(row, column) = all_.bits(row, column);
        }
      }
      auto* region = reinterpret_cast<std::byte*>(w.table[w.rank]);
      auto* flag = reinterpret_cast<std::int32_t*>(region + chunk % of_.channels * w.stride + kDone);
      simt::atomic(flag).store(static_cast<std::int32_t>(chunk / of_.channels + 1),
                               std::memory_order_release);
      if (chunk % 2) pause(2);
    }
  }
  const Matrix<Number>& all() const { return all_; }
  const Matrix<Number>& gathered() const { return gathered_; }

 private:
  const Case& of_;
  Division division_;
  Matrix<Number> all_, gathered_;
};

double activated(double x, Activation activation) {
  switch (activation) {
    case Activation::gelu:
      return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::gelu_tanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::silu:
      return x / (1 + std::exp(-x));
    case Activation::relu:
      return std::max(x, 0.0);
    default:
      return x;
  }
}

template <class Number>
void check_value(Near near, std::uint16_t got, Activation activation) {
  const double unit = epsilon(kDtype<Number>);
  const double y = activated(near.value, activation);
  // Slopes are at most 1.2.
  const double before = unit * std::abs(near.value) + 0x1p-20 * near.magnitude;
  const double error = std::abs(decode<Number>(got) - y);
  const bool rounded_twice = activation != Activation::none;
  const double bound = (rounded_twice ? 1.2 * before + unit * std::abs(y) : before) * 1.02 + 0x1p-25;
  if (!(error <= bound)) {
    std::cerr << decode<Number>(got) << ", not " << y << " within " << bound << std::endl;
    std::abort();
  }
}

// What a launch is given and gives: one product for each width.
template <class Number>
struct Products {
  std::vector<Matrix<Number>> others;
  std::vector<Poisoned> outs;
  std::vector<Matrix<Number>> biases, before;
};

void check_flags(Exchange& exchange, const Case& c) {
  const Workspace& w = exchange.workspace(c.rank);
  for (int channel = 0; channel < c.channels; ++channel) {
    const auto* region = reinterpret_cast<const std::byte*>(w.table[c.rank]) + channel * w.stride;
    CHECK_EQUAL(*reinterpret_cast<const std::int32_t*>(region + kDone), 0);
    CHECK_EQUAL(*reinterpret_cast<const std::int32_t*>(region + kFinished), 0);
  }
}

ExchangeOptions options(const Case& c) {
  ExchangeOptions options;
  options.channels = c.channels;
  options.chunk = 16;
  if (c.never >= 0) options.timeout = kBrief;
  return options;
}

template <class Config>
void check_rows(const Case& c, std::uint64_t seed) {
  using Number = typename Config::Number;
  Random random(seed);
  Exchange exchange(static_cast<int>(c.counts.size()), options(c));
  // Twice: flags have to be as they were.
  for (int call = 0; call < (c.never < 0 ? 2 : 1); ++call) {
    Rows<Number> rows(c, Config::kMajorA, random);
    Products<Number> products;
    AwaitArguments arguments{};
    for (const std::int64_t width : c.widths) {
      products.others.emplace_back(width, c.inner, Config::kMajorB, random);
      products.outs.emplace_back(rows.all().rows() * width, static_cast<int>(width % 3));
      products.biases.emplace_back(1, width, Major::K, random);
    }
    Operands operands{};
    for (std::size_t p = 0; p < c.widths.size(); ++p) {
      operands.a[p] = rows.gathered().map(Config::kM);
      operands.b[p] = products.others[p].map(Config::kN);
      operands.k[p] = static_cast<std::int32_t>(c.inner);
      const auto tiles = static_cast<std::int32_t>(ceil_div(c.widths[p], Config::kN));
      arguments.products[p] = {products.outs[p].data(),
                               c.bias ? &products.biases[p].bits(0, 0) : nullptr,
                               rows.all().rows(), c.widths[p], tiles};
      arguments.tiles += tiles;
    }
    arguments.workspace = exchange.workspace(c.rank);
    arguments.arrival = rows.arrival();
    arguments.activation = c.activation;
    std::thread copies([&] { rows.bring(arguments.workspace); });
    run_blocks<Config, AwaitRows<Config>>(c.blocks, seed + call, operands, arguments);
    copies.join();
    CHECK_EQUAL(exchange.intact(), c.never < 0);
    std::int64_t void_rows = 0;
    for (std::size_t p = 0; p < c.widths.size(); ++p) {
      products.outs[p].check_guards();
      for (std::int64_t row = 0; row < rows.all().rows(); ++row) {
        for (std::int64_t column = 0; column < c.widths[p]; ++column) {
          const std::uint16_t got = products.outs[p][row * c.widths[p] + column];
          if (c.never >= 0 && got == 0xffff) {
            ++void_rows;
            continue;
          }
          Near near;
          near.add(rows.all(), row, products.others[p], column);
          if (c.bias) near.value += products.biases[p].at(0, column);
          check_value<Number>(near, got, c.activation);
        }
      }
    }
    if (c.never < 0) {
      check_flags(exchange, c);
    } else {
      CHECK(void_rows > 0);
      const auto& record = exchange.record(c.rank);
      CHECK_EQUAL(record[kState], static_cast<std::int32_t>(kFailed));
      CHECK_EQUAL(record[kRank], c.rank);
      CHECK_EQUAL(record[kSignal], static_cast<std::int32_t>(kDone));
      CHECK_EQUAL(record[kPeer], static_cast<std::int32_t>(c.never % c.channels));
      CHECK_EQUAL(record[kSeen], static_cast<std::int32_t>(c.never / c.channels));
      // A workspace that has failed once: nothing more is written.
      Poisoned nothing(rows.all().rows() * c.widths[0]);
      arguments.products[0].out = nothing.data();
      run_blocks<Config, AwaitRows<Config>>(c.blocks, seed + 7, operands, arguments);
      for (std::int64_t i = 0; i < rows.all().rows() * c.widths[0]; ++i) {
        CHECK_EQUAL(nothing[i], 0xffff);
      }
    }
  }
}

// c_p [M_p, inner] = a_p^T rows, each a_p [rows, M_p]
template <class Config>
void check_sum(const Case& c, std::uint64_t seed) {
  using Number = typename Config::Number;
  Random random(seed);
  Exchange exchange(static_cast<int>(c.counts.size()), options(c));
  for (int call = 0; call < (c.never < 0 ? 2 : 1); ++call) {
    Rows<Number> rows(c, Major::K, random);  // as it lies in memory
    const std::int64_t count = rows.all().rows();
    Products<Number> products;
    AwaitArguments arguments{};
    for (const std::int64_t width : c.widths) {
      products.others.emplace_back(width, count, Major::MN, random);
      products.outs.emplace_back(width * c.inner, 0);
      products.before.emplace_back(width, c.inner, Major::K, random);
      for (std::int64_t row = 0; row < width && c.add; ++row) {
        for (std::int64_t i = 0; i < c.inner; ++i) {
          products.outs.back().data()[row * c.inner + i] = products.before.back().bits(row, i);
        }
      }
    }
    Operands operands{};
    for (std::size_t p = 0; p < c.widths.size(); ++p) {
      operands.a[p] = products.others[p].map(Config::kM);
      operands.b[p] = rows.gathered().transposed_map();
      operands.k[p] = static_cast<std::int32_t>(count);
      const auto tiles = static_cast<std::int32_t>(ceil_div(c.inner, Config::kN));
      arguments.products[p] = {products.outs[p].data(), nullptr, c.widths[p], c.inner, tiles};
      arguments.tiles += tiles;
      arguments.row_blocks = std::max(
          arguments.row_blocks, static_cast<std::int32_t>(ceil_div(c.widths[p], Config::kM)));
    }
    arguments.workspace = exchange.workspace(c.rank);
    arguments.arrival = rows.arrival();
    arguments.add = c.add;
    std::thread copies([&] { rows.bring(arguments.workspace); });
    run_blocks<Config, AwaitSum<Config>>(c.blocks, seed + call, operands, arguments);
    copies.join();
    CHECK_EQUAL(exchange.intact(), c.never < 0);
    for (std::size_t p = 0; p < c.widths.size(); ++p) {
      products.outs[p].check_guards();
      for (std::int64_t row = 0; row < c.widths[p]; ++row) {
        for (std::int64_t column = 0; column < c.inner; ++column) {
          const std::uint16_t got = products.outs[p][row * c.inner + column];
          if (c.never >= 0) {  // every tile needs all rows
            CHECK_EQUAL(got, 0xffff);
            continue;
          }
          Near near;
          for (std::int64_t i = 0; i < count; ++i) {
            const double summand = products.others[p].at(row, i) * rows.all().at(i, column);
            near.value += summand;
            near.magnitude += std::abs(summand);
          }
          if (c.add) near.value += products.before[p].at(row, column);
          check_value<Number>(near, got, Activation::none);
        }
      }
    }
    if (c.never < 0) check_flags(exchange, c);
  }
}

using Half = device::Float16;
using Brain = device::Bfloat16;

using Cooperative = Config<Brain, Major::K, Major::K, 128, 32, 1, 2>;
using PingPong = Config<Brain, Major::K, Major::K, 64, 32, 2, 3>;
using Gradient = Config<Brain, Major::MN, Major::MN, 128, 64, 1, 2>;

// Tiles of rows of two ranks; several products.
void test_straddling_tiles() {
  check_rows<Cooperative>(
      {{100, 99, 99}, 72, {40, 33}, 1, 1, 72 * 30 + 8, 2, Activation::gelu, true}, 1);
}
// Ping-pong; a rank without rows; several channels.
void test_channels() {
  check_rows<Config<Half, Major::K, Major::K, 64, 32, 2, 3>>(
      {{70, 70, 0}, 136, {64}, 0, 3, 400, 3, Activation::silu, true}, 2);
}
void test_other_layout() {
  check_rows<Config<Brain, Major::K, Major::MN, 64, 64, 2, 3>>(
      {{90, 90}, 64, {24, 72}, 1, 2, 64 * 16, 1, Activation::relu, false}, 3);
  check_rows<Config<Half, Major::K, Major::MN, 128, 64, 1, 2>>(
      {{40, 40, 40, 39}, 40, {65}, 3, 1, 320, 1, Activation::gelu_tanh, true}, 4);
}
void test_gradients() {
  check_sum<Gradient>({{100, 99, 99}, 72, {40, 130}, 1, 1, 72 * 30 + 8, 2}, 5);
  check_sum<Config<Half, Major::MN, Major::MN, 64, 64, 2, 3>>(
      {{90, 90}, 72, {72}, 0, 2, 72 * 16, 1, Activation::none, false, true}, 6);
}
void test_missing_chunk() {
  check_rows<PingPong>({{200, 200}, 64, {64}, 0, 1, 64 * 50, 2, Activation::none, false, false, 2}, 7);
  check_rows<Cooperative>(
      {{200, 200}, 64, {64}, 0, 2, 64 * 50, 1, Activation::none, false, false, 3}, 8);
}
void test_missing_chunk_of_a_sum() {
  check_sum<Gradient>({{200, 200}, 64, {64}, 0, 1, 64 * 50, 2, Activation::none, false, false, 2}, 9);
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"straddling_tiles", test_straddling_tiles},
                    {"channels", test_channels},
                    {"other_layout", test_other_layout},
                    {"gradients", test_gradients},
                    {"missing_chunk", test_missing_chunk},
                    {"missing_chunk_of_a_sum", test_missing_chunk_of_a_sum}});
}
