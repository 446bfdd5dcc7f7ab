// Rings in Python: messages between two ranks.
#include <utility>
#include <vector>

#include "bindings.h"
#include "ring.h"

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
}

}  // namespace tpk
