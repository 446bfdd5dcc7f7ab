// Kernels that exchange data, and waits, for tp_kernels/native.
#include "bindings.h"
#include "collectives_launch.h"

namespace tpk {
namespace {

using Address = std::uint64_t;
using Released = py::call_guard<py::gil_scoped_release>;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

NumberType number_of(const std::string& name) {
  if (name == "float32") return NumberType::float32;
  if (name == "bfloat16") return NumberType::bfloat16;
  if (name == "float16") return NumberType::float16;
  throw std::invalid_argument("there are no kernels for numbers of type " + name);
}

Way way_of(const std::string& name) {
  if (name == "one_shot") return Way::one_shot;
  if (name == "two_shots") return Way::two_shots;
  if (name == "by_switch") return Way::by_switch;
  throw std::invalid_argument("there is no way of summing called " + name);
}

// A block that makes no round would not keep its epoch (see leave), and parts are whole lines.
void check(std::int64_t part, int blocks, std::int64_t rounds) {
  if (part <= 0 || part % 16 != 0 || blocks <= 0 || blocks > rounds) {
    throw std::invalid_argument("parts of " + std::to_string(part) + " bytes in " +
                                std::to_string(blocks) + " blocks, of which " +
                                std::to_string(rounds) + " have one");
  }
}

Grid grid_of(int blocks, Address stream) { return {blocks, at<CUstream_st>(stream)}; }

void all_reduce(const std::string& way, const std::string& type, Address x, Address out,
                std::int64_t bytes, std::int32_t part, std::int64_t multicast,
                const Workspace& workspace, int blocks, Address stream) {
  const std::int64_t share = way == "two_shots" ? std::int64_t{part} * workspace.world : part;
  check(part, blocks, part > 0 ? ceil_div(bytes, share) : 0);
  launch_all_reduce(way_of(way), number_of(type), at<std::byte>(x), at<std::byte>(out), bytes, part,
                    multicast, workspace, grid_of(blocks, stream));
}

void reduce_scatter(const std::string& type, Address x, Address out, const Division& division,
                    std::int32_t part, const Workspace& workspace, int blocks, Address stream) {
  check(part, blocks, part > 0 ? ceil_div(division.most(), part) : 0);
  launch_reduce_scatter(number_of(type), at<std::byte>(x), at<std::byte>(out), division, part,
                        workspace, grid_of(blocks, stream));
}

void all_gather(int piece, Address x, Address out, const Division& division, std::int32_t part,
                const Workspace& workspace, int blocks, Address stream) {
  check(part, blocks, part > 0 ? ceil_div(division.most(), part) : 0);
  launch_all_gather(piece, at<std::byte>(x), at<std::byte>(out), division, part, workspace,
                    grid_of(blocks, stream));
}

void all_reduce_rms_norm(const std::string& way, const std::string& type, Address x, Address bias,
                         Address residual, Address weight, Address scale, Address y, Address s,
                         std::int64_t rows, std::int32_t width, float epsilon, std::int32_t part,
                         const Workspace& workspace, int blocks, Address stream) {
  const std::int64_t share = way == "two_shots" ? std::int64_t{part} * workspace.world : part;
  check(std::int64_t{part} * 16, blocks, part > 0 ? ceil_div(rows, share) : 0);
  const NormOperands operands{at<std::byte>(x),
                              at<std::byte>(bias),
                              at<std::byte>(residual),
                              at<std::byte>(weight),
                              at<float>(scale),
                              at<std::byte>(y),
                              at<std::byte>(s),
                              rows,
                              width,
                              epsilon};
  launch_all_reduce_rms_norm(way_of(way), number_of(type), operands, part, workspace,
                             grid_of(blocks, stream));
}

void wait_for(Address flag, std::int32_t expected, Address record, std::int64_t timeout,
              const Wait& wait, Address stream) {
  launch_wait(at<std::int32_t>(flag), expected, wait, timeout, at<std::int32_t>(record),
              at<CUstream_st>(stream));
}

py::dict constants() {
  py::dict found;
  found["MOST_RANKS"] = kMostRanks;
  found["READY"] = kReady;
  found["CREDIT"] = kCredit;
  found["EPOCH"] = kEpoch;
  found["DONE"] = kDone;
  found["FINISHED"] = kFinished;
  found["SIGNAL_BYTES"] = kSignalBytes;
  found["RECORD"] =
      std::vector<int>{kState, kRank, kOperation, kChannel, kSignal, kPeer, kExpected, kSeen};
  found["INTACT"] = static_cast<int>(kIntact);
  found["FAILED"] = static_cast<int>(kFailed);
  return found;
}

}  // namespace

void bind_collectives(py::module_& module) {
  py::class_<Workspace>(module, "Workspace", "What kernels need to know, see channel.h.")
      .def(py::init([](Address table, Address record, std::int64_t stride, std::int64_t chunk,
                       std::int64_t timeout, std::int32_t rank, std::int32_t world,
                       std::int32_t depth, std::int32_t operation) {
             return Workspace{at<std::int64_t>(table),
                              at<std::int32_t>(record),
                              stride,
                              chunk,
                              timeout,
                              rank,
                              world,
                              depth,
                              operation};
           }),
           py::arg("table"), py::arg("record"), py::arg("stride"), py::arg("chunk"),
           py::arg("timeout"), py::arg("rank"), py::arg("world"), py::arg("depth"),
           py::arg("operation"))
      .def("buffer_offset", &buffer_offset, py::arg("channel"), py::arg("epoch"),
           py::arg("source"));

  py::class_<Division>(module, "Division", "Sizes of the parts of ranks, see order.h.")
      .def(py::init([](std::int64_t small, std::int64_t unit, std::int32_t more) {
             return Division{small, unit, more};
           }),
           py::arg("small"), py::arg("unit"), py::arg("more"))
      .def("start", &Division::start)
      .def("rows", &Division::rows);

  py::class_<Wait>(module, "Wait", "How a record names a wait that expired.")
      .def(py::init([](std::int32_t rank, std::int32_t operation, std::int32_t channel,
                       std::int32_t signal,
                       std::int32_t peer) { return Wait{rank, operation, channel, signal, peer}; }),
           py::arg("rank"), py::arg("operation"), py::arg("channel"), py::arg("signal"),
           py::arg("peer"));

  module.def("constants", &constants, "The numbers of channel.h.");
  module.def("all_reduce", &all_reduce, Released(), py::arg("way"), py::arg("type"), py::arg("x"),
             py::arg("out"), py::arg("bytes"), py::arg("part"), py::arg("multicast"),
             py::arg("workspace"), py::arg("blocks"), py::arg("stream"));
  module.def("reduce_scatter", &reduce_scatter, Released(), py::arg("type"), py::arg("x"),
             py::arg("out"), py::arg("division"), py::arg("part"), py::arg("workspace"),
             py::arg("blocks"), py::arg("stream"));
  module.def("all_gather", &all_gather, Released(), py::arg("piece"), py::arg("x"), py::arg("out"),
             py::arg("division"), py::arg("part"), py::arg("workspace"), py::arg("blocks"),
             py::arg("stream"));
  module.def("all_reduce_rms_norm", &all_reduce_rms_norm, Released(), py::arg("way"),
             py::arg("type"), py::arg("x"), py::arg("bias"), py::arg("residual"), py::arg("weight"),
             py::arg("scale"), py::arg("y"), py::arg("s"), py::arg("rows"), py::arg("width"),
             py::arg("epsilon"), py::arg("part"), py::arg("workspace"), py::arg("blocks"),
             py::arg("stream"));
  module.def("wait_for", &wait_for, Released(), py::arg("flag"), py::arg("expected"),
             py::arg("record"), py::arg("timeout"), py::arg("wait"), py::arg("stream"));
  module.def(
      "write_flag",
      [](Address flag, std::int32_t value, Address stream) {
        write_flag(at<std::int32_t>(flag), value, at<CUstream_st>(stream));
      },
      Released(), py::arg("flag"), py::arg("value"), py::arg("stream"));
}

}  // namespace tpk
