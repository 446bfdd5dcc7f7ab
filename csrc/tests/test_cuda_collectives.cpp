// Kernels that exchange data, on the host: every bit, for all numbers, sizes and alignments; rounds back to
// back with a slow rank, counters that wrap, buffers that are full of something else.
#include <array>

#include "all_reduce.h"
#include "exchange.h"

using namespace tpk;
using namespace tpk::test;

namespace {

constexpr int kThreads = 8;
constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::bfloat16, Dtype::float16};

enum class Operation { one_shot, two_shots, by_switch };
constexpr Operation kOperations[] = {Operation::one_shot, Operation::two_shots, Operation::by_switch};

struct Call {
  Operation operation;
  Dtype dtype;
  std::size_t count;      // elements of x
  std::int32_t part;      // bytes
  std::size_t shift = 0;  // elements that x is away from an aligned address
  std::size_t out_shift = 0;
  bool in_place = false;
  std::uint64_t seed = 1;
};

// What a call has been given and what it has to give.
struct Operands {
  Operands(const Call& call, int world) {
    Random random(call.seed);
    const std::size_t size = width_of(call.dtype);
    for (int rank = 0; rank < world; ++rank) {
      given.push_back(random_values(call.dtype, call.count, random));
      xs.emplace_back(given.back(), call.shift * size);
      outs.emplace_back(call.count * size, call.out_shift * size);
      expected.push_back(Bytes());
    }
    for (Bytes& result : expected) result = sums(call.dtype, given, 0, call.count);
  }
  std::vector<Bytes> given, expected;
  std::vector<Memory> xs, outs;
};

template <class Number>
void run_kernel(const Call& call, const std::byte* x, std::byte* out, const Workspace& w) {
  const std::int64_t bytes = call.count * width_of(call.dtype);
  switch (call.operation) {
    case Operation::one_shot:
      return device::all_reduce_one_shot<Number>(x, out, bytes, call.part, w);
    case Operation::two_shots:
      return device::all_reduce_two_shots<Number>(x, out, bytes, call.part, w);
    case Operation::by_switch:
      return device::all_reduce_by_switch<Number>(x, out, bytes, call.part, 0, w);
  }
}

int blocks_of(const Call& call, const Exchange& exchange) {
  const std::int64_t bytes = call.count * width_of(call.dtype);
  const std::int64_t share = call.part * (call.operation == Operation::two_shots ? exchange.world() : 1);
  return static_cast<int>(std::min<std::int64_t>(exchange.channels(), ceil_div(bytes, share)));
}

void launch(const Call& call, Operands& operands, Exchange& exchange, int rank) {
  std::byte* x = operands.xs[rank].data();
  std::byte* out = call.in_place ? x : operands.outs[rank].data();
  const Workspace& w = exchange.workspace(rank);
  simt::run({blocks_of(call, exchange), kThreads, 0, call.seed * 31 + rank}, [&] {
    with_number(call.dtype, [&](auto number) { run_kernel<decltype(number)>(call, x, out, w); });
  });
}

void check(const Call& call, Operands& operands, Exchange& exchange) {
  for (int rank = 0; rank < exchange.world(); ++rank) {
    CHECK((call.in_place ? operands.xs : operands.outs)[rank].bytes() == operands.expected[rank]);
  }
}

// All calls in a row on every rank, which are not otherwise in step; one of them is slow.
void run_calls(const std::vector<Call>& calls, int world, const ExchangeOptions& options,
               int slow = -1) {
  Exchange exchange(world, options);
  std::vector<Operands> operands;
  for (const Call& call : calls) operands.emplace_back(call, world);
  exchange.run([&](int rank) {
    for (std::size_t i = 0; i < calls.size(); ++i) {
      if (rank == slow) pause(3);
      launch(calls[i], operands[i], exchange, rank);
    }
  });
  CHECK(exchange.intact());
  for (std::size_t i = 0; i < calls.size(); ++i) check(calls[i], operands[i], exchange);
}

void test_bits() {
  std::uint64_t seed = 0;
  for (const int world : {1, 2, 3, 5, 8}) {
    for (const Operation operation : kOperations) {
      std::vector<Call> calls;
      for (const Dtype dtype : kDtypes) {
        for (const std::size_t count : {1, 7, 64, 333}) {
          calls.push_back({operation, dtype, count, 64, 0, 0, false, ++seed});
        }
      }
      run_calls(calls, world, {});
    }
  }
}

}  // namespace

int main() {
  test_bits();
  return 0;
}
