// dropout.h for Python.
#include "bindings.h"
#include "dropout.h"

namespace tpk {

void bind_dropout(py::module_& module) {
  module.def(
      "dropout",
      [](std::uint64_t x, std::uint64_t residual, std::uint64_t y, const std::vector<std::size_t>& sizes,
         const std::vector<std::size_t>& steps, std::uint64_t first, std::uint64_t key, std::uint32_t least,
         float scale, std::uint32_t dtype) {
        if (sizes.size() != steps.size()) throw std::invalid_argument("as many sizes as steps");
        const Dropout call{pointer(x),    pointer(residual), pointer(y), sizes.size(), sizes.data(),
                           steps.data(), first,             key,        least,        scale};
        dropout(select_isa(), call, static_cast<Dtype>(dtype));
      },
      py::arg("x"), py::arg("residual"), py::arg("y"), py::arg("sizes"), py::arg("steps"),
      py::arg("first"), py::arg("key"), py::arg("least"), py::arg("scale"), py::arg("dtype"),
      Released(), "Dropout of a dense array; see dropout.h. Addresses, of which residual may be 0.");
}

}  // namespace tpk
