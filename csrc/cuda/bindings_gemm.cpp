// Products of sm_90, for tp_kernels/native/gemm.py.
#include <stdexcept>

#include "bindings.h"
#include "gemm_sm90/gemm_launch.h"

namespace tpk {
namespace {

using Address = std::uint64_t;
using Released = py::call_guard<py::gil_scoped_release>;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

Grid grid_of(int blocks, Address stream) { return {blocks, at<CUstream_st>(stream)}; }

void signalled(const gemm::Kind& kind, const std::vector<gemm::Pair>& pairs, Address out,
               Address counters, std::int64_t width, const Division& division, std::int64_t size,
               std::int32_t parts, std::int64_t tiles, int blocks, Address stream) {
  gemm::launch_signal(kind, pairs,
                      {{division, size, parts},
                       at<std::uint16_t>(out),
                       at<std::int32_t>(counters),
                       width,
                       ceil_div(width, kind.block_n),
                       tiles,
                       static_cast<std::int32_t>(pairs.size())},
                      grid_of(blocks, stream));
}

// outs: of every pair (address, bias or 0, rows, width).
using Out = std::tuple<Address, Address, std::int64_t, std::int64_t>;

void awaited(const gemm::Kind& kind, const std::vector<gemm::Pair>& pairs,
             const std::vector<Out>& outs, const Workspace& workspace, const Division& division,
             std::int64_t width, std::int64_t part, std::int32_t channels, int activation, bool add,
             int blocks, Address stream) {
  device::AwaitArguments arguments{};
  arguments.workspace = workspace;
  arguments.arrival = {division, width, part, channels, workspace.world};
  arguments.activation = static_cast<device::Activation>(activation);
  arguments.add = add;
  if (outs.size() != pairs.size() || outs.size() > device::kMostPairs) {
    throw std::invalid_argument(std::to_string(outs.size()) + " results for " +
                                std::to_string(pairs.size()) + " pairs of operands");
  }
  for (std::size_t i = 0; i < outs.size(); ++i) {
    const auto& [out, bias, rows, columns] = outs[i];
    const auto tiles = static_cast<std::int32_t>(ceil_div(columns, kind.block_n));
    arguments.products[i] = {at<std::uint16_t>(out), at<std::uint16_t>(bias), rows, columns, tiles};
    arguments.tiles += tiles;
    arguments.row_blocks = static_cast<std::int32_t>(
        larger(arguments.row_blocks, ceil_div(rows, kind.block_m)));
  }
  gemm::launch_await(kind, pairs, arguments, grid_of(blocks, stream));
}

void sent(const gemm::Kind& kind, const std::vector<gemm::Pair>& pairs, Address out, Address bias,
          std::int64_t width, const Division& division, const Workspace& workspace, int blocks,
          Address stream) {
  gemm::launch_send(kind, pairs,
                    {workspace, division, at<std::uint16_t>(out), at<std::uint16_t>(bias), width,
                     static_cast<std::int32_t>(ceil_div(division.most(), kind.block_m)),
                     static_cast<std::int32_t>(ceil_div(width, kind.block_n)),
                     static_cast<std::int32_t>(pairs.size())},
                    grid_of(blocks, stream));
}

const char* const kPolicies[] = {"signal", "await_rows", "await_sum", "send"};

gemm::Kind kind_of(const std::string& policy, const std::string& type, bool a_k_major, bool b_k_major,
                   int block_m, int block_n, int teams) {
  for (int i = 0; i < 4; ++i) {
    if (policy != kPolicies[i]) continue;
    const NumberType number = type == "bfloat16" ? NumberType::bfloat16 : NumberType::float16;
    return {static_cast<gemm::PolicyName>(i), number, a_k_major, b_k_major, block_m, block_n, teams};
  }
  throw std::invalid_argument("there are no products called " + policy);
}

std::vector<py::tuple> kinds() {
  std::vector<py::tuple> all;
  for (const gemm::Kind& kind : gemm::kinds()) {
    all.push_back(py::make_tuple(kPolicies[static_cast<int>(kind.policy)],
                                 kind.number == NumberType::bfloat16 ? "bfloat16" : "float16",
                                 kind.a_k_major, kind.b_k_major, kind.block_m, kind.block_n,
                                 kind.teams));
  }
  return all;
}

}  // namespace

void bind_gemm(py::module_& module) {
  py::class_<gemm::Kind>(module, "ProductKind", "Which kernel, see gemm_launch.h.")
      .def(py::init(&kind_of), py::arg("policy"), py::arg("type"), py::arg("a_k_major"),
           py::arg("b_k_major"), py::arg("block_m"), py::arg("block_n"), py::arg("teams"));
  py::class_<gemm::Matrix>(module, "ProductMatrix", "An operand, see gemm_launch.h.")
      .def(py::init([](Address address, std::int64_t rows, std::int64_t k, std::int64_t pitch) {
             return gemm::Matrix{address, rows, k, pitch};
           }),
           py::arg("address"), py::arg("rows"), py::arg("k"), py::arg("pitch"));
  py::class_<gemm::Pair>(module, "ProductPair", "Operands that are multiplied.")
      .def(py::init([](const gemm::Matrix& a, const gemm::Matrix& b) { return gemm::Pair{a, b}; }),
           py::arg("a"), py::arg("b"));
  module.def("product_kinds", &kinds, "The kernels that there are, as arguments of ProductKind.");
  module.def("signalled_product", &signalled, Released(), py::arg("kind"), py::arg("pairs"),
             py::arg("out"), py::arg("counters"), py::arg("width"), py::arg("division"),
             py::arg("size"), py::arg("parts"), py::arg("tiles"), py::arg("blocks"),
             py::arg("stream"));
  module.def("awaited_products", &awaited, Released(), py::arg("kind"), py::arg("pairs"),
             py::arg("outs"), py::arg("workspace"), py::arg("division"), py::arg("width"),
             py::arg("part"), py::arg("channels"), py::arg("activation"), py::arg("add"),
             py::arg("blocks"), py::arg("stream"));
  module.def("sent_products", &sent, Released(), py::arg("kind"), py::arg("pairs"), py::arg("out"),
             py::arg("bias"), py::arg("width"), py::arg("division"), py::arg("workspace"),
             py::arg("blocks"), py::arg("stream"));
}

}  // namespace tpk
