// Arithmetic: every instruction set gives the bits of the definition, on all kinds of numbers.
#include <sys/mman.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "isa.h"
#include "ranks.h"

using namespace tpk;
using namespace tpk::test;

namespace {

constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::bfloat16, Dtype::float16};

struct Format {
  explicit Format(Dtype dtype)
      : size(static_cast<int>(size_of(dtype))),
        fraction_bits(dtype == Dtype::float32 ? 23 : dtype == Dtype::bfloat16 ? 7 : 10),
        bias((1 << (size * 8 - 2 - fraction_bits)) - 1),
        infinity(static_cast<std::uint32_t>(2 * bias + 1) << fraction_bits),
        quiet(infinity | 1u << (fraction_bits - 1)) {}
  int size, fraction_bits, bias;
  std::uint32_t infinity, quiet;
};

void put(Dtype dtype, std::byte* data, std::size_t index, std::uint32_t bits) {
  const auto half = static_cast<std::uint16_t>(bits);
  if (dtype == Dtype::float32) std::memcpy(data + index * 4, &bits, 4);
  else std::memcpy(data + index * 2, &half, 2);
}

// Rounds to nearest, ties to even, by the definition of the format; nothing of the code under test.
std::uint32_t encode(Dtype dtype, float value) {
  const Format format(dtype);
  if (std::isnan(value)) return format.quiet;
  const std::uint32_t sign = std::signbit(value) ? 1u << (format.size * 8 - 1) : 0;
  if (std::isinf(value)) return sign | format.infinity;
  if (value == 0) return sign;
  const double magnitude = std::abs(static_cast<double>(value));
  const int smallest = 1 - format.bias;
  const int exponent = std::max(std::ilogb(magnitude), smallest);
  const double units = std::nearbyint(std::ldexp(magnitude, format.fraction_bits - exponent));
  const std::uint32_t bits = (static_cast<std::uint32_t>(exponent - smallest)
                              << format.fraction_bits) + static_cast<std::uint32_t>(units);
  return sign | std::min(bits, format.infinity);
}

using Sources = std::vector<const void*>;

Bytes expected(Dtype dtype, const Sources& sources, const void* bias, std::size_t count) {
  const auto number = [&](const void* from, std::size_t i) {
    return static_cast<float>(decode(dtype, static_cast<const std::byte*>(from), i));
  };
  Bytes out(count * size_of(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    float sum = number(sources[0], i);
    for (std::size_t rank = 1; rank < sources.size(); ++rank) sum += number(sources[rank], i);
    if (bias != nullptr) sum += number(bias, i);
    put(dtype, out.data(), i, encode(dtype, sum));
  }
  return out;
}

Bytes reduce(const Isa& isa, Dtype dtype, const Sources& sources, const void* bias,
             std::size_t count) {
  Bytes out = poisoned(count * size_of(dtype));
  isa.reduce[static_cast<int>(dtype)](sources.data(), sources.size(), bias, out.data(), count);
  return out;
}

// The ends of what there is: zeros, subnormals, neighbours of 1 and what ties with them, the
// largest, infinities and NaN, with both signs.
std::vector<std::uint32_t> edges(Dtype dtype) {
  const Format format(dtype);
  const std::uint32_t unit = 1u << format.fraction_bits, one = format.bias * unit;
  std::vector<std::uint32_t> all = {
      0, 1, unit - 1, unit, unit + 1, one - 1, one, one + 1,
      one - unit * (format.fraction_bits + 1), format.infinity - 1, format.infinity,
      format.infinity + 1, format.quiet, format.quiet + 5, format.infinity + unit - 1};
  for (std::size_t i = all.size(); i-- > 0;) all.push_back(all[i] | 1u << (format.size * 8 - 1));
  return all;
}

// A quarter edges, a quarter any bits, the others of a magnitude at which sums round.
Bytes mixture(Dtype dtype, std::size_t count, Random& random) {
  static const std::vector<std::uint32_t> edge[] = {
      edges(kDtypes[0]), edges(kDtypes[1]), edges(kDtypes[2])};
  Bytes data = random_values(dtype, count, random);
  for (std::size_t i = 0; i < count; ++i) {
    const auto& some = edge[static_cast<int>(dtype)];
    const auto kind = random() % 4;
    if (kind == 0) put(dtype, data.data(), i, some[random() % some.size()]);
    if (kind == 1) put(dtype, data.data(), i, static_cast<std::uint32_t>(random()));
  }
  return data;
}

// Every 16-bit pattern (of float32, a mixture), alone and with every edge as a rank and as bias.
void every_pattern() {
  Random random(1);
  for (const Dtype dtype : kDtypes) {
    const std::size_t count = dtype == Dtype::float32 ? 5000 : 65536;
    Bytes all = mixture(dtype, count, random);
    if (dtype != Dtype::float32) {
      for (std::uint32_t i = 0; i < count; ++i) put(dtype, all.data(), i, i);
    }
    const Bytes alone = expected(dtype, {all.data()}, nullptr, count);
    for (const Isa* isa : available_isas()) {
      CHECK(reduce(*isa, dtype, {all.data()}, nullptr, count) == alone);
    }
    Bytes other(all.size());
    for (const std::uint32_t edge : edges(dtype)) {
      for (std::size_t i = 0; i < count; ++i) put(dtype, other.data(), i, edge);
      const Bytes sum = expected(dtype, {all.data(), other.data()}, nullptr, count);
      for (const Isa* isa : available_isas()) {
        CHECK(reduce(*isa, dtype, {all.data(), other.data()}, nullptr, count) == sum);
        CHECK(reduce(*isa, dtype, {all.data()}, other.data(), count) == sum);
      }
    }
  }
}

// Memory that ends where a page begins that nobody may touch.
class Fenced {
 public:
  Fenced() {
    void* base = ::mmap(nullptr, 2 * kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                        -1, 0);
    CHECK(base != MAP_FAILED);
    base_ = static_cast<std::byte*>(base);
    CHECK_EQUAL(::mprotect(base_ + kSize, kSize, PROT_NONE), 0);
  }
  Fenced(const Fenced&) = delete;
  ~Fenced() { ::munmap(base_, 2 * kSize); }

  std::byte* last(std::size_t bytes) { return base_ + kSize - bytes; }

 private:
  static constexpr std::size_t kSize = 65536;  // at least a page
  std::byte* base_;
};

// All lengths about a few vectors, any alignment, into an array of its own or one of the sources;
// and nothing else is read or written.
void every_length() {
  constexpr std::size_t kRanks = 8;
  constexpr std::ptrdiff_t kBefore = 64;
  Random random(2);
  Fenced memory[kRanks + 2];
  for (const Dtype dtype : kDtypes) {
    std::vector<std::size_t> counts = {127, 300, 1000};
    for (std::size_t count = 0; count <= 70; ++count) counts.push_back(count);
    for (const std::size_t count : counts) {
      const std::size_t bytes = count * size_of(dtype);
      for (std::size_t ranks = 1; ranks <= kRanks; ++ranks) {
        Sources sources;
        const std::size_t after = random() % size_of(dtype);
        const auto place = [&](std::size_t array, const Bytes& data) {
          return std::copy(data.begin(), data.end(), memory[array].last(bytes + after)) - bytes;
        };
        for (std::size_t r = 0; r < ranks; ++r) {
          sources.push_back(place(r, mixture(dtype, count, random)));
        }
        const void* row = place(kRanks, mixture(dtype, count, random));
        for (const void* bias : {static_cast<const void*>(nullptr), row}) {
          const Bytes sum = expected(dtype, sources, bias, count);
          for (const Isa* isa : available_isas()) {
            for (const std::size_t target : {kRanks + 1, random() % ranks}) {
              std::byte* out = memory[target].last(bytes + after);
              std::fill(out - kBefore, out, kPoison);
              std::fill(out + bytes, out + bytes + after, kPoison);
              const Bytes kept(out, out + bytes);
              isa->reduce[static_cast<int>(dtype)](sources.data(), ranks, bias, out, count);
              CHECK(std::equal(sum.begin(), sum.end(), out));
              CHECK(std::count(out - kBefore, out, kPoison) == kBefore);
              CHECK(std::count(out + bytes, out + bytes + after, kPoison) == std::ptrdiff_t(after));
              std::copy(kept.begin(), kept.end(), out);
            }
          }
        }
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

// Against sums in double; any row alone has the bits it has among others; nothing else is touched.
void products() {
  Random random(3);
  Fenced x_memory, w_memory, bias_memory, y_memory;
  for (int round = 0; round < 1500; ++round) {
    const Dtype dtype = kDtypes[round % 3];
    const std::size_t size = size_of(dtype);
    const std::size_t rows = 1 + random() % 17, columns = random() % 35;
    const std::size_t depth = random() % (round % 5 ? 70 : 400);
    // The space between rows holds NaN, and the last row ends with the memory.
    const std::size_t ldx = depth + random() % 3, ldw = depth + random() % 3;
    const auto place = [&](Fenced& memory, std::size_t count, std::size_t ld) {
      const std::size_t bytes = count == 0 ? 0 : ((count - 1) * ld + depth) * size;
      std::byte* start = memory.last(bytes);
      std::fill(start, start + bytes, kPoison);
      for (std::size_t row = 0; row < count; ++row) {
        const Bytes data = random_values(dtype, depth, random);
        std::copy(data.begin(), data.end(), start + row * ld * size);
      }
      return start;
    };
    const std::byte* x = place(x_memory, rows, ldx);
    const std::byte* w = place(w_memory, columns, ldw);
    const Bytes bias = random_values(dtype, columns, random);
    std::byte* bias_at = std::copy(bias.begin(), bias.end(), bias_memory.last(bias.size())) -
                         static_cast<std::ptrdiff_t>(bias.size());
    const bool biased = random() % 2;
    for (const Isa* isa : available_isas()) {
      const ProductFunction product = isa->product[static_cast<int>(dtype)];
      if (product == nullptr) continue;
      const std::size_t bytes = rows * columns * size;
      std::byte* y = y_memory.last(bytes);
      std::fill(y - 64, y + bytes, kPoison);
      product(x, ldx, w, ldw, biased ? bias_at : nullptr, y, rows, columns, depth);
      CHECK(std::count(y - 64, y, kPoison) == 64);
      for (std::size_t m = 0; m < rows; ++m) {
        for (std::size_t n = 0; n < columns; ++n) {
          double exact = biased ? decode(dtype, bias_at, n) : 0, magnitude = std::abs(exact);
          for (std::size_t k = 0; k < depth; ++k) {
            const double term = decode(dtype, x, m * ldx + k) * decode(dtype, w, n * ldw + k);
            exact += term;
            magnitude += std::abs(term);
          }
          const double bound = 1.01 * epsilon(dtype) * std::abs(exact) +
                               std::ldexp(static_cast<double>(depth + 2), -24) * magnitude +
                               std::ldexp(1, -25);
          CHECK(std::abs(decode(dtype, y, m * columns + n) - exact) <= bound);
        }
        Bytes alone = poisoned(columns * size);
        product(x + m * ldx * size, ldx, w, ldw, biased ? bias_at : nullptr, alone.data(), 1,
                columns, depth);
        CHECK(std::equal(alone.begin(), alone.end(), y + m * columns * size));
      }
    }
  }
}

// What there should be, as the system lists it.
void detection() {
  std::vector<std::string> names;
  for (const Isa* isa : available_isas()) names.push_back(isa->name);
  std::vector<std::string> wanted = {"scalar"};
#ifdef __x86_64__
  std::string line;
  for (std::ifstream info("/proc/cpuinfo"); line.rfind("flags", 0) != 0;) {
    CHECK(std::getline(info, line));
  }
  const auto has = [&](const std::string& flag) {
    return (line + " ").find(" " + flag + " ") != std::string::npos;
  };
  if (has("avx2") && has("fma") && has("f16c")) wanted.push_back("avx2");
  if (has("avx512f") && has("avx512bw") && has("avx512dq") && has("avx512vl")) {
    wanted.push_back("avx512");
  }
#elif defined(__aarch64__)
  wanted.push_back("neon");
#endif
  CHECK(names == wanted);
}

void selection() {
  const auto isas = available_isas();
  ::unsetenv("TP_KERNELS_ISA");
  CHECK_EQUAL(&select_isa(), isas.back());
  for (const Isa* isa : isas) {
    ::setenv("TP_KERNELS_ISA", isa->name, 1);
    CHECK_EQUAL(&select_isa(), isa);
  }
  ::setenv("TP_KERNELS_ISA", "abacus", 1);
  const std::string message = CATCH(std::invalid_argument, select_isa()).what();
  CHECK(message.find("abacus") != std::string::npos);
  CHECK(message.find("scalar") != std::string::npos);
  ::unsetenv("TP_KERNELS_ISA");
}

}  // namespace

int main() {
  detection();
  selection();
  order_and_bias();
  every_pattern();
  every_length();
  products();
}
