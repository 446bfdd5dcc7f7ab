// The table of the functions of short_way.h, and the collectives among them.
#include <algorithm>
#include <numeric>
#include <optional>

#include "collectives.h"
#include "short_way.h"
#include "tensor.h"

namespace tpk {
namespace short_way {
namespace {

// Where a collective of `x` puts its result: a tensor that was given, or a new one.
class Result {
 public:
  // `first` rows instead of those of x, if not negative. False if `given`, which is None or a tensor, cannot
  // hold the result or shares memory with x.
  bool prepare(PyObject* given, const TensorView& x, std::int64_t first = -1) {
    std::array<std::int64_t, kMostDims> shape;
    std::copy(x.shape, x.shape + x.dims, shape.begin());
    if (first >= 0) shape[0] = first;
    if (given == Py_None) {
      made_.emplace(shape.data(), x.dims, x.dtype);
      data_ = made_->data();
      return true;
    }
    TensorView out;
    if (!view_of(given, out) || !out.contiguous() || out.dtype != x.dtype || out.dims != x.dims ||
        !std::equal(out.shape, out.shape + out.dims, shape.begin())) {
      return false;
    }
    const std::uint64_t size = size_of(x.dtype);
    if (out.data < x.data + x.count() * size && x.data < out.data + out.count() * size) return false;
    given_ = given;
    data_ = out.data;
    return true;
  }

  std::byte* data() const { return data_; }

  PyObject* release() {
    if (made_) return made_->release();
    Py_INCREF(given_);
    return given_;
  }

 private:
  std::optional<Output> made_;
  PyObject* given_ = nullptr;
  std::byte* data_ = nullptr;
};

}  // namespace

PyObject* all_reduce(ShortWay& way, PyObject* const* args) {
  TensorView x;
  if (!view_of(args[0], x) || !x.contiguous()) return none();
  const bool in_place = args[1] == args[0];
  Result out;
  if (!in_place && !out.prepare(args[1], x)) return none();
  {
    const Unlocked unlocked;
    way.slot().exclusive("all_reduce", [&] {
      tpk::all_reduce(way.slot(), x.data, in_place ? x.data : out.data(), x.count(), x.dtype,
                      op_all_reduce, way.timeout());
    });
  }
  if (!in_place) return out.release();
  Py_INCREF(args[0]);
  return args[0];
}

PyObject* reduce_scatter(ShortWay& way, PyObject* const* args) {
  TensorView x;
  if (!view_of(args[0], x) || !x.contiguous() || x.dims == 0) return none();
  auto counts = split(x.count(0, 1), way.world());
  Result out;
  if (!out.prepare(args[1], x, static_cast<std::int64_t>(counts[way.rank()]))) return none();
  scale(counts, x.count(1, x.dims));
  {
    const Unlocked unlocked;
    way.slot().exclusive("reduce_scatter", [&] {
      tpk::reduce_scatter(way.slot(), x.data, out.data(), counts, x.dtype, op_reduce_scatter,
                          way.timeout());
    });
  }
  return out.release();
}

PyObject* all_gather(ShortWay& way, PyObject* const* args) {
  TensorView x;
  if (!view_of(args[0], x) || !x.contiguous() || x.dims == 0) return none();
  std::vector<std::uint64_t> counts;
  if (!rows_of_ranks(way, x.count(0, 1), args[1], counts)) return none();
  const std::uint64_t all = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
  Result out;
  if (!out.prepare(args[2], x, static_cast<std::int64_t>(all))) return none();
  scale(counts, x.count(1, x.dims));
  {
    const Unlocked unlocked;
    way.slot().exclusive("all_gather", [&] {
      tpk::all_gather(way.slot(), x.data, out.data(), counts, x.dtype, op_all_gather,
                      way.timeout());
    });
  }
  return out.release();
}

}  // namespace short_way

namespace {

using short_way::none;
using short_way::ShortWay;

constexpr char kCapsule[] = "tp_kernels._host.short";

using Function = PyObject* (*)(ShortWay&, PyObject* const*);

// Makes of the Python error that is set what it means in the group.
PyObject* failed(const ShortWay& way, std::size_t place);

template <Function function, Py_ssize_t arguments, std::size_t place>
PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  auto* const way = static_cast<ShortWay*>(PyCapsule_GetPointer(self, kCapsule));
  if (way == nullptr) return nullptr;
  if (count != arguments) {
    return PyErr_Format(PyExc_TypeError, "%zd arguments for a function of %zd", count, arguments);
  }
  try {
    PyObject* const result = function(*way, args);
    way->calls[place] += result != nullptr && result != Py_None;
    if (result != nullptr) return result;
  } catch (...) {
    set_python_error(std::current_exception());
  }
  return failed(*way, place);
}

template <Function function, Py_ssize_t arguments, std::size_t place>
PyMethodDef method(const char* name) {
  PyObject* (*const pointer)(PyObject*, PyObject* const*, Py_ssize_t) =
      call<function, arguments, place>;
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(pointer)),
          METH_FASTCALL, nullptr};
}

std::array<PyMethodDef, 7> methods = {
    method<short_way::linear_all_reduce, 3, 0>("linear_all_reduce"),
    method<short_way::linear_reduce_scatter, 3, 1>("linear_reduce_scatter"),
    method<short_way::all_gather_linear, 4, 2>("all_gather_linear"),
    method<short_way::copy_linear, 3, 3>("copy_linear"),
    method<short_way::all_reduce, 2, 4>("all_reduce"),
    method<short_way::reduce_scatter, 2, 5>("reduce_scatter"),
    method<short_way::all_gather, 3, 6>("all_gather"),
};

PyObject* failed(const ShortWay& way, std::size_t place) {
  try {
    const py::error_already_set failure;
    way.fail(failure.value(), methods[place].ml_name);
    PyErr_SetObject(failure.type().ptr(), failure.value().ptr());
  } catch (py::error_already_set& error) {
    error.restore();
  }
  return nullptr;
}

// The element-wise ones.
template <PyObject* (*function)(PyObject* const*), Py_ssize_t arguments>
PyObject* call_elementwise(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != arguments) {
    return PyErr_Format(PyExc_TypeError, "%zd arguments for a function of %zd", count, arguments);
  }
  try {
    return torch().tensor == nullptr ? none() : function(args);
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

template <PyObject* (*function)(PyObject* const*), Py_ssize_t arguments>
PyMethodDef elementwise_method(const char* name) {
  PyObject* (*const pointer)(PyObject*, PyObject* const*, Py_ssize_t) =
      call_elementwise<function, arguments>;
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(pointer)),
          METH_FASTCALL, nullptr};
}

PyMethodDef elementwise[] = {
    elementwise_method<short_way::rms_norm, 3>("rms_norm"),
    elementwise_method<short_way::swiglu, 2>("swiglu"),
    elementwise_method<short_way::rotary, 3>("rotary"),
};

}  // namespace

void bind_short(py::module_& module) {
  module.def("set_torch", [](const py::dict& functions) { return set_torch(functions.ptr()); },
             py::arg("functions"),
             "What the short way asks of torch, by name; whether it is possible with this torch.");
  for (PyMethodDef& method : elementwise) {
    module.attr(method.ml_name) =
        py::reinterpret_steal<py::object>(PyCFunction_New(&method, nullptr));
  }
  module.def(
      "short_way",
      [](const py::object& slot, const py::object& fail, bool communication_thread,
         std::uint64_t short_rows, std::uint64_t gather_first,
         std::array<std::uint64_t, kReducibleDtypes> few_rows, std::array<std::uint32_t, 3> ops) {
        if (torch().tensor == nullptr) throw std::logic_error("short_way: call set_torch first");
        auto way = std::make_shared<ShortWay>(
            ShortWay{slot, fail, py::cast<SlotHandle*>(slot), communication_thread, short_rows,
                     gather_first, few_rows, ops[0], ops[1], ops[2], {}});
        auto* const held = new std::shared_ptr<ShortWay>(way);
        const py::capsule self(way.get(), kCapsule, [](PyObject* capsule) {
          delete static_cast<std::shared_ptr<ShortWay>*>(PyCapsule_GetContext(capsule));
        });
        PyCapsule_SetContext(self.ptr(), held);
        py::dict functions;
        for (PyMethodDef& method : methods) {
          functions[method.ml_name] =
              py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
        }
        const auto counts = [way](bool reset) {
          py::dict result;
          for (std::size_t i = 0; i < methods.size(); ++i) {
            result[methods[i].ml_name] = way->calls[i];
          }
          if (reset) way->calls = {};
          return result;
        };
        return py::make_tuple(functions, py::cpp_function(counts));
      },
      py::arg("slot"), py::arg("fail"), py::arg("communication_thread"), py::arg("short_rows"),
      py::arg("gather_first"), py::arg("few_rows"), py::arg("ops"),
      "The functions of short_way.h on this slot, by name, and counts(reset): calls that went this way. "
      "ops: codes of linear_all_reduce, linear_reduce_scatter and all_gather_linear.");
}

}  // namespace tpk
