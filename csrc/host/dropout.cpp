// Dropout for any processor, and the choice of a faster one.
#include "dropout.h"

#include <stdexcept>

#include "dropout_vector.h"

namespace tpk {
namespace {

struct Scalar {
  static constexpr std::size_t kCounters = 8;
  struct Vector {
    std::uint64_t lane[kCounters];
  };

  template <class Function>
  static Vector each(Function function) {
    Vector result;
    for (std::size_t i = 0; i < kCounters; ++i) result.lane[i] = function(i);
    return result;
  }
  static Vector all(std::uint64_t value) {
    return each([=](std::size_t) { return value; });
  }
  static Vector counters(std::uint64_t group) {
    return each([=](std::size_t i) { return group + i; });
  }
  static Vector product(const Vector& a, const Vector& b) {
    return each([&](std::size_t i) { return (a.lane[i] & 0xffffffff) * (b.lane[i] & 0xffffffff); });
  }
  static Vector high(const Vector& a) {
    return each([&](std::size_t i) { return a.lane[i] >> 32; });
  }
  static Vector differ(const Vector& a, const Vector& b) {
    return each([&](std::size_t i) { return a.lane[i] ^ b.lane[i]; });
  }
  static void store(std::uint32_t* words, const Vector& a, const Vector& b, const Vector& c,
                    const Vector& d) {
    const Vector* const all[] = {&a, &b, &c, &d};
    for (std::size_t i = 0; i < 4 * kCounters; ++i) {
      words[i] = static_cast<std::uint32_t>(all[i % 4]->lane[i / 4]);
    }
  }
};

}  // namespace

const DropoutTable kDropoutScalar = table_of<Scalar>();

void dropout(const Isa& isa, const Dropout& call, Dtype dtype) {
  const auto index = static_cast<std::uint32_t>(dtype);
  if (index >= kReducibleDtypes) {
    throw std::invalid_argument("dropout takes float32, bfloat16 and float16");
  }
  const DropoutTable* table = &kDropoutScalar;
#ifdef TPK_HAVE_AVX2
  if (&isa == &kAvx2Isa) table = &kDropoutAvx2;
#endif
#ifdef TPK_HAVE_AVX512
  if (&isa == &kAvx512Isa) table = &kDropoutAvx512;
#endif
  (void)isa;
  table->of[index](call);
}

}  // namespace tpk
