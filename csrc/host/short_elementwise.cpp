// Element-wise work by the short way; nothing is sent, so that it belongs to no slot.
#include <Python.h>

#include <algorithm>

#include "elementwise.h"
#include "short_way.h"
#include "tensor.h"

namespace tpk::short_way {

// Up to so many, one pass by narrow vectors is faster than two of torch by wide ones: measured with AVX-512,
// where a call of torch costs 30 us more than in a loop, because a weight went through the caches.
constexpr std::uint64_t kFewElements = 1 << 15;

PyObject* rms_norm(PyObject* const* args) {
  TensorView x, weight;
  if (!view_of(args[0], x) || !view_of(args[1], weight) || !PyFloat_Check(args[2])) return none();
  if (x.dims < 1 || weight.dims != 1 || weight.dtype != x.dtype ||
      weight.shape[0] != x.shape[x.dims - 1] || !x.contiguous() || !weight.contiguous()) {
    return none();
  }
  if (!unobserved(args, 2)) return none();
  const auto epsilon = static_cast<float>(PyFloat_AS_DOUBLE(args[2]));
  Output out(x.shape, x.dims, x.dtype);
  {
    const Unlocked unlocked;
    tpk::rms_norm(x.data, weight.data, out.data(), x.count(0, x.dims - 1),
                  x.count(x.dims - 1, x.dims), epsilon, x.dtype);
  }
  return out.release();
}

PyObject* swiglu(PyObject* const* args) {
  TensorView gate, up;
  if (!view_of(args[0], gate) || !view_of(args[1], up) || gate.dtype != up.dtype) return none();
  if (!gate.contiguous() || !up.contiguous() || gate.dims != up.dims ||
      !std::equal(gate.shape, gate.shape + gate.dims, up.shape)) {
    return none();
  }
  if (gate.count() > kFewElements || !unobserved(args, 2)) return none();
  Output out(gate.shape, gate.dims, gate.dtype);
  {
    const Unlocked unlocked;
    tpk::swiglu(gate.data, up.data, out.data(), gate.count(), gate.dtype);
  }
  return out.release();
}

PyObject* rotary(PyObject* const* args) {
  TensorView x, tables[2];
  if (!view_of(args[0], x) || x.dims != 4 || !x.contiguous()) return none();
  const std::int64_t batch = x.shape[0], length = x.shape[1], heads = x.shape[2], dim = x.shape[3];
  for (int i = 0; i < 2; ++i) {
    TensorView& table = tables[i];
    if (!view_of(args[1 + i], table) || table.dtype != x.dtype || table.dims != 3 ||
        table.shape[1] != length || table.shape[2] != dim || !table.contiguous() ||
        (table.shape[0] != 1 && table.shape[0] != batch)) {
      return none();
    }
  }
  if (tables[0].shape[0] != tables[1].shape[0] || dim % 2 != 0) return none();
  if (!unobserved(args, 3)) return none();
  const std::int64_t shape[] = {batch, heads, length, dim};
  const auto table_batch = static_cast<std::size_t>(tables[0].shape[0]);
  Output out(shape, 4, x.dtype);
  {
    const Unlocked unlocked;
    tpk::rotary(x.data, tables[0].data, tables[1].data, out.data(), batch, length, heads, dim,
                table_batch, x.dtype);
  }
  return out.release();
}

}  // namespace tpk::short_way
