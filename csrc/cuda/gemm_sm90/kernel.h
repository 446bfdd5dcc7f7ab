// A kernel and its entry in the table.
#pragma once

#include "gemm_sm90/instance.h"
#include "gemm_sm90/mainloop.h"

namespace tpk::gemm {

template <class Config, class Policy>
__global__ void __launch_bounds__(Config::kThreads, 1)
    product(const __grid_constant__ device::Operands operands,
            const __grid_constant__ typename Policy::Arguments arguments) {
  device::run_products<Config, Policy>(operands, arguments);
}

template <class Number>
inline constexpr NumberType kNumberType = NumberType::bfloat16;
template <>
inline constexpr NumberType kNumberType<device::Float16> = NumberType::float16;

template <class Config, template <class> class Policy>
Instance instance(PolicyName policy) {
  static_assert(sizeof(device::Shared<Config>) <= device::kMostSharedBytes);
  return {{policy, kNumberType<typename Config::Number>, Config::kMajorA == device::Major::K,
           Config::kMajorB == device::Major::K, Config::kM, Config::kN, Config::kTeams},
          reinterpret_cast<const void*>(&product<Config, Policy<Config>>),
          Config::kThreads,
          sizeof(device::Shared<Config>)};
}

}  // namespace tpk::gemm
