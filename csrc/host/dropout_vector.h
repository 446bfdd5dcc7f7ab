// Dropout for one instruction set: `Lanes` computes Philox of several counters at once.
#pragma once

#include "dropout.h"
#include "tpk/convert.h"
#include "tpk/philox.h"

namespace tpk {
namespace {

// words[4 l + k] is word k of the counter `group` + l, for kCounters of them.
template <class Lanes>
void draw(std::uint64_t group, std::uint64_t key, std::uint32_t* words) {
  auto c0 = Lanes::counters(group), c1 = Lanes::high(c0);
  auto c2 = Lanes::all(0), c3 = c2;
  std::uint32_t k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  const auto first_factor = Lanes::all(kPhiloxFirst), second_factor = Lanes::all(kPhiloxSecond);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    // The lower halves of lanes count; what is in the upper ones has no effect.
    const auto first = Lanes::product(c0, first_factor), second = Lanes::product(c2, second_factor);
    c0 = Lanes::differ(Lanes::differ(Lanes::high(second), c1), Lanes::all(k0));
    c2 = Lanes::differ(Lanes::differ(Lanes::high(first), c3), Lanes::all(k1));
    c1 = second;
    c3 = first;
    k0 += kPhiloxKeySteps[0];
    k1 += kPhiloxKeySteps[1];
  }
  Lanes::store(words, c0, c1, c2, c3);
}

template <class Element, bool kAdds>
void keep(const typename Element::Storage* x, const typename Element::Storage* residual,
          typename Element::Storage* y, std::size_t count, const std::uint32_t* words,
          std::uint32_t least, float scale) {
  for (std::size_t i = 0; i < count; ++i) {
    float value = float_of(choose(words[i] >= least, bits_of(Element::widen(x[i]) * scale), 0));
    if (kAdds) value += Element::widen(residual[i]);
    y[i] = Element::narrow(canonical(value));
  }
}

// A run of elements whose indexes are `step` apart.
template <class Lanes, class Element, bool kAdds>
void run(const Dropout& call, std::size_t offset, std::size_t count, std::uint64_t index,
         std::size_t step) {
  using Storage = typename Element::Storage;
  constexpr std::size_t kBlock = 4 * Lanes::kCounters;
  const auto* x = static_cast<const Storage*>(call.x) + offset;
  const auto* residual = kAdds ? static_cast<const Storage*>(call.residual) + offset : nullptr;
  auto* y = static_cast<Storage*>(call.y) + offset;
  std::uint32_t words[kBlock];
  if (step != 1) {
    for (std::size_t i = 0; i < count; ++i, index += step) {
      words[0] = philox_word(call.key, index);
      keep<Element, kAdds>(x + i, residual + (kAdds ? i : 0), y + i, 1, words, call.least, call.scale);
    }
    return;
  }
  for (std::size_t i = 0; i < count;) {
    const std::size_t skipped = (index + i) % 4;
    const std::size_t some = kBlock - skipped < count - i ? kBlock - skipped : count - i;
    draw<Lanes>((index + i) / 4, call.key, words);
    const auto* more = residual + (kAdds ? i : 0);
    if (some == kBlock) {  // so many are known when this is compiled
      keep<Element, kAdds>(x + i, more, y + i, kBlock, words, call.least, call.scale);
    } else {
      keep<Element, kAdds>(x + i, more, y + i, some, words + skipped, call.least, call.scale);
    }
    i += some;
  }
}

template <class Lanes, class Element>
void dropout(const Dropout& call) {
  const std::size_t dims = call.dims;
  const std::size_t inner = dims == 0 ? 1 : call.sizes[dims - 1];
  const std::size_t step = dims == 0 ? 1 : call.steps[dims - 1];
  std::size_t runs = 1;
  for (std::size_t d = 0; d + 1 < dims; ++d) runs *= call.sizes[d];
  for (std::size_t r = 0; r < runs; ++r) {
    std::uint64_t index = call.first;
    std::size_t rest = r;
    for (std::size_t d = dims; d-- > 1;) {
      index += rest % call.sizes[d - 1] * call.steps[d - 1];
      rest /= call.sizes[d - 1];
    }
    auto* const function = call.residual == nullptr ? run<Lanes, Element, false> : run<Lanes, Element, true>;
    function(call, r * inner, inner, index, step);
  }
}

template <class Lanes>
constexpr DropoutTable table_of() {
  return {{dropout<Lanes, Float32>, dropout<Lanes, Bfloat16>, dropout<Lanes, Float16>}};
}

}  // namespace
}  // namespace tpk
