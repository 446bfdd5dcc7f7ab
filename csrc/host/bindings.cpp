// Module tp_kernels._host. Addresses are plain integers and all checks of shapes, dtypes and devices
// are the caller's: no tensor library is known here.
#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cerrno>
#include <memory>
#include <optional>

#include "collectives.h"
#include "elementwise.h"
#include "overlap.h"
#include "ring.h"

namespace py = pybind11;
using namespace tpk;

namespace {

// Nothing here needs the interpreter: no call that may wait, copy or reduce holds its lock.
using Released = py::call_guard<py::gil_scoped_release>;

void check_python_signals() {
  if (PyGILState_GetThisThreadState() == nullptr) return;  // a thread of the engine's own
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

void* destination(std::uint64_t address, std::uint64_t count) {
  if (address == 0 && count != 0) throw std::invalid_argument("out is a null address");
  return pointer(address);
}

Bias make_bias(std::uint64_t address, std::uint64_t period) {
  if (address != 0 && period == 0) throw std::invalid_argument("bias needs a bias_period");
  return {pointer(address), period};
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

struct SlotHandle {
  SlotHandle(std::shared_ptr<Domain> domain, int index) : slot(std::move(domain), index) {}

  // The thread that reduces in the background, from its first use on.
  Reducer& reducer() {
    if (!thread) thread = std::make_unique<Reducer>(slot);
    return *thread;
  }

  double seconds(std::optional<double> timeout) const {
    const double result = timeout.value_or(slot.domain().timeout());
    check_timeout(result);  // also by calls that need not wait
    return result;
  }

  Slot slot;
  std::unique_ptr<Reducer> thread;  // goes before the slot does
};

using Timeout = std::optional<double>;
using Counts = std::vector<std::uint64_t>;

Counts scaled(Counts counts, std::uint64_t row) {
  for (auto& count : counts) {
    if (__builtin_mul_overflow(count, row, &count)) {
      throw std::invalid_argument("counts are too large");
    }
  }
  return counts;
}

ProductFunction product_of(const Isa& isa, std::uint32_t dtype) {
  if (dtype >= kReducibleDtypes || isa.product[dtype] == nullptr) {
    throw std::invalid_argument(std::string("there is no product of this dtype for ") + isa.name);
  }
  return isa.product[dtype];
}

// The steps of a round that are left once its buffer is filled.
void complete(SlotHandle& self, const Descriptor& descriptor, std::uint64_t out,
              std::uint64_t count, Bias bias, Timeout timeout) {
  const double seconds = self.seconds(timeout);
  self.slot.publish(descriptor);
  self.slot.reduce_all({destination(out, count), count, Dtype{descriptor.dtype}, bias}, seconds);
  self.slot.finish();
}

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
                       double timeout, std::uint32_t ring_cells, std::uint64_t ring_cell_bytes) {
             segment.use();
             const Shape shape{world, slots, capacity, buffers, ring_cells, ring_cell_bytes};
             return std::make_shared<Domain>(segment.segment, rank, shape, timeout,
                                             check_python_signals);
           }),
           py::arg("segment"), py::arg("rank"), py::arg("world"), py::arg("slots"),
           py::arg("capacity"), py::arg("buffers"), py::arg("timeout"), py::arg("ring_cells") = 0,
           py::arg("ring_cell_bytes") = 0)
      .def_static(
          "format",
          [](const SegmentHandle& segment, std::uint32_t world, std::uint32_t slots,
             std::uint64_t capacity, std::uint32_t buffers, std::uint32_t epoch,
             std::optional<std::array<std::uint64_t, 4>> tuning, std::uint32_t ring_cells,
             std::uint64_t ring_cell_bytes) {
            std::optional<Tuning> given;
            if (tuning) given = Tuning{(*tuning)[0], (*tuning)[1], (*tuning)[2], (*tuning)[3]};
            const Shape shape{world, slots, capacity, buffers, ring_cells, ring_cell_bytes};
            Domain::format(segment.use(), shape, epoch, given);
          },
          py::arg("segment"), py::arg("world"), py::arg("slots"), py::arg("capacity"),
          py::arg("buffers"), py::arg("epoch") = 0, py::arg("tuning") = py::none(),
          py::arg("ring_cells") = 0, py::arg("ring_cell_bytes") = 0,
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

void bind_slot(py::module_& module) {
  const auto no_timeout = py::arg("timeout") = py::none();
  py::class_<SlotHandle>(module, "Slot", "One rank's end of a slot: rounds and collectives.")
      .def(py::init<std::shared_ptr<Domain>, int>(), py::arg("domain"), py::arg("index"))
      .def_property_readonly("capacity",
                             [](const SlotHandle& self) { return self.slot.capacity(); })
      .def_property_readonly("buffers", [](const SlotHandle& self) { return self.slot.buffers(); })
      .def_property_readonly("seconds", [](const SlotHandle& self) { return self.slot.seconds(); })
      .def("reset_seconds", [](SlotHandle& self) { self.slot.reset_seconds(); })
      .def(
          "buffer_address",
          [](const SlotHandle& self, int rank, std::uint32_t index) {
            return reinterpret_cast<std::uintptr_t>(self.slot.buffer(rank, index));
          },
          py::arg("rank"), py::arg("index"))
      .def(
          "begin",
          [](SlotHandle& self, Timeout timeout) {
            return self.slot.exclusive("begin", [&] {
              if (self.thread) self.thread->make_room();
              return self.slot.begin(self.seconds(timeout));
            });
          },
          no_timeout, Released(), "Wait for credit; returns the index of the buffer to fill.")
      .def(
          "fill",
          [](SlotHandle& self, std::uint64_t source, std::uint64_t count, std::uint32_t dtype,
             std::uint64_t kept, std::uint64_t kept_end) {
            self.slot.exclusive("fill", [&] {
              self.slot.fill(pointer(source), count, Dtype{dtype}, kept, kept_end);
            });
          },
          py::arg("source"), py::arg("count"), py::arg("dtype"), py::arg("kept"),
          py::arg("kept_end"), Released(),
          "Copy to the buffer what peers will read; [kept, kept_end) is read at the source only.")
      .def(
          "fill_summands",
          [](SlotHandle& self, std::uint64_t source, std::uint64_t count, std::uint32_t dtype) {
            self.slot.exclusive("fill", [&] {
              self.slot.fill_summands(pointer(source), count, Dtype{dtype});
            });
          },
          py::arg("source"), py::arg("count"), py::arg("dtype"), Released(),
          "`fill` for reduce_all.")
      .def(
          "publish",
          [](SlotHandle& self, std::uint32_t op, std::uint32_t dtype, std::int64_t d0,
             std::int64_t d1, std::int64_t d2) {
            self.slot.exclusive("publish",
                                [&] { self.slot.publish(Descriptor{op, dtype, {d0, d1, d2}}); });
          },
          py::arg("op"), py::arg("dtype"), py::arg("d0") = 0, py::arg("d1") = 0, py::arg("d2") = 0,
          Released())
      .def(
          "wait",
          [](SlotHandle& self, int peer, Timeout timeout) {
            self.slot.exclusive("wait", [&] { self.slot.wait(peer, self.seconds(timeout)); });
          },
          py::arg("peer"), no_timeout, Released(),
          "Wait until `peer` has published the oldest round that is not finished.")
      .def(
          "wait_any",
          [](SlotHandle& self, const std::vector<int>& peers, Timeout timeout) {
            return self.slot.exclusive("wait", [&] {
              if (peers.empty()) throw std::invalid_argument("wait_any: no peers");
              return self.slot.wait_any(peers, self.seconds(timeout));
            });
          },
          py::arg("peers"), no_timeout, Released(),
          "Wait for the first of `peers` to publish the oldest round; returns its index in the list.")
      .def(
          "round_buffer",
          [](SlotHandle& self) {
            return self.slot.exclusive("round_buffer", [&] { return self.slot.round_buffer(); });
          },
          Released(), "Buffer index of the oldest round that is not finished.")
      .def(
          "finish",
          [](SlotHandle& self) { self.slot.exclusive("finish", [&] { self.slot.finish(); }); },
          Released(), "Credit: this rank has read all it needs of the oldest round.")
      .def(
          "reduce",
          [](SlotHandle& self, std::uint64_t out, std::uint64_t offset, std::uint64_t count,
             std::uint32_t dtype, std::uint64_t bias, std::uint64_t bias_period, Timeout timeout) {
            self.slot.exclusive("reduce", [&] {
              self.slot.reduce(destination(out, count), offset, count, Dtype{dtype},
                               make_bias(bias, bias_period), self.seconds(timeout));
            });
          },
          py::arg("out"), py::arg("offset"), py::arg("count"), py::arg("dtype"),
          py::arg("bias") = 0, py::arg("bias_period") = 0, no_timeout, Released(),
          "out[i] = sum over ranks of element offset + i + bias[(offset + i) % bias_period].")
      .def(
          "reduce_all",
          [](SlotHandle& self, std::uint64_t out, std::uint64_t count, std::uint32_t dtype,
             std::uint64_t bias, std::uint64_t bias_period, Timeout timeout) {
            self.slot.exclusive("reduce_all", [&] {
              self.slot.reduce_all({destination(out, count), count, Dtype{dtype},
                                    make_bias(bias, bias_period)},
                                   self.seconds(timeout));
            });
          },
          py::arg("out"), py::arg("count"), py::arg("dtype"), py::arg("bias") = 0,
          py::arg("bias_period") = 0, no_timeout, Released(),
          "The reduction of a whole round; all ranks call it. It may use up the buffers.")
      .def(
          "settle",
          [](SlotHandle& self, Timeout timeout) {
            self.slot.exclusive("settle", [&] { self.slot.settle(self.seconds(timeout)); });
          },
          no_timeout, Released(), "Return when no peer reads this rank's buffers any more.")
      .def(
          "reduce_in_place",
          [](SlotHandle& self, std::uint64_t count, std::uint32_t dtype, Timeout timeout) {
            self.slot.exclusive("reduce_in_place", [&] {
              self.slot.reduce_in_place(count, Dtype{dtype}, self.seconds(timeout));
            });
          },
          py::arg("count"), py::arg("dtype"), no_timeout, Released(),
          "reduce_all whose result replaces the summands in the buffers of all ranks.")
      .def(
          "complete",
          [](SlotHandle& self, std::uint32_t op, std::uint32_t dtype, std::int64_t d0,
             std::int64_t d1, std::int64_t d2, std::uint64_t out, std::uint64_t count,
             std::uint64_t bias, std::uint64_t bias_period, Timeout timeout) {
            self.slot.exclusive("reduce_all", [&] {
              complete(self, {op, dtype, {d0, d1, d2}}, out, count, make_bias(bias, bias_period),
                       timeout);
            });
          },
          py::arg("op"), py::arg("dtype"), py::arg("d0"), py::arg("d1"), py::arg("d2"),
          py::arg("out"), py::arg("count"), py::arg("bias") = 0, py::arg("bias_period") = 0,
          no_timeout, Released(), "publish, reduce_all and finish.")
      .def(
          "linear",
          [](SlotHandle& self, std::uint32_t op, std::uint32_t dtype, std::int64_t rows,
             std::int64_t columns, std::int64_t depth, std::uint64_t x, std::size_t ldx,
             std::uint64_t w, std::size_t ldw, std::uint64_t out, std::uint64_t bias,
             Timeout timeout) {
            const ProductFunction product = product_of(self.slot.domain().isa(), dtype);
            const std::uint64_t count = rows * columns;
            if (count > self.slot.capacity() / size_of(Dtype{dtype})) {
              throw std::invalid_argument("linear: the product is larger than a buffer");
            }
            self.slot.exclusive("linear", [&] {
              const std::uint32_t index = self.slot.begin(self.seconds(timeout));
              product(pointer(x), ldx, pointer(w), ldw, nullptr,
                      self.slot.buffer(self.slot.rank(), index), rows, columns, depth);
              complete(self, {op, dtype, {rows, columns, 0}}, out, count,
                       make_bias(bias, columns), timeout);
            });
          },
          py::arg("op"), py::arg("dtype"), py::arg("rows"), py::arg("columns"), py::arg("depth"),
          py::arg("x"), py::arg("ldx"), py::arg("w"), py::arg("ldw"), py::arg("out"),
          py::arg("bias"), no_timeout, Released(),
          "begin, product into the buffer, and complete: a whole linear layer of few rows.")
      .def(
          "complete_rms_norm",
          [](SlotHandle& self, std::uint32_t op, std::uint32_t dtype, std::int64_t rows,
             std::int64_t columns, std::uint64_t sum, std::uint64_t bias, std::uint64_t residual,
             std::uint64_t weight, std::uint64_t out, float epsilon, Timeout timeout) {
            self.slot.exclusive("reduce_all", [&] {
              complete(self, {op, dtype, {rows, columns, 0}}, sum, rows * columns,
                       make_bias(bias, columns), timeout);
              add_rms_norm(pointer(sum), pointer(residual), pointer(weight), pointer(out), rows,
                           columns, epsilon, Dtype{dtype});
            });
          },
          py::arg("op"), py::arg("dtype"), py::arg("rows"), py::arg("columns"), py::arg("sum"),
          py::arg("bias"), py::arg("residual"), py::arg("weight"), py::arg("out"),
          py::arg("epsilon"), no_timeout, Released(),
          "complete, then sum += residual (0: none) and out = rms_norm(sum) * weight.")
      .def(
          "reduce_later",
          [](SlotHandle& self, std::uint64_t out, std::uint64_t count, std::uint32_t dtype,
             std::optional<std::uint64_t> offset, std::uint64_t bias, std::uint64_t bias_period,
             Timeout timeout) {
            const Reduction reduction{destination(out, count), count, Dtype{dtype},
                                      make_bias(bias, bias_period)};
            const double seconds = self.seconds(timeout);
            self.slot.exclusive("reduce_later", [&] {
              self.reducer().submit([slot = &self.slot, reduction, offset, seconds] {
                if (offset) {
                  slot->reduce(reduction.out, *offset, reduction.count, reduction.dtype,
                               reduction.bias, seconds);
                } else {
                  slot->reduce_all(reduction, seconds);
                }
                slot->finish();
              });
            });
          },
          py::arg("out"), py::arg("count"), py::arg("dtype"), py::arg("offset"),
          py::arg("bias") = 0, py::arg("bias_period") = 0, no_timeout, Released(),
          "reduce from offset, or reduce_all if None, and finish of the round just published, on a "
          "thread of the engine.")
      .def(
          "join",
          [](SlotHandle& self) {
            self.slot.exclusive("join", [&] {
              if (self.thread) self.thread->join();
            });
          },
          Released(), "Return when all of reduce_later is done.")
      .def(
          "abandon",
          [](SlotHandle& self, const std::string& reason) {
            if (self.thread) self.thread->abandon(reason);
          },
          py::arg("reason"), Released(), "Give up what reduce_later was asked for; nothing is written afterwards.")
      .def(
          "all_reduce",  // the shortest way for the shortest messages: every argument costs
          [](SlotHandle& self, std::uint64_t in, std::uint64_t out, std::uint64_t count,
             std::uint32_t dtype) {
            self.slot.exclusive("all_reduce", [&] {
              all_reduce(self.slot, pointer(in), pointer(out), count, Dtype{dtype}, op_all_reduce,
                         self.slot.domain().timeout());
            });
          },
          py::arg("input"), py::arg("out"), py::arg("count"), py::arg("dtype"), Released())
      .def(
          "all_reduce",
          [](SlotHandle& self, std::uint64_t in, std::uint64_t out, std::uint64_t count,
             std::uint32_t dtype, std::uint32_t op, Timeout timeout, int shots, std::uint64_t bias,
             std::uint64_t bias_period) {
            if (shots < 0 || shots > 2) throw std::invalid_argument("shots: 0 (automatic), 1 or 2");
            self.slot.exclusive("all_reduce", [&] {
              all_reduce(self.slot, pointer(in), pointer(out), count, Dtype{dtype}, op,
                         self.seconds(timeout), Shots{shots}, make_bias(bias, bias_period));
            });
          },
          py::arg("input"), py::arg("out"), py::arg("count"), py::arg("dtype"),
          py::arg("op_code") = std::uint32_t{op_all_reduce}, no_timeout, py::arg("shots") = 0,
          py::arg("bias") = 0, py::arg("bias_period") = 0, Released())
      .def(
          "reduce_scatter",
          [](SlotHandle& self, std::uint64_t in, std::uint64_t out, const Counts& counts,
             std::uint32_t dtype, std::uint32_t op, Timeout timeout, std::uint64_t row,
             std::uint64_t bias) {
            self.slot.exclusive("reduce_scatter", [&] {
              reduce_scatter(self.slot, pointer(in), pointer(out), scaled(counts, row), Dtype{dtype}, op,
                             self.seconds(timeout), make_bias(bias, row));
            });
          },
          py::arg("input"), py::arg("out"), py::arg("counts"), py::arg("dtype"),
          py::arg("op_code") = std::uint32_t{op_reduce_scatter}, no_timeout, py::arg("row") = 1,
          py::arg("bias") = 0, Released(), "counts and bias: of `row` elements each.")
      .def(
          "all_gather",
          [](SlotHandle& self, std::uint64_t in, std::uint64_t out, const Counts& counts,
             std::uint32_t dtype, std::uint32_t op, Timeout timeout, std::uint64_t row) {
            self.slot.exclusive("all_gather", [&] {
              all_gather(self.slot, pointer(in), pointer(out), scaled(counts, row), Dtype{dtype}, op,
                         self.seconds(timeout));
            });
          },
          py::arg("input"), py::arg("out"), py::arg("counts"), py::arg("dtype"),
          py::arg("op_code") = std::uint32_t{op_all_gather}, no_timeout, py::arg("row") = 1,
          Released(), "counts: of `row` elements each.")
      .def(
          "barrier",
          [](SlotHandle& self, Timeout timeout) {
            self.slot.exclusive("barrier", [&] { barrier(self.slot, self.seconds(timeout)); });
          },
          no_timeout, Released());
}

// Addresses and sizes in bytes, as Python gives the parts of a message.
using Addresses = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

template <class Part>
std::vector<Part> make_parts(const Addresses& addresses) {
  std::vector<Part> parts;
  parts.reserve(addresses.size());
  for (const auto& [address, bytes] : addresses) parts.push_back({pointer(address), bytes});
  return parts;
}

void bind_rings(py::module_& module) {
  py::class_<RingSender>(module, "RingSender", "This rank's end of the ring to a peer.")
      .def(py::init<std::shared_ptr<Domain>, int>(), py::arg("domain"), py::arg("peer"))
      .def(
          "send",
          [](RingSender& self, const Addresses& parts, std::uint64_t tag, double timeout) {
            self.send(make_parts<SendPart>(parts), tag, timeout);
          },
          py::arg("parts"), py::arg("tag"), py::arg("timeout"), Released(),
          "Send a message made of [(address, bytes)]; waits only for free cells.");
  py::class_<RingReceiver>(module, "RingReceiver", "This rank's end of the ring from a peer.")
      .def(py::init<std::shared_ptr<Domain>, int>(), py::arg("domain"), py::arg("peer"))
      .def("poll", &RingReceiver::poll, Released(),
           "Whether a message has begun to arrive; never waits.")
      .def(
          "peek",
          [](RingReceiver& self, std::optional<std::uint64_t> tag, double timeout) {
            const Message message = self.peek(tag, timeout);
            return std::pair(message.tag, message.bytes);
          },
          py::arg("tag"), py::arg("timeout"), Released(),
          "Wait for a message; (tag, bytes left to read).")
      .def(
          "read",
          [](RingReceiver& self, const Addresses& parts, std::optional<std::uint64_t> tag,
             bool whole, double timeout) {
            return self.read(make_parts<ReceivePart>(parts), tag, whole, timeout);
          },
          py::arg("parts"), py::arg("tag"), py::arg("whole"), py::arg("timeout"), Released(),
          "Read into [(address, bytes)]; returns the bytes that were left before. Nothing is read if "
          "they are fewer than asked for, or, with `whole`, more.");
}

void bind_elementwise(py::module_& module) {
  module.def(
      "rms_norm",
      [](std::uint64_t x, std::uint64_t weight, std::uint64_t out, std::size_t rows,
         std::size_t columns, float epsilon, std::uint32_t dtype) {
        rms_norm(pointer(x), pointer(weight), pointer(out), rows, columns, epsilon, Dtype{dtype});
      },
      py::arg("x"), py::arg("weight"), py::arg("out"), py::arg("rows"), py::arg("columns"),
      py::arg("epsilon"), py::arg("dtype"), Released());
  module.def(
      "product",
      [](std::uint64_t x, std::size_t ldx, std::uint64_t w, std::size_t ldw, std::uint64_t bias,
         std::uint64_t y, std::size_t rows, std::size_t columns, std::size_t depth,
         std::uint32_t dtype) {
        product_of(select_isa(), dtype)(pointer(x), ldx, pointer(w), ldw, pointer(bias), pointer(y),
                                        rows, columns, depth);
      },
      py::arg("x"), py::arg("ldx"), py::arg("w"), py::arg("ldw"), py::arg("bias"), py::arg("y"),
      py::arg("rows"), py::arg("columns"), py::arg("depth"), py::arg("dtype"), Released(),
      "y [rows, columns] = x [rows, depth] w [columns, depth]^T + bias (0: none), for few rows.");
  module.def(
      "has_product", [] { return select_isa().product[0] != nullptr; },
      "Whether `product` is there for this instruction set.");
  module.def(
      "rotary",
      [](std::uint64_t x, std::uint64_t cosines, std::uint64_t sines, std::uint64_t out,
         std::size_t batch, std::size_t length, std::size_t heads, std::size_t dim,
         std::size_t table_batch, std::uint32_t dtype) {
        rotary(pointer(x), pointer(cosines), pointer(sines), pointer(out), batch, length, heads, dim,
               table_batch, Dtype{dtype});
      },
      py::arg("x"), py::arg("cosines"), py::arg("sines"), py::arg("out"), py::arg("batch"),
      py::arg("length"), py::arg("heads"), py::arg("dim"), py::arg("table_batch"), py::arg("dtype"),
      Released());
}

}  // namespace

PYBIND11_MODULE(_host, module) {
  module.doc() = "Collectives between processes of one host, in shared memory.";
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
  bind_rings(module);
  module.def(
      "layout_bytes",
      [](std::uint32_t world, std::uint32_t slots, std::uint64_t capacity, std::uint32_t buffers,
         std::uint32_t ring_cells, std::uint64_t ring_cell_bytes) {
        return Layout(Shape{world, slots, capacity, buffers, ring_cells, ring_cell_bytes}).bytes();
      },
      py::arg("world"), py::arg("slots"), py::arg("capacity"), py::arg("buffers"),
      py::arg("ring_cells") = 0, py::arg("ring_cell_bytes") = 0,
      "Size of a segment of this shape.");
  bind_elementwise(module);
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
