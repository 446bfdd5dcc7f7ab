// Tensors of torch in C++ without its headers or its version: through the C exchange API of DLPack 1.3
// (https://dmlc.github.io/dlpack/latest/), a table of functions that torch.Tensor carries.
//
// Everything here needs the interpreter's lock, except writing to an `Output`.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "isa.h"

namespace tpk {

inline constexpr int kMostDims = 8;

// A CPU tensor of a dtype that can be reduced; valid while its Python object is.
struct TensorView {
  std::byte* data;
  Dtype dtype;
  int dims;
  const std::int64_t* shape;
  const std::int64_t* strides;  // in elements

  std::uint64_t count(int first, int last) const;  // elements of dimensions [first, last)
  std::uint64_t count() const { return count(0, dims); }
  bool contiguous() const;
};

// Whether a tensor requires grad; nothing if it does not say.
std::optional<bool> requires_grad_of(PyObject* tensor);
bool set_requires_grad(PyObject* tensor);  // false with a Python error set

// A result: memory that becomes a new tensor when it is written.
class Output {
 public:
  Output(const std::int64_t* shape, int dims, Dtype dtype);  // uninitialised; may throw bad_alloc
  std::byte* data() const;
  PyObject* release();  // the tensor, or null with a Python error set

 private:
  struct Block;
  struct Free {
    void operator()(Block* block) const;
  };
  std::unique_ptr<Block, Free> block_;
};

// What is asked of torch. `set_torch` fills it once, when the package is imported.
struct Torch {
  PyTypeObject* tensor = nullptr;
  PyTypeObject* parameter = nullptr;
  // Functions without arguments: is something to see a call that is not in its arguments?
  PyObject* transforms_active = nullptr;
  PyObject* dispatch_modes = nullptr;  // how many
  PyObject* tracing_state = nullptr;   // of torch.jit.trace
  PyObject* autocast_enabled = nullptr;
  PyObject* grad_enabled = nullptr;
  PyObject* forward_ad = nullptr;  // the module torch.autograd.forward_ad
  PyObject* num_threads = nullptr;
  PyObject* is_neg = nullptr;  // torch.Tensor.is_neg
  PyObject* linear = nullptr;  // torch.nn.functional.linear
};
const Torch& torch();
// Takes functions by the names above; false if this torch has no such API.
bool set_torch(PyObject* functions);

// Fills `view` unless `object` is something else than a plain CPU tensor of a dtype for reductions.
bool view_of(PyObject* object, TensorView& view);

// Whether nothing but the results of a call on these tensors matters: no gradient, mode or transform.
// Objects may be None.
bool unobserved(PyObject* const* objects, std::size_t count);

}  // namespace tpk
