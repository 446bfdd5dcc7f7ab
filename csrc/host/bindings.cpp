// Module tp_kernels._host. Addresses are plain integers and all checks of shapes, dtypes and devices
// are the caller's: no tensor library is known here.
#include "bindings.h"

#include <pybind11/gil_safe_call_once.h>

#include <array>
#include <cerrno>
#include <memory>
#include <optional>

#include "domain.h"

namespace py = pybind11;
using namespace tpk;

namespace {

void check_python_signals() {
  if (PyGILState_GetThisThreadState() == nullptr) return;  // a thread of the engine's own
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// A mapping lives until the last view, domain and slot of it are gone, so views outlive close().
struct SegmentHandle {
  std::shared_ptr<Segment> segment;
  bool closed = false;

  Segment& use() const {
    if (closed) throw std::invalid_argument("the segment is closed");
    return *segment;
  }
};

void set_os_error(const SystemError& error) {
  py::object exception = py::reinterpret_borrow<py::object>(PyExc_OSError)(
      error.code, error.message, error.path);
  PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
}

// The class tp_kernels._host.Fault, made once when the module is loaded.
PYBIND11_CONSTINIT py::gil_safe_call_once_and_store<py::object> fault_class;

py::object make_fault_class() {
  return py::reinterpret_steal<py::object>(PyErr_NewExceptionWithDoc(
      "tp_kernels._host.Fault",
      "A peer did not come, is gone or does something else: kind, peer, slot, op, expected, seen, "
      "detail. kind is 'timeout', 'peer_lost', 'mismatch' or 'closed'.",
      PyExc_RuntimeError, nullptr));
}

void set_fault(const Fault& fault) {
  const py::object& type = fault_class.get_stored();
  py::object exception = type(fault.what());
  exception.attr("kind") = name(fault.kind);
  exception.attr("peer") = fault.peer;
  exception.attr("slot") = fault.slot;
  exception.attr("op") = fault.op;
  exception.attr("expected") = fault.expected;
  exception.attr("seen") = fault.seen;
  exception.attr("detail") = fault.detail;
  PyErr_SetObject(type.ptr(), exception.ptr());
}

void bind_segment(py::module_& module) {
  py::class_<SegmentHandle>(module, "Segment", py::buffer_protocol(),
                            "A POSIX shared memory object, mapped whole; its buffer is the memory.")
      .def_static(
          "create",
          [](const std::string& name, std::uint64_t nbytes) {
            return SegmentHandle{Segment::create(name, nbytes)};
          },
          py::arg("name"), py::arg("nbytes"), Released(),
          "Make a segment with mode 0600 and all pages reserved; OSError if it does not fit.")
      .def_static(
          "open",
          [](const std::string& name, std::uint64_t nbytes) {
            return SegmentHandle{Segment::open(name, nbytes)};
          },
          py::arg("name"), py::arg("nbytes"), Released(),
          "Map a segment of this user that has exactly this size.")
      .def("unlink", [](SegmentHandle& self) { self.segment->unlink(); },
           "Remove the name; mappings stay. Only the creator's call has an effect.")
      .def("close", [](SegmentHandle& self) { self.closed = true; },
           "Refuse new uses; the memory is unmapped with the last view, domain or slot.")
      .def_property_readonly("address",
                             [](const SegmentHandle& self) {
                               return reinterpret_cast<std::uintptr_t>(self.use().base());
                             })
      .def_property_readonly("size", [](const SegmentHandle& self) { return self.segment->size(); })
      .def_buffer([](SegmentHandle& self) {
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(self.use().base()),
                               static_cast<py::ssize_t>(self.segment->size()));
      });
}

void bind_domain(py::module_& module) {
  py::class_<Domain, std::shared_ptr<Domain>>(module, "Domain",
                                              "One rank's membership in the group of a segment.")
      .def(py::init([](const SegmentHandle& segment, int rank, std::uint32_t world,
                       std::uint32_t slots, std::uint64_t capacity, std::uint32_t buffers,
                       double timeout, std::uint32_t ring_cells, std::uint64_t ring_cell_bytes,
                       std::uint32_t ring_reach, std::uint32_t ring_far_cells) {
             segment.use();
             const Shape shape{world,      slots,           capacity,   buffers,
                               ring_cells, ring_cell_bytes, ring_reach, ring_far_cells};
             return std::make_shared<Domain>(segment.segment, rank, shape, timeout,
                                             check_python_signals);
           }),
           py::arg("segment"), py::arg("rank"), py::arg("world"), py::arg("slots"),
           py::arg("capacity"), py::arg("buffers"), py::arg("timeout"), py::arg("ring_cells") = 0,
           py::arg("ring_cell_bytes") = 0, py::arg("ring_reach") = 0, py::arg("ring_far_cells") = 0)
      .def_static(
          "format",
          [](const SegmentHandle& segment, std::uint32_t world, std::uint32_t slots,
             std::uint64_t capacity, std::uint32_t buffers, std::uint32_t epoch,
             std::optional<std::array<std::uint64_t, 4>> tuning, std::uint32_t ring_cells,
             std::uint64_t ring_cell_bytes, std::uint32_t ring_reach, std::uint32_t ring_far_cells) {
            std::optional<Tuning> given;
            if (tuning) given = Tuning{(*tuning)[0], (*tuning)[1], (*tuning)[2], (*tuning)[3]};
            const Shape shape{world,      slots,           capacity,   buffers,
                              ring_cells, ring_cell_bytes, ring_reach, ring_far_cells};
            Domain::format(segment.use(), shape, epoch, given);
          },
          py::arg("segment"), py::arg("world"), py::arg("slots"), py::arg("capacity"),
          py::arg("buffers"), py::arg("epoch") = 0, py::arg("tuning") = py::none(),
          py::arg("ring_cells") = 0, py::arg("ring_cell_bytes") = 0, py::arg("ring_reach") = 0,
          py::arg("ring_far_cells") = 0,
          "Lay out a new segment; one rank does it before any rank makes its Domain. tuning: "
          "(two_shot, two_shot_resident, piece, streaming) in bytes.")
      .def("join", &Domain::join, Released())
      .def(
          "open_peers",
          [](Domain& self, Timeout timeout) { self.open_peers(timeout.value_or(self.timeout())); },
          py::arg("timeout") = py::none(), Released(), "Wait until all ranks have joined.")
      .def("fail", &Domain::fail, py::arg("message"), Released(),
           "This rank cannot go on: peers that wait for it raise.")
      .def("close", &Domain::close, Released(), "Leave in order; waits for nobody.")
      .def_property_readonly("rank", &Domain::rank)
      .def_property_readonly("world", &Domain::world)
      .def_property_readonly("isa", [](const Domain& self) { return self.isa().name; })
      .def_property_readonly("tuning", [](const Domain& self) {
        const Tuning& tuning = self.tuning();
        return py::dict(py::arg("two_shot") = tuning.two_shot,
                        py::arg("two_shot_resident") = tuning.two_shot_resident,
                        py::arg("piece") = tuning.piece, py::arg("streaming") = tuning.streaming);
      });
}

void bind_product(py::module_& module) {
  module.def(
      "product",
      [](std::uint64_t x, std::size_t ldx, std::uint64_t w, std::size_t ldw, std::uint64_t bias,
         std::uint64_t y, std::size_t rows, std::size_t columns, std::size_t depth,
         std::uint32_t dtype) {
        check_product(x, w, rows * depth, columns * depth);
        product_of(select_isa(), dtype)(pointer(x), ldx, pointer(w), ldw, pointer(bias), pointer(y),
                                        rows, columns, depth);
      },
      py::arg("x"), py::arg("ldx"), py::arg("w"), py::arg("ldw"), py::arg("bias"), py::arg("y"),
      py::arg("rows"), py::arg("columns"), py::arg("depth"), py::arg("dtype"), Released(),
      "y [rows, columns] = x [rows, depth] w [columns, depth]^T + bias (0: none), for few rows.");
  module.def(
      "has_product", [] { return select_isa().product[0] != nullptr; },
      "Whether `product` is there for this instruction set.");
}

}  // namespace

void tpk::set_python_error(std::exception_ptr pending) {
  try {
    std::rethrow_exception(pending);
  } catch (const Fault& fault) {
    set_fault(fault);
  } catch (const SystemError& error) {
    set_os_error(error);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

PYBIND11_MODULE(_host, module) {
  module.doc() = "Collectives between processes of one host, in shared memory.";
  module.attr("INTERFACE") = kInterface;
  module.attr("Fault") = fault_class.call_once_and_store_result(make_fault_class).get_stored();
  py::register_local_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const Fault& fault) {
      set_fault(fault);
    } catch (const SystemError& error) {
      set_os_error(error);
    }
  });
  bind_segment(module);
  bind_domain(module);
  bind_slot(module);
  bind_short(module);
  bind_rings(module);
  bind_dropout(module);
  module.def(
      "layout_bytes",
      [](std::uint32_t world, std::uint32_t slots, std::uint64_t capacity, std::uint32_t buffers,
         std::uint32_t ring_cells, std::uint64_t ring_cell_bytes, std::uint32_t ring_reach,
         std::uint32_t ring_far_cells) {
        const Shape shape{world,      slots,           capacity,   buffers,
                          ring_cells, ring_cell_bytes, ring_reach, ring_far_cells};
        return Layout(shape).bytes();
      },
      py::arg("world"), py::arg("slots"), py::arg("capacity"), py::arg("buffers"),
      py::arg("ring_cells") = 0, py::arg("ring_cell_bytes") = 0, py::arg("ring_reach") = 0,
          py::arg("ring_far_cells") = 0,
      "Size of a segment of this shape.");
  bind_product(module);
  module.def("isa", [] { return select_isa().name; },
             "The instruction set in use; TP_KERNELS_ISA forces one.");
  module.def("available_isas", [] {
    std::vector<std::string> names;
    for (const Isa* isa : available_isas()) names.emplace_back(isa->name);
    return names;
  });
  module.def("build_info", [] {
    py::dict info;
    info["version"] = TPK_VERSION;
    info["compiler"] = TPK_COMPILER;
    info["flags"] = TPK_FLAGS;
    info["layout_version"] = kLayoutVersion;
    return info;
  });
}
