// Kernels that exchange data, on the host: every bit, for all numbers, sizes and alignments; rounds
// back to back with a slow rank, counters that wrap, buffers that are full of something else.
#include <limits>

#include "exchange_calls.h"
#include "named.h"

using namespace tpk;
using namespace tpk::test;

namespace {

constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::bfloat16, Dtype::float16};

// [rows, width]: less than a line, parts of different length, rows for some ranks only, several
// rounds.
constexpr std::pair<int, int> kShapes[] = {{1, 3}, {7, 5}, {3, 8}, {33, 7}};

std::vector<Call> calls_of(Kernel kernel, std::uint64_t seed) {
  std::vector<Call> calls;
  for (const Dtype dtype : kDtypes) {
    for (const auto& [rows, width] : kShapes) {
      Call call{kernel, dtype, rows, width};
      call.seed = ++seed;
      call.bias = seed % 2;
      call.residual = seed % 3;
      calls.push_back(call);
    }
  }
  return calls;
}

void test_bits() {
  for (const int world : {2, 3}) {
    for (const Kernel kernel : kKernels) run_calls(calls_of(kernel, world * 100), world, {});
  }
  ExchangeOptions one_channel;
  one_channel.channels = 1;
  for (const Kernel kernel : kKernels) {
    run_calls({{kernel, Dtype::float32, 33, 7}, {kernel, Dtype::bfloat16, 7, 5}}, 8, one_channel);
  }
  for (const Kernel kernel : {Kernel::one_shot, Kernel::norm_one_shot, Kernel::norm_two_shots}) {
    run_calls(calls_of(kernel, 7), 1, {});  // with itself alone
  }
}

// Operands and results may begin at any element, not the same one.
void test_alignment() {
  for (const Kernel kernel : kKernels) {
    std::vector<Call> calls;
    for (const Dtype dtype : kDtypes) {
      for (const auto& [shift, out_shift] : {std::pair{0, 1}, {1, 0}, {3, 2}}) {
        Call call{kernel, dtype, 5, 16};
        call.shift = shift;
        call.out_shift = out_shift;
        call.seed = calls.size() + 1;
        calls.push_back(call);
      }
    }
    run_calls(calls, 3, {});
  }
}

void test_in_place() {
  for (const Kernel kernel : {Kernel::one_shot, Kernel::two_shots, Kernel::by_switch}) {
    std::vector<Call> calls = calls_of(kernel, 5);
    for (Call& call : calls) call.in_place = true;
    run_calls(calls, 2, {});
  }
}

// The last rank comes late to every call, and all others run ahead of it as far as buffers allow.
void test_slow_rank() {
  for (const Kernel kernel : kKernels) {
    std::vector<Call> calls;
    for (int i = 0; i < 6; ++i) {
      Call call{kernel, Dtype::float32, 9, 13};
      call.seed = 40 + i;
      calls.push_back(call);
    }
    ExchangeOptions options;
    options.channels = 1;
    run_calls(calls, 3, options, 2);
    const bool twice = calls[0].twice() || kernel == Kernel::by_switch;
    options.depth = twice ? 2 : 1;
    options.channels = 2;
    run_calls(calls, 2, options, 0);
  }
}

void test_epochs_wrap() {
  ExchangeOptions options;
  options.epoch = std::numeric_limits<std::int32_t>::max() - 2;
  for (const Kernel kernel : kKernels) {
    std::vector<Call> calls(4, Call{kernel, Dtype::bfloat16, 9, 13});
    run_calls(calls, 2, options);
  }
}

// What buffers are full of before: numbers that could be right.
void test_stale_buffers() {
  ExchangeOptions options;
  options.left = std::byte{0x3f};
  for (const Kernel kernel : kKernels) {
    run_calls({{kernel, Dtype::float32, 33, 7}, {kernel, Dtype::float16, 7, 5}}, 2, options);
  }
}

// Numbers that are not ordinary: both zeros, the smallest and the largest, infinity and NaN.
void test_special_numbers() {
  for (const Dtype dtype : kDtypes) {
    std::vector<double> numbers = {0.0, -0.0, 1.0, -1.0, INFINITY, -INFINITY, std::nan("")};
    const double smallest = dtype == Dtype::float16    ? 0x1p-24
                            : dtype == Dtype::bfloat16 ? 0x1p-133
                                                       : 0x1p-149;
    const double largest = dtype == Dtype::float16 ? 65504 : 0x1.fep127;
    for (const double one : {smallest, 3 * smallest, largest}) {
      numbers.push_back(one);
      numbers.push_back(-one);
    }
    Call call{Kernel::one_shot, dtype, static_cast<int>(numbers.size()),
              static_cast<int>(numbers.size())};
    call.bias = false;
    Operands operands(call, 2);
    for (std::size_t i = 0; i < numbers.size() * numbers.size(); ++i) {
      encode(dtype, numbers[i / numbers.size()], operands.given[0].data() + i * call.size());
      encode(dtype, numbers[i % numbers.size()], operands.given[1].data() + i * call.size());
    }
    for (int rank = 0; rank < 2; ++rank) {
      std::memcpy(operands.xs[rank].data(), operands.given[rank].data(),
                  operands.given[rank].size());
    }
    Exchange exchange(2);
    exchange.run([&](int rank) { launch(call, operands, exchange, rank); });
    const Bytes expected = sums(dtype, operands.given, 0, numbers.size() * numbers.size());
    const Bytes found = operands.outs[1].bytes();
    for (std::size_t i = 0; i < numbers.size() * numbers.size(); ++i) {
      const double value = decode(dtype, expected.data(), i),
                   result = decode(dtype, found.data(), i);
      CHECK(std::isnan(value) ? std::isnan(result)
                              : value == result && std::signbit(value) == std::signbit(result));
    }
  }
}

// The nearest of all numbers that float8 e4m3 has, of two the even one.
std::uint8_t nearest_e4m3(double value) {
  if (std::isnan(value)) return 0x7f;
  int best = 0;
  double least = INFINITY;
  for (int bits = 0; bits < 0x7f; ++bits) {
    const int exponent = bits >> 3, fraction = bits & 7;
    const double one =
        exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
    const double error = std::abs(one - std::min(std::abs(value), 448.0));
    if (error < least || (error == least && bits % 2 == 0)) {
      best = bits;
      least = error;
    }
  }
  return static_cast<std::uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

void test_narrow_to_e4m3() {
  Random random(3);
  std::vector<float> values = {0.0f,  -0.0f,     448.0f,   464.0f,    465.0f,
                               1e30f, -INFINITY, 0x1p-10f, 0x1.8p-10f};
  for (int bits = 0; bits < 0x7e; ++bits) {  // what lies halfway between two
    const auto of = [](int b) {
      return b < 8 ? std::ldexp(b, -9) : std::ldexp(8 + (b & 7), (b >> 3) - 10);
    };
    values.push_back(static_cast<float>((of(bits) + of(bits + 1)) / 2));
  }
  for (int i = 0; i < 20000; ++i) {
    values.push_back(device::as_float(static_cast<std::uint32_t>(random())));
  }
  while (values.size() % 4 != 0) values.push_back(1);
  for (std::size_t i = 0; i < values.size(); i += 4) {
    const std::uint32_t word = device::narrow_to_e4m3(values.data() + i);
    for (int k = 0; k < 4; ++k) {
      const int byte = word >> 8 * k & 0xff;
      if (std::isnan(values[i + k])) {
        CHECK_EQUAL(byte & 0x7f, 0x7f);
      } else {
        CHECK_EQUAL(byte, int{nearest_e4m3(values[i + k])});
      }
    }
  }
}

// y in float8 is the y of the same kernel, divided and rounded.
void test_quantized_norm() {
  for (const Kernel kernel : {Kernel::norm_one_shot, Kernel::norm_two_shots}) {
    for (const Dtype dtype : kDtypes) {
      const Call call{kernel, dtype, 5, 11};
      Exchange exchange(2);
      Operands operands(call, 2);
      const float scale = 0.0625f;
      std::vector<Memory> quantized;
      for (int rank = 0; rank < 2; ++rank) quantized.emplace_back(5 * 11, rank);
      exchange.run([&](int rank) {
        launch(call, operands, exchange, rank);
        const Workspace& w = exchange.workspace(rank);
        const NormOperands o{operands.xs[rank].data(),
                             operands.bias[0].data(),
                             operands.residual[0].data(),
                             operands.weight[0].data(),
                             &scale,
                             quantized[rank].data(),
                             operands.sums_with_residual[rank].data(),
                             5,
                             11,
                             kEpsilon};
        simt::run({1, 4, static_cast<std::size_t>(norm_shared_bytes(4))}, [&] {
          with_number(dtype, [&](auto number) {
            using Number = decltype(number);
            if (call.twice()) return device::all_reduce_rms_norm_two_shots<Number>(o, 1, w);
            device::all_reduce_rms_norm_one_shot<Number>(o, 1, w);
          });
        });
      });
      CHECK(exchange.intact());
      for (int rank = 0; rank < 2; ++rank) {
        const Bytes y = operands.outs[rank].bytes(), found = quantized[rank].bytes();
        for (int i = 0; i < 5 * 11; ++i) {
          const float value = static_cast<float>(decode(dtype, y.data(), i));
          CHECK_EQUAL(std::to_integer<int>(found[i]), int{nearest_e4m3(value / scale)});
        }
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"bits", test_bits},
                    {"alignment", test_alignment},
                    {"in_place", test_in_place},
                    {"slow_rank", test_slow_rank},
                    {"epochs_wrap", test_epochs_wrap},
                    {"stale_buffers", test_stale_buffers},
                    {"special_numbers", test_special_numbers},
                    {"narrow_to_e4m3", test_narrow_to_e4m3},
                    {"quantized_norm", test_quantized_norm}});
}
