// Linear layers by the short way.
#include <algorithm>

#include "collectives.h"
#include "short_way.h"
#include "streaming.h"
#include "tensor.h"

namespace tpk::short_way {
namespace {

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

// Weights and biases as the ops take them: a tensor, or several. Owned, because another thread may change
// a list while this one waits without the lock.
struct Weights {
  bool single = false;
  std::vector<PyObject*> weights, biases;

  Weights() = default;
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;
  ~Weights() {
    for (PyObject* object : weights) Py_DECREF(object);
    for (PyObject* object : biases) Py_DECREF(object);
  }

  bool read(PyObject* given, PyObject* given_biases) {
    const bool valid = borrow(given, given_biases);
    for (PyObject* object : weights) Py_INCREF(object);
    for (PyObject* object : biases) Py_INCREF(object);
    return valid;
  }

  bool unobserved_with(PyObject* x) const {
    std::vector<PyObject*> all = weights;
    all.insert(all.end(), biases.begin(), biases.end());
    all.push_back(x);
    return unobserved(all.data(), all.size());
  }

 private:
  bool borrow(PyObject* given, PyObject* given_biases) {
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

}  // namespace

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
        tpk::all_reduce(slot, y.data, y.data, count, layer.x.dtype, way.op_all_reduce,
                        way.timeout(), Shots::automatic, bias,
                        static_cast<std::int64_t>(layer.columns));
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
  std::vector<std::uint64_t> counts;
  if (!rows_of_ranks(way, mine, args[3], counts)) return none();
  std::uint64_t all = 0;
  for (const std::uint64_t count : counts) all += count;
  const std::uint64_t rows = all * inner;
  if (rows == 0 || !way.holds(first.depth, first.x.dtype)) return none();
  if (rows > way.gather_first && way.communication_thread) return none();
  if (!several.unobserved_with(args[0])) return none();

  scale(counts, inner * first.depth);
  Slot& slot = way.slot();
  const auto gather = [&](void* whole) {
    tpk::all_gather(slot, first.x.data, whole, counts, first.x.dtype, way.op_all_gather,
                    way.timeout());
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

}  // namespace tpk::short_way
