// The shortest way from a call in Python to the engine and back: functions that take tensors as they are
// and answer with new ones, or with None where the ordinary way has to be gone, which makes the same
// rounds and gives the same bits. They never wait or compute with the interpreter's lock.
//
// Why they exist: streaming a weight empties the caches that the interpreter's code and data were in. In
// decoding, what takes a tenth of a microsecond of Python in a loop takes several.
#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "bindings.h"
#include "collectives.h"
#include "slot_handle.h"
#include "streaming.h"
#include "tensor.h"

namespace tpk {
namespace {

constexpr char kCapsule[] = "tp_kernels._host.short";

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

PyObject* none() { Py_RETURN_NONE; }

// x [..., K], W [N, K] with rows anywhere, bias [N] or none, all of one dtype.
struct Layer {
  TensorView x, w;
  const std::byte* bias = nullptr;
  std::uint64_t rows, depth, columns;

  // False if this is not a layer for the short way; the ordinary one knows why.
  bool read(PyObject* x_object, PyObject* w_object, PyObject* bias_object) {
    if (!view_of(x_object, x) || !view_of(w_object, w)) return false;
    if (x.dims < 1 || w.dims != 2 || w.dtype != x.dtype || !x.contiguous()) return false;
    depth = static_cast<std::uint64_t>(x.shape[x.dims - 1]);
    columns = static_cast<std::uint64_t>(w.shape[0]);
    rows = x.count(0, x.dims - 1);
    if (w.shape[1] != x.shape[x.dims - 1] || depth == 0 || columns == 0) return false;
    if (w.strides[1] != 1 || w.strides[0] < w.shape[1]) return false;
    if (bias_object == Py_None) return true;
    TensorView b;
    if (!view_of(bias_object, b) || b.dims != 1 || b.dtype != x.dtype || !b.contiguous() ||
        b.shape[0] != w.shape[0]) {
      return false;
    }
    bias = b.data;
    return true;
  }

  std::uint64_t size() const { return size_of(x.dtype); }
  std::size_t ldw() const { return static_cast<std::size_t>(w.strides[0]); }
  std::uint32_t code() const { return static_cast<std::uint32_t>(x.dtype); }

  // As the output has it: [*, columns], with the first dimension replaced if `first` is not negative.
  std::array<std::int64_t, kMostDims + 1> shape(std::int64_t first, int& dims) const {
    std::array<std::int64_t, kMostDims + 1> result{};
    dims = x.dims;
    std::copy(x.shape, x.shape + x.dims, result.begin());
    if (first >= 0) {
      dims = std::max(dims, 2);  // a vector is one row
      result[0] = first;
    }
    result[dims - 1] = w.shape[0];
    return result;
  }
  Output output(std::int64_t first = -1) const {
    int dims;
    const auto sizes = shape(first, dims);
    return Output(sizes.data(), dims, x.dtype);
  }
};

// Rows of the ranks when `total` are divided: split_sizes in comm/layout.py.
std::vector<std::uint64_t> split(std::uint64_t total, int world) {
  const std::uint64_t ranks = static_cast<std::uint64_t>(world);
  std::vector<std::uint64_t> sizes(ranks, total / ranks);
  for (std::uint64_t rank = 0; rank < total % ranks; ++rank) ++sizes[rank];
  return sizes;
}

void scale(std::vector<std::uint64_t>& counts, std::uint64_t row) {
  for (auto& count : counts) count *= row;
}

// Our product, if it is the faster one here; null: torch's.
ProductFunction product_for(ShortWay& way, std::uint64_t rows, Dtype dtype) {
  const auto code = static_cast<std::size_t>(dtype);
  if (rows > way.few_rows[code]) return nullptr;
  const ProductFunction product = way.isa().product[code];
  if (product == nullptr) return nullptr;
  const Object threads(PyObject_CallNoArgs(torch().num_threads));
  if (!threads) {
    PyErr_Clear();
    return nullptr;
  }
  return PyLong_AsLong(threads.get()) == 1 ? product : nullptr;
}

// torch.nn.functional.linear; `view` is of the result, which is contiguous.
Object torch_linear(PyObject* x, PyObject* w, PyObject* bias, TensorView& view) {
  PyObject* const args[] = {x, w, bias};
  Object y(PyObject_Vectorcall(torch().linear, args, bias == Py_None ? 2 : 3, nullptr));
  if (!y) throw py::error_already_set();
  if (!view_of(y.get(), view) || !view.contiguous()) {
    throw std::runtime_error("torch.nn.functional.linear gave something else than a new tensor");
  }
  return y;
}

// (x, w, bias) -> all_reduce(x w^T) + bias
PyObject* linear_all_reduce(ShortWay& way, PyObject* const* args) {
  Layer layer;
  if (!layer.read(args[0], args[1], args[2]) || layer.rows == 0) return none();
  if (!way.holds(layer.columns, layer.x.dtype)) return none();
  const std::uint64_t count = layer.rows * layer.columns;
  // As all ranks see it.
  const bool one_round =
      layer.rows <= way.short_rows && count * layer.size() <= way.slot().capacity();
  if (!one_round && way.communication_thread) return none();
  if (!unobserved(args, 3)) return none();

  const Bias bias{layer.bias, layer.columns};
  const Descriptor descriptor{way.op_all_reduce, layer.code(),
                              {static_cast<std::int64_t>(layer.rows),
                               static_cast<std::int64_t>(layer.columns), 0}};
  Slot& slot = way.slot();
  // As this rank sees it.
  if (const auto product = one_round ? product_for(way, layer.rows, layer.x.dtype) : nullptr) {
    Output out = layer.output();
    {
      const Unlocked unlocked;
      slot.exclusive("linear_all_reduce", [&] {
        const std::uint32_t index = slot.begin(way.timeout());
        product(layer.x.data, layer.depth, layer.w.data, layer.ldw(), nullptr,
                slot.buffer(way.rank(), index), layer.rows, layer.columns, layer.depth);
        complete(slot, descriptor, out.data(), count, bias, way.timeout());
      });
    }
    return out.release();
  }
  TensorView y;
  Object result = torch_linear(args[0], args[1], Py_None, y);
  {
    const Unlocked unlocked;
    slot.exclusive("linear_all_reduce", [&] {
      if (one_round) {
        const std::uint32_t index = slot.begin(way.timeout());
        copy_bytes(slot.buffer(way.rank(), index), y.data, count * layer.size());
        complete(slot, descriptor, y.data, count, bias, way.timeout());
      } else {
        tpk::all_reduce(slot, y.data, y.data, count, layer.x.dtype, way.op_all_reduce, way.timeout(),
                   Shots::automatic, bias);
      }
    });
  }
  return result.release();
}

// (x, w, bias) -> reduce_scatter(x w^T) + bias
PyObject* linear_reduce_scatter(ShortWay& way, PyObject* const* args) {
  Layer layer;
  if (!layer.read(args[0], args[1], args[2]) || layer.rows == 0) return none();
  if (!way.holds(layer.columns, layer.x.dtype)) return none();
  if (layer.rows > way.short_rows && way.communication_thread) return none();
  if (!unobserved(args, 3)) return none();

  const bool vector = layer.x.dims == 1;
  auto counts = split(vector ? 1 : layer.x.count(0, 1), way.world());
  Output out = layer.output(static_cast<std::int64_t>(counts[way.rank()]));
  scale(counts, (vector ? 1 : layer.x.count(1, layer.x.dims - 1)) * layer.columns);

  Slot& slot = way.slot();
  const auto scatter = [&](const void* whole) {
    tpk::reduce_scatter(slot, whole, out.data(), counts, layer.x.dtype, way.op_reduce_scatter,
                   way.timeout(), {layer.bias, layer.columns});
  };
  if (const auto product = product_for(way, layer.rows, layer.x.dtype)) {
    const Unlocked unlocked;
    slot.exclusive("linear_reduce_scatter", [&] {
      way.scratch.resize(
          std::max(way.scratch.size(), layer.rows * layer.columns * layer.size()));
      product(layer.x.data, layer.depth, layer.w.data, layer.ldw(), nullptr, way.scratch.data(),
              layer.rows, layer.columns, layer.depth);
      scatter(way.scratch.data());
    });
  } else {
    TensorView y;
    const Object whole = torch_linear(args[0], args[1], Py_None, y);
    const Unlocked unlocked;
    slot.exclusive("linear_reduce_scatter", [&] { scatter(y.data); });
  }
  return out.release();
}

// Weights and biases as the ops take them: a tensor, or several. Items are borrowed.
struct Weights {
  bool single = false;
  std::vector<PyObject*> weights, biases;

  bool read(PyObject* given, PyObject* given_biases) {
    if (PyList_Check(given) || PyTuple_Check(given)) {
      PyObject** const items = PySequence_Fast_ITEMS(given);
      weights.assign(items, items + PySequence_Fast_GET_SIZE(given));
    } else {
      single = true;
      weights.assign(1, given);
    }
    if (given_biases == Py_None) {
      biases.assign(weights.size(), Py_None);
    } else if (PyList_Check(given_biases) || PyTuple_Check(given_biases)) {
      PyObject** const items = PySequence_Fast_ITEMS(given_biases);
      biases.assign(items, items + PySequence_Fast_GET_SIZE(given_biases));
      // Some with and some without: the ordinary way fills in zeros.
      const auto missing = std::count(biases.begin(), biases.end(), Py_None);
      if (missing != 0 && missing != static_cast<std::ptrdiff_t>(biases.size())) return false;
    } else {
      biases.assign(1, given_biases);
    }
    return !weights.empty() && weights.size() == biases.size();
  }

  bool unobserved_with(PyObject* x) const {
    std::vector<PyObject*> all = weights;
    all.insert(all.end(), biases.begin(), biases.end());
    all.push_back(x);
    return unobserved(all.data(), all.size());
  }
};

// The outputs of several layers as the op returns them: a tensor, or a tuple.
PyObject* answer(bool single, std::vector<Object>& outs) {
  if (single) return outs[0].release();
  PyObject* const tuple = PyTuple_New(static_cast<Py_ssize_t>(outs.size()));
  if (tuple == nullptr) throw py::error_already_set();
  for (std::size_t i = 0; i < outs.size(); ++i) {
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), outs[i].release());
  }
  return tuple;
}

Object tensor_of(Output& out) {
  Object tensor(out.release());
  if (!tensor) throw py::error_already_set();
  return tensor;
}

// (x, weights, biases) -> x w_i^T + bias_i
PyObject* copy_linear(ShortWay& way, PyObject* const* args) {
  Weights several;
  if (!several.read(args[1], args[2])) return none();
  std::vector<Layer> layers(several.weights.size());
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (!layers[i].read(args[0], several.weights[i], several.biases[i])) return none();
  }
  if (layers[0].rows == 0 || !several.unobserved_with(args[0])) return none();
  const auto product = product_for(way, layers[0].rows, layers[0].x.dtype);
  std::vector<Object> outs;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const Layer& layer = layers[i];
    if (product == nullptr) {
      TensorView y;
      outs.push_back(torch_linear(args[0], several.weights[i], several.biases[i], y));
      continue;
    }
    Output out = layer.output();
    {
      const Unlocked unlocked;
      product(layer.x.data, layer.depth, layer.w.data, layer.ldw(), layer.bias, out.data(),
              layer.rows, layer.columns, layer.depth);
    }
    outs.push_back(tensor_of(out));
  }
  return answer(several.single, outs);
}

// (x, weights, biases, rows of all ranks or None) -> all_gather(x) w_i^T + bias_i
PyObject* all_gather_linear(ShortWay& way, PyObject* const* args) {
  Weights several;
  if (!several.read(args[1], args[2])) return none();
  std::vector<Layer> layers(several.weights.size());
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (!layers[i].read(args[0], several.weights[i], several.biases[i])) return none();
  }
  const Layer& first = layers[0];
  const bool vector = first.x.dims == 1;
  const std::uint64_t mine = vector ? 1 : first.x.count(0, 1);
  const std::uint64_t inner = vector ? 1 : first.x.count(1, first.x.dims - 1);
  std::vector<std::uint64_t> counts(way.world(), mine);
  if (args[3] != Py_None) {
    const std::int64_t total = PyLong_Check(args[3]) ? PyLong_AsLongLong(args[3]) : -1;
    if (PyErr_Occurred()) PyErr_Clear();
    if (total < 0) return none();
    counts = split(static_cast<std::uint64_t>(total), way.world());
    if (counts[way.rank()] != mine) return none();
  }
  std::uint64_t all = 0;
  for (const std::uint64_t count : counts) all += count;
  const std::uint64_t rows = all * inner;
  if (rows == 0 || !way.holds(first.depth, first.x.dtype)) return none();
  if (rows > way.gather_first && way.communication_thread) return none();
  if (!several.unobserved_with(args[0])) return none();

  scale(counts, inner * first.depth);
  Slot& slot = way.slot();
  const auto gather = [&](void* whole) {
    tpk::all_gather(slot, first.x.data, whole, counts, first.x.dtype, way.op_all_gather, way.timeout());
  };
  std::vector<Object> outs;
  if (const auto product = product_for(way, rows, first.x.dtype)) {
    std::vector<Output> results;
    for (const Layer& layer : layers) {
      results.push_back(layer.output(static_cast<std::int64_t>(all)));
    }
    {
      const Unlocked unlocked;
      slot.exclusive("all_gather_linear", [&] {
        way.scratch.resize(std::max(way.scratch.size(), rows * first.depth * first.size()));
        gather(way.scratch.data());
        for (std::size_t i = 0; i < layers.size(); ++i) {
          const Layer& layer = layers[i];
          product(way.scratch.data(), layer.depth, layer.w.data, layer.ldw(), layer.bias,
                  results[i].data(), rows, layer.columns, layer.depth);
        }
      });
    }
    for (Output& result : results) outs.push_back(tensor_of(result));
  } else {
    std::array<std::int64_t, kMostDims> sizes{static_cast<std::int64_t>(all)};
    if (!vector) std::copy(first.x.shape + 1, first.x.shape + first.x.dims, sizes.begin() + 1);
    if (vector) sizes[1] = first.x.shape[0];
    Output gathered(sizes.data(), std::max(first.x.dims, 2), first.x.dtype);
    {
      const Unlocked unlocked;
      slot.exclusive("all_gather_linear", [&] { gather(gathered.data()); });
    }
    const Object whole = tensor_of(gathered);
    for (std::size_t i = 0; i < layers.size(); ++i) {
      TensorView y;
      outs.push_back(torch_linear(whole.get(), several.weights[i], several.biases[i], y));
    }
  }
  return answer(several.single, outs);
}

// A new tensor like `x`, but with `first` rows if that is not negative.
Output like(const TensorView& x, std::int64_t first = -1) {
  std::array<std::int64_t, kMostDims> sizes;
  std::copy(x.shape, x.shape + x.dims, sizes.begin());
  if (first >= 0) sizes[0] = first;
  return Output(sizes.data(), x.dims, x.dtype);
}

// (x, out: None or x) -> sum over ranks
PyObject* all_reduce(ShortWay& way, PyObject* const* args) {
  TensorView x;
  const bool in_place = args[1] == args[0];
  if (!in_place && args[1] != Py_None) return none();
  if (!view_of(args[0], x) || !x.contiguous()) return none();
  Slot& slot = way.slot();
  const auto run = [&](void* out) {
    const Unlocked unlocked;
    slot.exclusive("all_reduce", [&] {
      tpk::all_reduce(slot, x.data, out, x.count(), x.dtype, op_all_reduce, way.timeout());
    });
  };
  if (in_place) {
    run(x.data);
    Py_INCREF(args[0]);
    return args[0];
  }
  Output out = like(x);
  run(out.data());
  return out.release();
}

// (x) -> this rank's rows of the sum
PyObject* reduce_scatter(ShortWay& way, PyObject* const* args) {
  TensorView x;
  if (!view_of(args[0], x) || !x.contiguous() || x.dims == 0) return none();
  auto counts = split(x.count(0, 1), way.world());
  Output out = like(x, static_cast<std::int64_t>(counts[way.rank()]));
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

// (x) -> the rows of all ranks, who have equally many
PyObject* all_gather(ShortWay& way, PyObject* const* args) {
  TensorView x;
  if (!view_of(args[0], x) || !x.contiguous() || x.dims == 0) return none();
  Output out = like(x, x.shape[0] * way.world());
  const std::vector<std::uint64_t> counts(way.world(), x.count());
  {
    const Unlocked unlocked;
    way.slot().exclusive("all_gather", [&] {
      tpk::all_gather(way.slot(), x.data, out.data(), counts, x.dtype, op_all_gather, way.timeout());
    });
  }
  return out.release();
}

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
    method<linear_all_reduce, 3, 0>("linear_all_reduce"),
    method<linear_reduce_scatter, 3, 1>("linear_reduce_scatter"),
    method<all_gather_linear, 4, 2>("all_gather_linear"),
    method<copy_linear, 3, 3>("copy_linear"),
    method<all_reduce, 2, 4>("all_reduce"),
    method<reduce_scatter, 1, 5>("reduce_scatter"),
    method<all_gather, 1, 6>("all_gather"),
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

}  // namespace

void bind_short(py::module_& module) {
  module.def("set_torch", [](const py::dict& functions) { return set_torch(functions.ptr()); },
             py::arg("functions"),
             "What the short way asks of torch, by name; whether it is possible with this torch.");
  module.def(
      "short_way",
      [](const py::object& slot, const py::object& fail, bool communication_thread, std::uint64_t short_rows,
         std::uint64_t gather_first, std::array<std::uint64_t, kReducibleDtypes> few_rows,
         std::array<std::uint32_t, 3> ops) {
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
      "The functions of this file on this slot, by name, and counts(reset): calls that went this way. "
      "ops: codes of linear_all_reduce, linear_reduce_scatter and all_gather_linear.");
}

}  // namespace tpk
