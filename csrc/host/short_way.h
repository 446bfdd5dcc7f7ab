// The shortest way from a call in Python to the engine and back: functions that take tensors as they are
// and answer with new ones, or with None where the ordinary way has to be gone, which makes the same
// rounds and gives the same bits. They never wait or compute with the interpreter's lock.
//
// Why they exist: streaming a weight empties the caches that the interpreter's code and data were in. In
// decoding, what takes a tenth of a microsecond of Python in a loop takes several.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "bindings.h"
#include "slot_handle.h"

namespace tpk::short_way {

struct ShortWay {
  py::object keep;  // what `handle` lives in
  py::object fail;  // (failure, name of the function): raises what that means
  SlotHandle* handle;
  bool communication_thread;
  std::uint64_t short_rows;    // up to so many, a sum of products is one round
  std::uint64_t gather_first;  // up to so many, rows are gathered before their product
  std::array<std::uint64_t, kReducibleDtypes> few_rows;  // our product is faster than torch's
  std::uint32_t op_all_reduce, op_reduce_scatter, op_all_gather;  // of linear layers
  std::vector<std::byte> scratch;  // used in `exclusive` only
  std::array<std::uint64_t, 7> calls{};  // by place in `methods`: those that went this way

  // Whether the engine is used at all: `obstacle` in dispatch.py.
  bool holds(std::uint64_t width, Dtype dtype) {
    return width * size_of(dtype) * world() <= slot().capacity();
  }
  Slot& slot() { return handle->slot; }
  double timeout() { return slot().domain().timeout(); }
  const Isa& isa() { return slot().domain().isa(); }
  int world() { return slot().world(); }
  int rank() { return slot().rank(); }
};

// PyEval_SaveThread and back; pybind11's looks things up first.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() { PyEval_RestoreThread(state_); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

struct Decref {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Object = std::unique_ptr<PyObject, Decref>;

inline PyObject* none() { Py_RETURN_NONE; }

// Rows of the ranks when `total` are divided: split_sizes in comm/layout.py.
inline std::vector<std::uint64_t> split(std::uint64_t total, int world) {
  const std::uint64_t ranks = static_cast<std::uint64_t>(world);
  std::vector<std::uint64_t> sizes(ranks, total / ranks);
  for (std::uint64_t rank = 0; rank < total % ranks; ++rank) ++sizes[rank];
  return sizes;
}

// Rows of the ranks, of which this one has `mine`, for `total`, an int or None. False if that is wrong.
inline bool rows_of_ranks(ShortWay& way, std::uint64_t mine, PyObject* total,
                          std::vector<std::uint64_t>& counts) {
  if (total == Py_None) {
    counts.assign(way.world(), mine);
    return true;
  }
  const std::int64_t rows = PyLong_Check(total) ? PyLong_AsLongLong(total) : -1;
  if (PyErr_Occurred()) PyErr_Clear();
  if (rows < 0) return false;
  counts = split(static_cast<std::uint64_t>(rows), way.world());
  return counts[way.rank()] == mine;
}

inline void scale(std::vector<std::uint64_t>& counts, std::uint64_t row) {
  for (auto& count : counts) count *= row;
}

// Arguments; `out` may be None, and `x` of all_reduce; `rows`, of all ranks, may be None: all have as many.
// Exceptions become Python's errors.
PyObject* linear_all_reduce(ShortWay& way, PyObject* const* args);      // x, w, bias
PyObject* linear_reduce_scatter(ShortWay& way, PyObject* const* args);  // x, w, bias
PyObject* copy_linear(ShortWay& way, PyObject* const* args);            // x, weights, biases
PyObject* all_gather_linear(ShortWay& way, PyObject* const* args);      // x, weights, biases, rows
PyObject* all_reduce(ShortWay& way, PyObject* const* args);             // x, out
PyObject* reduce_scatter(ShortWay& way, PyObject* const* args);         // x, out
PyObject* all_gather(ShortWay& way, PyObject* const* args);             // x, rows, out

PyObject* rms_norm(PyObject* const* args);  // x [..., H], weight [H], epsilon -> [..., H]
PyObject* swiglu(PyObject* const* args);    // gate, up [...]
PyObject* rotary(PyObject* const* args);    // x [b, s, n, D], cos, sin [1 or b, s, D] -> [b, n, s, D]

}  // namespace tpk::short_way
