// From which sizes on which way of doing a collective is faster. Only speed depends on these numbers.
//
// Ranks must agree on them, so the rank that formats a segment writes its own into it.
#pragma once

#include <cstdint>
#include <string>

#include "tpk/layout.h"

namespace tpk {

// The measured numbers for this instruction set and the largest measured world that is not larger.
Tuning tuning_for(const std::string& isa, std::uint32_t world);

}  // namespace tpk
