// What the files of the Python module share. Nothing here needs the interpreter: no call that may wait,
// copy or reduce holds its lock.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <stdexcept>

#include "isa.h"

namespace tpk {

namespace py = pybind11;

// What this module and the Python beside it agree on: names, arguments, results, and the descriptions of messages
// that both write. Raised with every change of it, together with the number in
// tp_kernels/comm/symmetric_memory.py, which refuses a module with another.
inline constexpr int kInterface = 1;

using Released = py::call_guard<py::gil_scoped_release>;
using Timeout = std::optional<double>;

inline void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

// The product for few rows, where this instruction set has one.
inline ProductFunction product_of(const Isa& isa, std::uint32_t dtype) {
  if (dtype >= kReducibleDtypes || isa.product[dtype] == nullptr) {
    throw std::invalid_argument(std::string("there is no product of this dtype for ") + isa.name);
  }
  return isa.product[dtype];
}

// Sets the Python error that stands for a C++ exception, outside of pybind11's own functions.
void set_python_error(std::exception_ptr pending);

// Tensors may have lost their memory.
inline void check_product(std::uint64_t x, std::uint64_t w, std::uint64_t x_count,
                          std::uint64_t w_count) {
  if ((x == 0 && x_count != 0) || (w == 0 && w_count != 0)) {
    throw std::invalid_argument("an operand of a product has no memory");
  }
}

void bind_slot(py::module_& module);
void bind_short(py::module_& module);
void bind_rings(py::module_& module);
void bind_dropout(py::module_& module);

}  // namespace tpk
