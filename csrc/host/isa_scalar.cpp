#include "convert.h"
#include "isa.h"

namespace tpk {
namespace {

template <class Element>
void reduce(const void* const* sources, std::size_t ranks, const void* bias, void* out,
            std::size_t count) {
  reduce_scalar<Element>(sources, ranks, bias, out, 0, count);
}

}  // namespace

const Isa kScalarIsa = {"scalar", {reduce<Float32>, reduce<Bfloat16>, reduce<Float16>}};

}  // namespace tpk
