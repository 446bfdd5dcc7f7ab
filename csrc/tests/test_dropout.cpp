// Dropout: Philox by its known answers, and every instruction set by the definition, for any runs of indexes.
#include "dropout.h"

#include <numeric>
#include <string>

#include "check.h"
#include "tpk/philox.h"
#include "values.h"

using namespace tpk;
using namespace tpk::test;

namespace {

constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::bfloat16, Dtype::float16};

// Of the file of known answers that goes with the paper (Random123, kat_vectors).
void test_known_answers() {
  const std::uint32_t ones = 0xffffffff;
  const struct {
    PhiloxBlock counter;
    std::uint32_t key[2];
    PhiloxBlock answer;
  } known[] = {
      {{{0, 0, 0, 0}}, {0, 0}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
      {{{ones, ones, ones, ones}},
       {ones, ones},
       {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       {0xa4093822, 0x299f31d0},
       {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
  };
  for (const auto& k : known) {
    const PhiloxBlock answer = philox(k.counter, k.key[0], k.key[1]);
    for (int i = 0; i < 4; ++i) CHECK_EQUAL(answer.word[i], k.answer.word[i]);
  }
  CHECK_EQUAL(philox_word(0, 2), 0xbc57ac4c);
}

struct Case {
  std::vector<std::size_t> sizes, steps;
  std::uint64_t first;
};

void check(const Isa& isa, Dtype dtype, const Case& c, bool adds, Random& random) {
  const std::size_t count = std::accumulate(c.sizes.begin(), c.sizes.end(), std::size_t{1},
                                            [](std::size_t a, std::size_t b) { return a * b; });
  const Bytes x = random_values(dtype, count, random);
  const Bytes residual = random_values(dtype, count, random);
  Bytes y = poisoned(count * width_of(dtype));
  const std::uint64_t key = random() >> 1;
  const std::uint32_t least = 0x60000000;
  const float scale = 1.6f;
  const void* const more = adds ? residual.data() : nullptr;
  dropout(isa, {x.data(), more, y.data(), c.sizes.size(), c.sizes.data(), c.steps.data(), c.first, key,
                least, scale}, dtype);
  Bytes expected(y.size());
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t index = c.first;
    std::size_t rest = i;
    for (std::size_t d = c.sizes.size(); d-- > 0; rest /= c.sizes[d]) {
      index += rest % c.sizes[d] * c.steps[d];
    }
    const auto element = static_cast<float>(decode(dtype, x.data(), i));
    float value = philox_word(key, index) >= least ? element * scale : 0;
    if (adds) value += static_cast<float>(decode(dtype, residual.data(), i));
    encode(dtype, value, expected.data() + i * width_of(dtype));
  }
  CHECK(y == expected);
}

void test_definition() {
  Random random(1);
  const std::vector<Case> cases = {
      {{}, {}, 5},
      {{0}, {1}, 3},
      {{1000}, {1}, 0},
      {{77}, {1}, 2},
      {{64}, {1}, (std::uint64_t{1} << 34) - 30},  // a counter of more than 32 bits, on the way
      {{5}, {1}, (std::uint64_t{1} << 40) + 1},
      {{3, 5, 37}, {1000, 37, 1}, 11},
      {{4, 3, 8}, {8, 160, 1}, 32},  // tokens first
      {{9, 7}, {1, 31}, 1},          // neighbours in memory are apart in the unsplit tensor
  };
  for (const Isa* isa : available_isas()) {
    for (const Dtype dtype : kDtypes) {
      for (const Case& c : cases) {
        for (const bool adds : {false, true}) check(*isa, dtype, c, adds, random);
      }
    }
  }
}

void test_refused() {
  const auto error = CATCH(std::invalid_argument, dropout(*available_isas()[0], {}, Dtype::int64));
  CHECK(std::string(error.what()).find("float32") != std::string::npos);
}

}  // namespace

int main() {
  test_known_answers();
  test_definition();
  test_refused();
}
