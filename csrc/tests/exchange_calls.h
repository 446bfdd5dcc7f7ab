// Calls of the kernels that exchange data: operands of all ranks, what must come out, and the
// launch.
#pragma once

#include "all_gather.h"
#include "all_reduce.h"
#include "exchange.h"
#include "reduce_scatter.h"
#include "rms_norm.h"

namespace tpk::test {

enum class Kernel {
  one_shot,
  two_shots,
  by_switch,
  scatter,
  gather,
  norm_one_shot,
  norm_two_shots
};
inline constexpr Kernel kKernels[] = {
    Kernel::one_shot, Kernel::two_shots,     Kernel::by_switch,     Kernel::scatter,
    Kernel::gather,   Kernel::norm_one_shot, Kernel::norm_two_shots};

struct Call {
  Kernel kernel;
  Dtype dtype = Dtype::float32;
  std::int64_t rows = 1;
  std::int64_t width = 1;
  std::size_t shift = 0;  // elements that operands are away from an aligned address
  std::size_t out_shift = 0;
  bool in_place = false;
  bool bias = true, residual = true;  // of the norms
  std::uint64_t seed = 1;

  std::size_t size() const { return width_of(dtype); }
  bool norm() const { return kernel == Kernel::norm_one_shot || kernel == Kernel::norm_two_shots; }
  bool twice() const { return kernel == Kernel::two_shots || kernel == Kernel::norm_two_shots; }
  // Rows divided over ranks, in bytes.
  Division division(int world) const {
    const std::int64_t row = width * static_cast<std::int64_t>(size());
    return {rows / world * row, row, static_cast<std::int32_t>(rows % world)};
  }
};

inline constexpr float kEpsilon = 1e-5f;

// Of all ranks. Memory of results is full of NaN.
struct Operands {
  Operands(const Call& call, int world) {
    Random random(call.seed);
    const std::size_t size = call.size();
    for (int rank = 0; rank < world; ++rank) {
      const Division rows = call.division(world);
      const bool part = call.kernel == Kernel::gather;
      const std::size_t all = call.rows * call.width * size;
      const std::size_t own = rows.rows(rank);
      given.push_back(random_values(call.dtype, (part ? own : all) / size, random));
      xs.emplace_back(given.back(), call.shift * size);
      outs.emplace_back(call.kernel == Kernel::scatter ? own : all, call.out_shift * size);
      if (call.norm()) sums_with_residual.emplace_back(all, call.out_shift * size);
    }
    if (!call.norm()) return;
    weight.emplace_back(random_values(call.dtype, call.width, random), call.shift * size);
    bias.emplace_back(random_values(call.dtype, call.width, random), call.shift * size);
    residual.emplace_back(random_values(call.dtype, call.rows * call.width, random),
                          call.shift * size);
  }

  std::vector<Bytes> given;
  std::vector<Memory> xs, outs, sums_with_residual, weight, bias, residual;
};

// Blocks of a launch: as many channels as have a round.
inline int blocks_of(const Call& call, const Exchange& exchange, std::int64_t part) {
  const int world = exchange.world();
  const std::int64_t bytes = call.rows * call.width * static_cast<std::int64_t>(call.size());
  const bool divided = call.kernel == Kernel::scatter || call.kernel == Kernel::gather;
  const std::int64_t all = call.norm() ? call.rows : divided ? call.division(world).most() : bytes;
  const std::int64_t rounds = ceil_div(all, part * (call.twice() ? world : 1));
  return static_cast<int>(smaller(exchange.channels(), rounds));
}

// Of a block: one polls for each rank, and several are more than one.
inline int threads_of(const Exchange& exchange) { return std::max(4, exchange.world()); }

template <class Number>
void run_kernel(const Call& call, Operands& operands, const Workspace& w, std::int32_t part) {
  const std::byte* x = operands.xs[w.rank].data();
  std::byte* out = (call.in_place ? operands.xs : operands.outs)[w.rank].data();
  const std::int64_t bytes = call.rows * call.width * static_cast<std::int64_t>(call.size());
  switch (call.kernel) {
    case Kernel::one_shot:
      return device::all_reduce_one_shot<Number>(x, out, bytes, part, w);
    case Kernel::two_shots:
      return device::all_reduce_two_shots<Number>(x, out, bytes, part, w);
    case Kernel::by_switch:
      return device::all_reduce_by_switch<Number>(x, out, bytes, part, 0, w);
    case Kernel::scatter:
      return device::reduce_scatter<Number>(x, out, call.division(w.world), part, w);
    case Kernel::gather:
      return device::all_gather<typename Number::Piece>(x, out, call.division(w.world), part, w);
    default:
      break;
  }
  const NormOperands o{x,
                       call.bias ? operands.bias[0].data() : nullptr,
                       call.residual ? operands.residual[0].data() : nullptr,
                       operands.weight[0].data(),
                       nullptr,
                       out,
                       operands.sums_with_residual[w.rank].data(),
                       call.rows,
                       static_cast<std::int32_t>(call.width),
                       kEpsilon};
  if (call.twice()) return device::all_reduce_rms_norm_two_shots<Number>(o, part, w);
  return device::all_reduce_rms_norm_one_shot<Number>(o, part, w);
}

// Full chunks, of the norms in rows.
inline std::int32_t part_of(const Call& call, const Workspace& w) {
  const std::int64_t row = ceil_div(call.width * static_cast<std::int64_t>(call.size()), 16) * 16;
  return static_cast<std::int32_t>(call.norm() ? w.chunk / row : w.chunk);
}

inline void launch(const Call& call, Operands& operands, Exchange& exchange, int rank) {
  const Workspace& w = exchange.workspace(rank);
  const std::int32_t part = part_of(call, w);
  const int threads = threads_of(exchange);
  const std::size_t shared = norm_shared_bytes(threads);
  const std::uint64_t schedule = call.seed * 31 + rank;
  simt::run({blocks_of(call, exchange, part), threads, shared, schedule}, [&] {
    with_number(call.dtype,
                [&](auto number) { run_kernel<decltype(number)>(call, operands, w, part); });
  });
}

// s of the norms, as separate operations would give it.
inline Bytes sums_and_residual(const Call& call, Operands& operands) {
  const std::size_t count = call.rows * call.width, size = call.size();
  Bytes result(count * size);
  for (std::size_t i = 0; i < count; ++i) {
    float sum = sum_of(call.dtype, operands.given, i);
    const std::byte* bias = operands.bias[0].data();
    if (call.bias) sum += static_cast<float>(decode(call.dtype, bias, i % call.width));
    std::byte* at = result.data() + i * size;
    encode(call.dtype, sum, at);
    if (!call.residual) continue;
    const float more = static_cast<float>(decode(call.dtype, operands.residual[0].data(), i));
    encode(call.dtype, static_cast<float>(decode(call.dtype, at, 0)) + more, at);
  }
  return result;
}

// y is the norm of s, up to the order in which squares are summed.
inline void check_norm(const Call& call, Operands& operands, const Bytes& s, const Bytes& y) {
  for (std::int64_t row = 0; row < call.rows; ++row) {
    double squares = 0;
    for (std::int64_t i = 0; i < call.width; ++i) {
      const double value = decode(call.dtype, s.data(), row * call.width + i);
      squares += value * value;
    }
    const double factor = 1 / std::sqrt(squares / static_cast<double>(call.width) + kEpsilon);
    for (std::int64_t i = 0; i < call.width; ++i) {
      const double exact = decode(call.dtype, s.data(), row * call.width + i) * factor *
                           decode(call.dtype, operands.weight[0].data(), i);
      const double error = std::abs(decode(call.dtype, y.data(), row * call.width + i) - exact);
      const double rounded =
          2.1 * epsilon(call.dtype) + static_cast<double>(call.width + 4) * 0x1p-24;
      CHECK(error <= rounded * std::abs(exact) + 0x1p-24);  // false for NaN, so for what is missing
    }
  }
}

inline void check(const Call& call, Operands& operands, Exchange& exchange) {
  const int world = exchange.world();
  Bytes expected;
  if (call.kernel == Kernel::gather) {
    for (const Bytes& part : operands.given) {
      expected.insert(expected.end(), part.begin(), part.end());
    }
  } else {
    expected = call.norm() ? sums_and_residual(call, operands)
                           : sums(call.dtype, operands.given, 0, call.rows * call.width);
  }
  const Bytes first = (call.in_place ? operands.xs : operands.outs)[0].bytes();
  if (call.norm()) check_norm(call, operands, expected, first);
  for (int rank = 0; rank < world; ++rank) {
    const Bytes out = (call.in_place ? operands.xs : operands.outs)[rank].bytes();
    if (call.norm()) {
      CHECK(operands.sums_with_residual[rank].bytes() == expected);
      CHECK(out == first);
    } else if (call.kernel == Kernel::scatter) {
      const auto start = expected.begin() + call.division(world).start(rank);
      CHECK(out == Bytes(start, start + call.division(world).rows(rank)));
    } else {
      CHECK(out == expected);
    }
  }
}

// All calls in a row on every rank, which nothing else keeps in step. Rank `slow` begins each one
// late.
inline void run_calls(const std::vector<Call>& calls, int world, const ExchangeOptions& options,
                      int slow = -1) {
  Exchange exchange(world, options);
  std::vector<Operands> operands;
  for (const Call& call : calls) operands.emplace_back(call, world);
  exchange.run([&](int rank) {
    for (std::size_t i = 0; i < calls.size(); ++i) {
      if (rank == slow) pause(2);
      launch(calls[i], operands[i], exchange, rank);
    }
  });
  CHECK(exchange.intact());
  for (std::size_t i = 0; i < calls.size(); ++i) check(calls[i], operands[i], exchange);
}

}  // namespace tpk::test
