// The reduction, written once for all instruction sets. Every file that includes this is compiled
// for another one; the anonymous namespace keeps the linker from using one file's copy in another.
//
// An instruction set gives a struct per dtype with
//   Storage, Sum, kLanes: a Sum is kLanes float32 numbers, in any order
//   load(p), store(p, sum): all lanes; `store` writes canonical NaN. `p` needs no alignment
//   load_part(p, lanes), store_part(p, sum, lanes): the first lanes < kLanes of them, touching no
//     other memory; OnCopy gives these where there are no masks
//   add(sum, sum)
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace tpk {
namespace {

template <class Vector, class Storage>
struct OnCopy {
  static auto load_part(const Storage* p, std::size_t lanes) {
    Storage copy[Vector::kLanes] = {};
    std::memcpy(copy, p, lanes * sizeof(Storage));
    return Vector::load(copy);
  }
  template <class Sum>
  static void store_part(Storage* p, const Sum& sum, std::size_t lanes) {
    Storage copy[Vector::kLanes];
    Vector::store(copy, sum);
    std::memcpy(p, copy, lanes * sizeof(Storage));
  }
};

// What another processor has written arrives late, and the 16-bit dtypes take so many instructions
// that too little of it is on its way at a time: without this they take twice as long.
inline void prefetch_after(const void* p) {
  constexpr std::uintptr_t kAhead = 1024;  // may be after the end of the array, which does no harm
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(p) + kAhead));
}

// `ranks` and `bias` have types of their own so that a constant stays one.
template <class Vector, class Ranks, class Bias>
void reduce_all(const void* const* sources, Ranks ranks, Bias bias, void* out, std::size_t count) {
  using Storage = typename Vector::Storage;
  const auto sum_of = [&](auto load) {
    auto sum = load(static_cast<const Storage*>(sources[0]));
    for (std::size_t rank = 1; rank < ranks; ++rank) {
      sum = Vector::add(sum, load(static_cast<const Storage*>(sources[rank])));
    }
    if (bias != nullptr) sum = Vector::add(sum, load(static_cast<const Storage*>(bias)));
    return sum;
  };
  auto* results = static_cast<Storage*>(out);
  std::size_t i = 0;
  for (; i + Vector::kLanes <= count; i += Vector::kLanes) {
    const auto load = [=](const Storage* from) {
      prefetch_after(from + i);
      return Vector::load(from + i);
    };
    Vector::store(results + i, sum_of(load));
  }
  if (const std::size_t lanes = count - i; lanes != 0) {
    const auto load = [=](const Storage* from) { return Vector::load_part(from + i, lanes); };
    Vector::store_part(results + i, sum_of(load), lanes);
  }
}

template <class Vector>
void reduce(const void* const* sources, std::size_t ranks, const void* bias, void* out,
            std::size_t count) {
  if (ranks == 2 && bias == nullptr) {  // frequent, and faster without inner loops
    const void* two[] = {sources[0], sources[1]};
    return reduce_all<Vector>(two, std::integral_constant<std::size_t, 2>(), nullptr, out, count);
  }
  reduce_all<Vector>(sources, ranks, bias, out, count);
}

}  // namespace
}  // namespace tpk
