// Rings in Python: messages between two ranks.
#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings.h"
#include "ring.h"
#include "ring_set.h"
#include "slot.h"
#include "tensor.h"

namespace tpk {
namespace {

// Addresses and sizes in bytes, as Python gives the parts of a message.
using Addresses = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

template <class Part>
std::vector<Part> make_parts(const Addresses& addresses) {
  std::vector<Part> parts;
  parts.reserve(addresses.size());
  for (const auto& [address, bytes] : addresses) parts.push_back({pointer(address), bytes});
  return parts;
}

// The description of a single tensor, as in tp_kernels/pipeline/message.py.
struct TensorHead {
  static constexpr std::size_t kFixed = 4;
  static constexpr std::uint8_t kRequiresGrad = 1;

  // Of a dtype that tensors are made of here, on the host; else nothing.
  static std::optional<TensorHead> read(const std::string& head) {
    TensorHead found;
    if (head.size() < kFixed || head[0] != 'x') return std::nullopt;
    const auto dtype = static_cast<std::uint8_t>(head[1]), flags = static_cast<std::uint8_t>(head[2]);
    found.dims = static_cast<std::uint8_t>(head[3]);
    if (dtype >= kReducibleDtypes || flags > kRequiresGrad || found.dims > kMostDims ||
        head.size() != kFixed + 8 * static_cast<std::size_t>(found.dims)) {
      return std::nullopt;
    }
    found.dtype = static_cast<Dtype>(dtype);
    found.requires_grad = flags == kRequiresGrad;
    std::memcpy(found.shape, head.data() + kFixed, head.size() - kFixed);
    return found;
  }

  std::size_t write(char* head) const {
    head[0] = 'x';
    head[1] = static_cast<char>(dtype);
    head[2] = static_cast<char>(requires_grad ? kRequiresGrad : 0);
    head[3] = static_cast<char>(dims);
    std::memcpy(head + kFixed, shape, 8 * static_cast<std::size_t>(dims));
    return kFixed + 8 * static_cast<std::size_t>(dims);
  }

  std::uint64_t bytes() const {
    std::uint64_t bytes = size_of(dtype);
    for (int dim = 0; dim < dims; ++dim) {
      if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(shape[dim]), &bytes)) return ~0ull;
    }
    return bytes;
  }

  Dtype dtype;
  bool requires_grad;
  int dims;
  std::int64_t shape[kMostDims];  // the sizes of a message are those of a machine like this one
};

// Makes the tensors of the messages that consist of one, which are most of those in a pipeline.
class Rings {
 public:
  Rings(std::shared_ptr<Domain> domain, const std::vector<int>& peers) : set_(std::move(domain), peers) {}

  bool send(int peer, std::uint64_t tag, std::string_view head, const Addresses& body) {
    std::vector<SendPart> parts;
    parts.reserve(body.size() + 1);
    parts.push_back({head.data(), head.size()});
    for (const auto& [address, bytes] : body) parts.push_back({pointer(address), bytes});
    const py::gil_scoped_release released;
    return set_.send(peer, std::move(parts), tag);
  }

  py::object send_tensor(int peer, std::uint64_t tag, py::handle tensor) {
    TensorView view;
    if (torch().tensor == nullptr || !view_of(tensor.ptr(), view) || !view.contiguous()) return py::none();
    const auto grad = requires_grad_of(tensor.ptr());
    if (!grad) return py::none();
    TensorHead head;
    head.dtype = view.dtype;
    head.requires_grad = *grad;
    head.dims = view.dims;
    std::copy(view.shape, view.shape + view.dims, head.shape);
    Sending& sending = sending_[peer];
    const std::size_t size = head.write(sending.head);
    const std::uint64_t bytes = head.bytes();
    bool left;
    {
      const py::gil_scoped_release released;
      left = set_.send(peer, {{sending.head, size}, {view.data, bytes}}, tag);
    }
    return py::make_tuple(bytes, left);
  }

  bool receive(int peer, const Addresses& body) {
    auto parts = make_parts<ReceivePart>(body);
    const py::gil_scoped_release released;
    return set_.receive(peer, std::move(parts));
  }

  py::object step(const char* op, double timeout, int awaited) {
    std::optional<RingEvent> event;
    std::optional<Arrived> complete;
    {
      const py::gil_scoped_release released;
      check_timeout(timeout);
      double left = timeout;
      const auto start = timeout == 0 ? Clock::time_point{} : Clock::now();
      while ((event = set_.step(op, left, awaited))) {
        complete = take(*event);
        // A message that is taken here is no news before it is complete.
        if (event->kind != RingEvent::announced || complete || !arriving_.count(event->peer)) break;
        if (timeout != 0) {
          left = std::max(0.0, timeout - std::chrono::duration<double>(Clock::now() - start).count());
        }
      }
    }
    if (complete) {
      auto tensor = py::reinterpret_steal<py::object>(complete->output.release());
      if (!tensor || (complete->head.requires_grad && !set_requires_grad(tensor.ptr()))) {
        throw py::error_already_set();
      }
      return py::make_tuple(3, event->peer, complete->tag, tensor, complete->head.bytes());
    }
    if (!event) return py::none();
    return py::make_tuple(static_cast<int>(event->kind), event->peer, event->tag,
                          py::bytes(event->head), event->bytes);
  }

 private:
  struct Sending {
    char head[TensorHead::kFixed + 8 * kMostDims];  // of the message under way
  };

  struct Arrived {
    TensorHead head;
    std::uint64_t tag;
    Output output;
  };

  // The tensor that is complete with this event. Of one that only begins, `arriving_` has the memory.
  std::optional<Arrived> take(const RingEvent& event) {
    if (event.kind == RingEvent::received) {
      const auto found = arriving_.find(event.peer);
      if (found == arriving_.end()) return std::nullopt;
      std::optional<Arrived> complete(std::move(found->second));
      arriving_.erase(found);
      return complete;
    }
    if (event.kind != RingEvent::announced || torch().tensor == nullptr) return std::nullopt;
    const auto head = TensorHead::read(event.head);
    if (!head || head->bytes() != event.bytes) return std::nullopt;
    Arrived arrived{*head, event.tag, Output(head->shape, head->dims, head->dtype)};
    if (event.bytes == 0 || set_.receive(event.peer, {{arrived.output.data(), event.bytes}})) {
      return arrived;
    }
    arriving_.emplace(event.peer, std::move(arrived));
    return std::nullopt;
  }

  RingSet set_;
  std::map<int, Sending> sending_;
  std::map<int, Arrived> arriving_;
};

}  // namespace

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
  py::class_<Rings>(module, "RingSet", "This rank's ends of the rings with several peers.")
      .def(py::init<std::shared_ptr<Domain>, std::vector<int>>(), py::arg("domain"), py::arg("peers"))
      .def("send", &Rings::send, py::arg("peer"), py::arg("tag"), py::arg("head"), py::arg("body"),
           "Begin a message of bytes and [(address, bytes)]. True if all of it has left; else the memory has to "
           "stay until `step` says so.")
      .def("send_tensor", &Rings::send_tensor, py::arg("peer"), py::arg("tag"), py::arg("tensor"),
           "As `send`, of a tensor with its description; (bytes, whether it has left). None if it is none of the "
           "usual ones, and nothing was sent.")
      .def("receive", &Rings::receive, py::arg("peer"), py::arg("body"),
           "Memory for the body that was announced. True if it is there; else the memory has to stay until "
           "`step` says so.")
      .def("step", &Rings::step, py::arg("op"), py::arg("timeout"), py::arg("awaited") = -1,
           "Move what can move, wait up to `timeout` seconds for something to happen: (0, peer, tag, head, bytes) "
           "for a message, (1, peer, ...) when its body is complete, (2, peer, ...) when one has left, (3, peer, "
           "tag, tensor, bytes) for a message of one tensor that is complete; None if nothing has. awaited: the "
           "peer without which there is no point in waiting; -1: none.");
  module.def(
      "large_memory",
      [](std::int64_t bytes) -> py::object {
        if (torch().tensor == nullptr) return py::none();
        const std::int64_t count = (bytes + 1) / 2;
        auto tensor = py::reinterpret_steal<py::object>(Output(&count, 1, Dtype::bfloat16).release());
        if (!tensor) throw py::error_already_set();
        return tensor;
      },
      py::arg("bytes"),
      "A bfloat16 tensor of at least so many bytes, in memory that was used before if there is some; None if this "
      "torch makes no tensors.");
}

}  // namespace tpk
