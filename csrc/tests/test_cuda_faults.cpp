// Ranks that are late or absent: every wait ends, the record says for whom it was, and nobody takes
// for a result what was never complete. Waits of a stream for a flag.
#include <limits>

#include "exchange_calls.h"
#include "named.h"
#include "wait.h"

using namespace tpk;
using namespace tpk::test;

namespace {

constexpr std::int64_t kMillisecond = 1'000'000;
// Room for every rank on busy cores, and tests that do not take long.
constexpr std::int64_t kShort = 200 * kMillisecond;

Call call_of(Kernel kernel) { return {kernel, Dtype::float32, 33, 7}; }

Bytes words_of(Exchange& exchange, int rank, std::int64_t offset, std::size_t bytes) {
  const Workspace& w = exchange.workspace(rank);
  const auto* base = reinterpret_cast<const std::byte*>(w.table[rank]);
  return Bytes(base + offset, base + offset + bytes);
}

bool is_poison(const Bytes& bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte one) { return one == kPoison; });
}

// The last of three ranks never calls; both blocks of the others give up at the same time.
void test_absent_rank() {
  for (const Kernel kernel : kKernels) {
    ExchangeOptions options;
    options.timeout = kShort;
    options.epoch = 5;
    Exchange exchange(3, options);
    const Call call = call_of(kernel);
    Operands operands(call, 3);
    exchange.run([&](int rank) { launch(call, operands, exchange, rank); }, {2});
    for (const int rank : {0, 1}) {
      const auto& record = exchange.record(rank);
      CHECK_EQUAL(record[kState], kFailed);
      CHECK_EQUAL(record[kRank], rank);
      CHECK_EQUAL(record[kOperation], Exchange::kOperationCode);
      CHECK(record[kChannel] == 0 || record[kChannel] == 1);
      CHECK_EQUAL(record[kSignal], kReady);
      CHECK_EQUAL(record[kPeer], 2);
      CHECK_EQUAL(record[kExpected], 6);
      CHECK_EQUAL(record[kSeen], 5);
      if (kernel != Kernel::gather) CHECK(is_poison(operands.outs[rank].bytes()));
      // Rounds that have not been completed do not count.
      const Bytes epoch = words_of(exchange, rank, kEpoch, 4);
      CHECK(std::to_integer<int>(epoch[0]) == 5);
    }
    CHECK_EQUAL(exchange.record(2)[kState], kIntact);

    // Later kernels see the record: no wait, no store, no signal.
    const Bytes signals = words_of(exchange, 1, 0, kSignalBytes);
    const std::vector<std::int32_t> record(exchange.record(0).begin(), exchange.record(0).end());
    exchange.workspace(0).timeout = kPatience;
    Operands more(call, 3);
    exchange.run([&](int rank) { launch(call, more, exchange, rank); }, {1, 2});
    CHECK(is_poison(more.outs[0].bytes()));
    CHECK(words_of(exchange, 1, 0, kSignalBytes) == signals);
    CHECK(std::equal(record.begin(), record.end(), exchange.record(0).begin()));
  }
}

// The last rank calls when the others have given up. Each has the right result, or a record.
void test_late_rank() {
  for (const Kernel kernel : kKernels) {
    ExchangeOptions options;
    options.timeout = kShort;
    options.channels = 1;
    Exchange exchange(3, options);
    const Call call = call_of(kernel);
    Operands operands(call, 3);
    exchange.run([&](int rank) { launch(call, operands, exchange, rank); }, {2});
    exchange.run([&](int rank) { launch(call, operands, exchange, rank); }, {0, 1});
    // Several rounds, of which the others have made none to its end.
    const auto& record = exchange.record(2);
    CHECK_EQUAL(record[kState], kFailed);
    CHECK(record[kPeer] == 0 || record[kPeer] == 1);
    CHECK(record[kExpected] - record[kSeen] >= 1);
  }
}

// One rank has failed before; another, which has not, gives up in its turn.
void test_failed_rank_is_silent() {
  for (const Kernel kernel : kKernels) {
    ExchangeOptions options;
    options.timeout = kShort;
    Exchange exchange(2, options);
    exchange.record(0)[kState] = kFailed;
    const Call call = call_of(kernel);
    Operands operands(call, 2);
    exchange.run([&](int rank) { launch(call, operands, exchange, rank); });
    CHECK_EQUAL(exchange.record(0)[kState], kFailed);
    CHECK_EQUAL(exchange.record(0)[kPeer], 0);  // as it was
    CHECK_EQUAL(exchange.record(1)[kState], kFailed);
    CHECK_EQUAL(exchange.record(1)[kPeer], 0);
    if (kernel != Kernel::gather) CHECK(is_poison(operands.outs[1].bytes()));
  }
}

struct Flag {
  std::int32_t value = 0;
  std::array<std::int32_t, kRecordWords> record{};

  // Nanoseconds that it took.
  std::int64_t wait(std::int32_t expected, std::int64_t timeout) {
    const Wait names{3, 11, 4, 0, -1};
    const std::int64_t begin = simt::nanoseconds();
    simt::run({1, 1}, [&] { device::wait_for(&value, expected, names, timeout, record.data()); });
    return simt::nanoseconds() - begin;
  }
};

void test_wait_for() {
  constexpr std::int32_t kLast = std::numeric_limits<std::int32_t>::max();
  constexpr std::int32_t kFirst = std::numeric_limits<std::int32_t>::min();
  for (const auto& [value, expected] :
       {std::pair{5, 5}, {9, 5}, {kFirst, kLast}, {kFirst + 4, kLast - 4}, {0, -1}}) {
    Flag flag;
    flag.value = value;
    flag.wait(expected, kPatience);
    CHECK_EQUAL(flag.record[kState], kIntact);
  }
  // Data that was stored before the flag can be read after the wait.
  Flag flag;
  int data = 0;
  std::thread writer([&] {
    pause(20);
    data = 17;
    simt::run({1, 1}, [&] { device::store_release(&flag.value, 3); });
  });
  flag.wait(2, kPatience);
  CHECK_EQUAL(data, 17);
  writer.join();
  CHECK_EQUAL(flag.record[kState], kIntact);

  CHECK(flag.wait(4, kShort) >= kShort);
  const std::array<std::int32_t, kRecordWords> expected{kFailed, 3, 11, 4, 0, -1, 4, 3};
  CHECK(flag.record == expected);
  CHECK(flag.wait(5, kPatience) < kPatience / 2);  // at once
  CHECK(flag.record == expected);
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"absent_rank", test_absent_rank},
                    {"late_rank", test_late_rank},
                    {"failed_rank_is_silent", test_failed_rank_is_silent},
                    {"wait_for", test_wait_for}});
}
