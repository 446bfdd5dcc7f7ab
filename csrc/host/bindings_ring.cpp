// Rings in Python: messages between two ranks.
#include <string_view>
#include <utility>
#include <vector>

#include "bindings.h"
#include "ring.h"
#include "ring_set.h"

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
  py::class_<RingSet>(module, "RingSet", "This rank's ends of the rings with several peers.")
      .def(py::init<std::shared_ptr<Domain>, std::vector<int>>(), py::arg("domain"), py::arg("peers"))
      .def(
          "send",
          [](RingSet& self, int peer, std::uint64_t tag, std::string_view head, const Addresses& body) {
            std::vector<SendPart> parts;
            parts.reserve(body.size() + 1);
            parts.push_back({head.data(), head.size()});
            for (const auto& [address, bytes] : body) parts.push_back({pointer(address), bytes});
            const py::gil_scoped_release released;
            return self.send(peer, std::move(parts), tag);
          },
          py::arg("peer"), py::arg("tag"), py::arg("head"), py::arg("body"),
          "Begin a message of bytes and [(address, bytes)]. True if all of it has left; else the memory has "
          "to stay until `step` says so.")
      .def("sending", &RingSet::sending, py::arg("peer"), "Whether a message to this peer has not all left.")
      .def(
          "receive",
          [](RingSet& self, int peer, const Addresses& body) {
            return self.receive(peer, make_parts<ReceivePart>(body));
          },
          py::arg("peer"), py::arg("body"), Released(),
          "Memory for the body that was announced. True if it is there; else the memory has to stay until "
          "`step` says so.")
      .def(
          "step",
          [](RingSet& self, const char* op, double timeout, int awaited) -> py::object {
            std::optional<RingEvent> event;
            {
              const py::gil_scoped_release released;
              event = self.step(op, timeout, awaited);
            }
            if (!event) return py::none();
            return py::make_tuple(static_cast<int>(event->kind), event->peer, event->tag,
                                  py::bytes(event->head), event->bytes);
          },
          py::arg("op"), py::arg("timeout"), py::arg("awaited") = -1,
          "Move what can move, wait up to `timeout` seconds for something to happen: (0, peer, tag, head, bytes) "
          "for a message, (1, peer, ...) when its body is complete, (2, peer, ...) when one has left; None if "
          "nothing has. awaited: the peer without which there is no point in waiting; -1: none.");
}

}  // namespace tpk
