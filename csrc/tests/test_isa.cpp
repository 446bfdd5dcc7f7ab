// Arithmetic: all instruction sets give the same bits, on all kinds of numbers, and the right ones.
#include <string>

#include "isa.h"
#include "ranks.h"

using namespace tpk;
using namespace tpk::test;

namespace {

constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::bfloat16, Dtype::float16};

Bytes reduce(const Isa& isa, Dtype dtype, const std::vector<const void*>& sources,
             const void* bias, std::size_t count) {
  Bytes out = poisoned(count * size_of(dtype));
  isa.reduce[static_cast<int>(dtype)](sources.data(), sources.size(), bias, out.data(), count);
  return out;
}

Bytes random_bits(std::size_t bytes, Random& random) {
  Bytes data(bytes);
  for (auto& byte : data) byte = static_cast<std::byte>(random());
  return data;
}

// Any bit pattern: NaN with payloads, infinities, subnormals; any length; no alignment.
void same_bits() {
  Random random(1);
  for (int round = 0; round < 300; ++round) {
    for (const Dtype dtype : kDtypes) {
      const std::size_t count = random() % 300;
      const std::size_t ranks = 1 + random() % 9;
      const std::size_t shift = random() % 8;
      std::vector<Bytes> inputs;
      std::vector<const void*> sources;
      for (std::size_t r = 0; r < ranks; ++r) {
        inputs.push_back(random_bits(count * size_of(dtype) + shift, random));
      }
      for (const Bytes& input : inputs) sources.push_back(input.data() + shift);
      const Bytes bias = random_bits(count * size_of(dtype), random);
      for (const void* row : {static_cast<const void*>(nullptr), static_cast<const void*>(bias.data())}) {
        const Bytes expected = reduce(kScalarIsa, dtype, sources, row, count);
        for (const Isa* isa : available_isas()) {
          CHECK(reduce(*isa, dtype, sources, row, count) == expected);
        }
      }
    }
  }
}

// Every 16-bit pattern, alone: a sum of one is the value itself, NaN becomes the quiet NaN.
void every_half() {
  Bytes all(65536 * 2);
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto word = static_cast<std::uint16_t>(bits);
    std::memcpy(all.data() + bits * 2, &word, 2);
  }
  for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16}) {
    for (const Isa* isa : available_isas()) {
      const Bytes out = reduce(*isa, dtype, {all.data()}, nullptr, 65536);
      for (std::uint32_t bits = 0; bits < 65536; ++bits) {
        const std::uint32_t quiet = dtype == Dtype::bfloat16 ? 0x7fc0 : 0x7e00;
        const bool nan = std::isnan(decode(dtype, all.data(), bits));
        CHECK_EQUAL(load16(out.data() + bits * 2), nan ? quiet : bits);
      }
    }
  }
}

// a + b in both 16-bit dtypes is the number nearest to the exact sum, the even one of two.
void nearest_even() {
  Random random(2);
  for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16}) {
    const std::size_t count = 20000;
    std::vector<Bytes> inputs = {random_bits(count * 2, random), random_bits(count * 2, random)};
    const Bytes out =
        reduce(*available_isas().back(), dtype, {inputs[0].data(), inputs[1].data()}, nullptr, count);
    for (std::size_t i = 0; i < count; ++i) {
      const double exact =
          static_cast<float>(decode(dtype, inputs[0].data(), i) + decode(dtype, inputs[1].data(), i));
      const double got = decode(dtype, out.data(), i);
      if (!std::isfinite(exact) || !std::isfinite(got)) continue;
      const std::uint16_t bits = load16(out.data() + i * 2);
      for (const int step : {-1, 1}) {
        if ((bits & 0x7fff) == 0 && step < 0) continue;
        const double neighbour = decode16(dtype, static_cast<std::uint16_t>(bits + step));
        const double distance = std::abs(neighbour - exact);
        CHECK(std::abs(got - exact) < distance ||
              (std::abs(got - exact) == distance && (bits & 1) == 0));
      }
    }
  }
}

void order_and_bias() {
  // 2^24 + 1 rounds to 2^24 in float32, so the result tells the order of the additions.
  const float big = 16777216, one = 1, minus = -16777216;
  for (const Isa* isa : available_isas()) {
    float out = NAN;
    const auto run = [&](std::vector<const void*> sources, const void* bias) {
      isa->reduce[0](sources.data(), sources.size(), bias, &out, 1);
      return out;
    };
    CHECK_EQUAL(run({&big, &one, &minus}, nullptr), 0.0f);
    CHECK_EQUAL(run({&big, &minus, &one}, nullptr), 1.0f);
    CHECK_EQUAL(run({&big, &one}, &minus), 0.0f);
  }
}

void selection() {
  const auto isas = available_isas();
  ::unsetenv("TP_KERNELS_ISA");
  CHECK_EQUAL(&select_isa(), isas.back());
  ::setenv("TP_KERNELS_ISA", "scalar", 1);
  CHECK_EQUAL(&select_isa(), &kScalarIsa);
  ::setenv("TP_KERNELS_ISA", "abacus", 1);
  const std::string message = CATCH(std::invalid_argument, select_isa()).what();
  CHECK(message.find("abacus") != std::string::npos);
  CHECK(message.find("scalar") != std::string::npos);
  ::unsetenv("TP_KERNELS_ISA");
}

}  // namespace

int main() {
  same_bits();
  every_half();
  nearest_even();
  order_and_bias();
  selection();
}
