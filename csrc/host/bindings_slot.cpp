// Slots in Python: rounds and collectives.
#include <algorithm>
#include <memory>

#include "bindings.h"
#include "collectives.h"
#include "elementwise.h"
#include "slot_handle.h"

namespace tpk {
namespace {

using Counts = std::vector<std::uint64_t>;

void* destination(std::uint64_t address, std::uint64_t count) {
  if (address == 0 && count != 0) throw std::invalid_argument("out is a null address");
  return pointer(address);
}

Bias make_bias(std::uint64_t address, std::uint64_t period) {
  if (address != 0 && period == 0) throw std::invalid_argument("bias needs a bias_period");
  return {pointer(address), period};
}

Counts scaled(Counts counts, std::uint64_t row) {
  for (auto& count : counts) {
    if (__builtin_mul_overflow(count, row, &count)) {
      throw std::invalid_argument("counts are too large");
    }
  }
  return counts;
}

// `complete` as it is called from Python.
void complete_from(SlotHandle& self, const Descriptor& descriptor, std::uint64_t out,
                   std::uint64_t count, Bias bias, Timeout timeout) {
  const double seconds = self.seconds(timeout);
  complete(self.slot, descriptor, destination(out, count), count, bias, seconds);
}

}  // namespace

void bind_slot(py::module_& module) {
  const auto no_timeout = py::arg("timeout") = py::none();
  py::class_<SlotHandle>(module, "Slot", "One rank's end of a slot: rounds and collectives.")
      .def(py::init<std::shared_ptr<Domain>, int>(), py::arg("domain"), py::arg("index"))
      .def_property_readonly("capacity",
                             [](const SlotHandle& self) { return self.slot.capacity(); })
      .def_property_readonly("piece", [](const SlotHandle& self) {
        return std::min(self.slot.capacity(), self.slot.domain().tuning().piece);
      })
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
              complete_from(self, {op, dtype, {d0, d1, d2}}, out, count, make_bias(bias, bias_period),
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
            check_product(x, w, rows * depth, columns * depth);
            if (count > self.slot.capacity() / size_of(Dtype{dtype})) {
              throw std::invalid_argument("linear: the product is larger than a buffer");
            }
            self.slot.exclusive("linear", [&] {
              const std::uint32_t index = self.slot.begin(self.seconds(timeout));
              product(pointer(x), ldx, pointer(w), ldw, nullptr,
                      self.slot.buffer(self.slot.rank(), index), rows, columns, depth);
              complete_from(self, {op, dtype, {rows, columns, 0}}, out, count,
                       make_bias(bias, columns), timeout);
            });
          },
          py::arg("op"), py::arg("dtype"), py::arg("rows"), py::arg("columns"), py::arg("depth"),
          py::arg("x"), py::arg("ldx"), py::arg("w"), py::arg("ldw"), py::arg("out"),
          py::arg("bias"), no_timeout, Released(),
          "begin, product into the buffer, and complete: a whole linear layer of few rows.")
      .def(
          "complete_rms_norm",
          [](SlotHandle& self, std::uint32_t op, std::uint32_t dtype, std::int64_t d0,
             std::int64_t d1, std::uint64_t rows, std::uint64_t columns, std::uint64_t sum,
             std::uint64_t bias, std::uint64_t residual, std::uint64_t weight, std::uint64_t out,
             float epsilon, Timeout timeout) {
            self.slot.exclusive("reduce_all", [&] {
              complete_from(self, {op, dtype, {d0, d1, 0}}, sum, rows * columns,
                       make_bias(bias, columns), timeout);
              add_rms_norm(pointer(sum), pointer(residual), pointer(weight), pointer(out), rows,
                           columns, epsilon, Dtype{dtype});
            });
          },
          py::arg("op"), py::arg("dtype"), py::arg("d0"), py::arg("d1"), py::arg("rows"),
          py::arg("columns"), py::arg("sum"), py::arg("bias"), py::arg("residual"), py::arg("weight"), py::arg("out"),
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
          py::arg("reason"), Released(),
          "Give up what reduce_later was asked for; nothing is written afterwards.")
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
             std::uint64_t bias_period, std::int64_t detail) {
            if (shots < 0 || shots > 2) throw std::invalid_argument("shots: 0 (automatic), 1 or 2");
            self.slot.exclusive("all_reduce", [&] {
              all_reduce(self.slot, pointer(in), pointer(out), count, Dtype{dtype}, op,
                         self.seconds(timeout), Shots{shots}, make_bias(bias, bias_period), detail);
            });
          },
          py::arg("input"), py::arg("out"), py::arg("count"), py::arg("dtype"),
          py::arg("op_code") = std::uint32_t{op_all_reduce}, no_timeout, py::arg("shots") = 0,
          py::arg("bias") = 0, py::arg("bias_period") = 0, py::arg("detail") = 0, Released())
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

}  // namespace tpk
