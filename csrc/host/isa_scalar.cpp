// Plain C++ for any processor, in loops that compilers turn into what vectors every such one has.
#include "tpk/convert.h"
#include "isa.h"
#include "reduce_vector.h"

namespace tpk {
namespace {

constexpr std::size_t kScalarLanes = 16;

struct ScalarSum {
  float lane[kScalarLanes];
};

template <class Element>
struct Vector : OnCopy<Vector<Element>, typename Element::Storage> {
  using Storage = typename Element::Storage;
  using Sum = ScalarSum;
  static constexpr std::size_t kLanes = kScalarLanes;

  static Sum load(const Storage* p) {
    Storage values[kLanes];
    std::memcpy(values, p, sizeof(values));
    Sum sum;
    for (std::size_t i = 0; i < kLanes; ++i) sum.lane[i] = Element::widen(values[i]);
    return sum;
  }
  static void store(Storage* p, const Sum& sum) {
    Storage values[kLanes];
    for (std::size_t i = 0; i < kLanes; ++i) values[i] = Element::narrow(canonical(sum.lane[i]));
    std::memcpy(p, values, sizeof(values));
  }
  static Sum add(Sum a, const Sum& b) {
    for (std::size_t i = 0; i < kLanes; ++i) a.lane[i] += b.lane[i];
    return a;
  }
};

}  // namespace

const Isa kScalarIsa = {
    "scalar", {reduce<Vector<Float32>>, reduce<Vector<Bfloat16>>, reduce<Vector<Float16>>}, {}};

}  // namespace tpk
