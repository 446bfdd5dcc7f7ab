#include "isa.h"

#ifdef TPK_HAVE_AVX2
#include <cpuid.h>
#endif

#include <cstdlib>
#include <stdexcept>

namespace tpk {
namespace {

#ifdef TPK_HAVE_AVX2
bool cpu_has_avx2() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  // These also ask the operating system.
  return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#endif

#ifdef TPK_HAVE_AVX512
bool cpu_has_avx512() {  // each question is also one to the operating system
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

std::vector<const Isa*> find_isas() {
  std::vector<const Isa*> isas{&kScalarIsa};
#ifdef TPK_HAVE_AVX2
  if (cpu_has_avx2()) isas.push_back(&kAvx2Isa);
#endif
#ifdef TPK_HAVE_AVX512
  if (cpu_has_avx512()) isas.push_back(&kAvx512Isa);
#endif
#ifdef TPK_HAVE_NEON
  isas.push_back(&kNeonIsa);  // every 64-bit Arm processor has it
#endif
  return isas;
}

}  // namespace

const std::vector<const Isa*>& available_isas() {
  static const auto isas = find_isas();  // a question to the processor costs much on a virtual one
  return isas;
}

const Isa& select_isa() {
  const auto& isas = available_isas();
  const char* wanted = std::getenv("TP_KERNELS_ISA");
  if (wanted == nullptr || *wanted == '\0') return *isas.back();
  std::string names;
  for (const Isa* isa : isas) {
    if (std::string(wanted) == isa->name) return *isa;
    names += (names.empty() ? "" : ", ") + std::string(isa->name);
  }
  throw std::invalid_argument("TP_KERNELS_ISA=" + std::string(wanted) +
                              ": this build on this processor can run: " + names);
}

}  // namespace tpk
