#include "tensor.h"

#include <new>

#include "large_blocks.h"
#include "slot.h"

namespace tpk {
namespace {

// The binary interface of DLPack 1.3.
struct DlVersion {
  std::uint32_t major, minor;
};
struct DlTensor {
  void* data;
  std::int32_t device_type, device_id;
  std::int32_t ndim;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
struct DlManagedTensor {
  DlVersion version;
  void* manager_context;
  void (*deleter)(DlManagedTensor* self);
  std::uint64_t flags;
  DlTensor tensor;
};
struct DlExchangeApi {
  DlVersion version;
  DlExchangeApi* previous;
  void* allocate;
  void* managed_from_object;
  int (*managed_to_object)(DlManagedTensor* tensor, void** object);
  int (*view_from_object)(void* object, DlTensor* out);
  void* current_stream;
};
constexpr std::int32_t kCpu = 1;
constexpr std::uint8_t kFloat = 2, kBfloat = 4;
constexpr std::size_t kAlignment = 64;

Torch functions;
const DlExchangeApi* api = nullptr;
PyObject* requires_grad = nullptr;  // the names
PyObject* current_level = nullptr;

bool truth_of(PyObject* answer, bool on_error) {  // takes the reference
  if (answer == nullptr) {
    PyErr_Clear();
    return on_error;
  }
  const int truth = PyObject_IsTrue(answer);
  Py_DECREF(answer);
  return truth < 0 ? on_error : truth != 0;
}

bool truth(PyObject* function, bool on_error) {
  return truth_of(PyObject_CallNoArgs(function), on_error);
}

}  // namespace

const Torch& torch() { return functions; }

bool set_torch(PyObject* given) {
  const auto function = [given](const char* name) {
    PyObject* const found = PyDict_GetItemString(given, name);  // borrowed
    Py_XINCREF(found);
    return found;
  };
  Torch all;
  all.tensor = reinterpret_cast<PyTypeObject*>(function("tensor"));
  all.parameter = reinterpret_cast<PyTypeObject*>(function("parameter"));
  all.transforms_active = function("transforms_active");
  all.dispatch_modes = function("dispatch_modes");
  all.tracing_state = function("tracing_state");
  all.is_neg = function("is_neg");
  all.autocast_enabled = function("autocast_enabled");
  all.grad_enabled = function("grad_enabled");
  all.forward_ad = function("forward_ad");
  all.num_threads = function("num_threads");
  all.linear = function("linear");
  if (!all.tensor || !all.parameter || !all.transforms_active || !all.dispatch_modes ||
      !all.tracing_state || !all.is_neg || !all.autocast_enabled || !all.forward_ad ||
      !all.grad_enabled || !all.num_threads || !all.linear) {
    return false;
  }
  PyObject* capsule =
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(all.tensor), "__dlpack_c_exchange_api__");
  const void* table =
      capsule == nullptr ? nullptr : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_XDECREF(capsule);
  PyErr_Clear();
  const auto* found = static_cast<const DlExchangeApi*>(table);
  if (found == nullptr || found->version.major != 1 || found->version.minor < 3 ||
      found->view_from_object == nullptr) {
    return false;
  }
  requires_grad = PyUnicode_InternFromString("requires_grad");
  current_level = PyUnicode_InternFromString("_current_level");
  functions = all;
  api = found;
  return true;
}

std::uint64_t TensorView::count(int first, int last) const {
  std::uint64_t result = 1;
  for (int dim = first; dim < last; ++dim) result *= static_cast<std::uint64_t>(shape[dim]);
  return result;
}

bool TensorView::contiguous() const {
  std::int64_t expected = 1;
  for (int dim = dims - 1; dim >= 0; --dim) {
    if (shape[dim] != 1 && strides[dim] != expected) return false;
    expected *= shape[dim];
  }
  return true;
}

bool view_of(PyObject* object, TensorView& view) {
  // Subclasses may mean something else by their elements.
  PyTypeObject* const type = Py_TYPE(object);
  if (type != functions.tensor && type != functions.parameter) return false;
  DlTensor found;
  if (api->view_from_object(object, &found) != 0) {
    PyErr_Clear();
    return false;
  }
  if (found.device_type != kCpu || found.lanes != 1 || found.ndim > kMostDims) return false;
  if (found.code == kFloat && found.bits == 32) {
    view.dtype = Dtype::float32;
  } else if (found.code == kBfloat && found.bits == 16) {
    view.dtype = Dtype::bfloat16;
  } else if (found.code == kFloat && found.bits == 16) {
    view.dtype = Dtype::float16;
  } else {
    return false;
  }
  if (truth_of(PyObject_CallOneArg(functions.is_neg, object), true)) return false;
  view.data = static_cast<std::byte*>(found.data) + found.byte_offset;
  view.dims = found.ndim;
  view.shape = found.shape;
  view.strides = found.strides;
  return found.data != nullptr || view.count() == 0;  // memory may have been given back
}

std::optional<bool> requires_grad_of(PyObject* tensor) {
  PyObject* const answer = PyObject_GetAttr(tensor, requires_grad);
  if (answer == nullptr) PyErr_Clear();
  Py_XDECREF(answer);  // True and False stay
  if (answer != Py_True && answer != Py_False) return std::nullopt;
  return answer == Py_True;
}

bool set_requires_grad(PyObject* tensor) {
  return PyObject_SetAttr(tensor, requires_grad, Py_True) == 0;
}

bool unobserved(PyObject* const* objects, std::size_t count) {
  if (truth(functions.transforms_active, true) || truth(functions.dispatch_modes, true) ||
      truth(functions.tracing_state, true) || truth(functions.autocast_enabled, true)) {
    return false;
  }
  PyObject* const level = PyObject_GetAttr(functions.forward_ad, current_level);
  const long depth = level == nullptr ? 0 : PyLong_AsLong(level);
  Py_XDECREF(level);
  if (PyErr_Occurred()) PyErr_Clear();
  if (depth >= 0) return false;  // tensors may carry tangents
  if (!truth(functions.grad_enabled, true)) return true;
  for (std::size_t i = 0; i < count; ++i) {
    if (objects[i] == Py_None) continue;
    PyObject* const answer = PyObject_GetAttr(objects[i], requires_grad);
    if (answer == nullptr) PyErr_Clear();
    const bool no = answer == Py_False;
    Py_XDECREF(answer);
    if (!no) return false;
  }
  return true;
}

// One allocation: what torch is told, and behind it the elements.
struct Output::Block {
  DlManagedTensor managed;
  std::size_t bytes;  // of the allocation
  std::int64_t shape[kMostDims], strides[kMostDims];

  static constexpr std::size_t header() {
    return (sizeof(Block) + kAlignment - 1) / kAlignment * kAlignment;
  }
};

void Output::Free::operator()(Block* block) const {
  LargeBlocks::instance().give(block, block->bytes);
}

Output::Output(const std::int64_t* shape, int dims, Dtype dtype) {
  std::size_t nbytes = size_of(dtype);
  for (int dim = 0; dim < dims; ++dim) nbytes *= static_cast<std::size_t>(shape[dim]);
  std::size_t bytes = Block::header() + nbytes;
  void* const memory = LargeBlocks::instance().take(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  block_.reset(new (memory) Block);
  Block& block = *block_;
  block.bytes = bytes;
  std::int64_t stride = 1;
  for (int dim = dims - 1; dim >= 0; --dim) {
    block.shape[dim] = shape[dim];
    block.strides[dim] = stride;
    stride *= shape[dim];
  }
  const bool wide = dtype == Dtype::float32;
  block.managed.version = {1, 3};
  block.managed.manager_context = nullptr;
  block.managed.deleter = [](DlManagedTensor* self) { Free()(reinterpret_cast<Block*>(self)); };
  block.managed.flags = 0;
  block.managed.tensor = {static_cast<std::byte*>(memory) + Block::header(),
                          kCpu,
                          0,
                          dims,
                          dtype == Dtype::bfloat16 ? kBfloat : kFloat,
                          static_cast<std::uint8_t>(wide ? 32 : 16),
                          1,
                          block.shape,
                          block.strides,
                          0};
}

std::byte* Output::data() const { return static_cast<std::byte*>(block_->managed.tensor.data); }

PyObject* Output::release() {
  static_assert(offsetof(Block, managed) == 0, "the deleter frees the block by this member");
  void* object = nullptr;
  if (api->managed_to_object(&block_->managed, &object) != 0) return nullptr;
  block_.release();
  return static_cast<PyObject*>(object);
}

}  // namespace tpk
