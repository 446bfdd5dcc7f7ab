// For aarch64: every such processor has NEON, with conversions between float16 and float32. These
// keep subnormals: FZ16, the mode that flushes half precision, is for arithmetic only. And they
// need not keep NaN: a sum becomes canonical before it is narrowed.
#include <arm_neon.h>

#include "tpk/convert.h"
#include "isa.h"
#include "product_vector.h"
#include "reduce_vector.h"

namespace tpk {
namespace {

// As bytes, which have no alignment.
uint8x16_t load16(const void* p) { return vld1q_u8(static_cast<const std::uint8_t*>(p)); }
void store16(void* p, uint8x16_t v) { vst1q_u8(static_cast<std::uint8_t*>(p), v); }

struct Sum8 {
  float32x4_t first, second;
};

float32x4_t canonical(float32x4_t v) {
  return vbslq_f32(vceqq_f32(v, v), v, vreinterpretq_f32_u32(vdupq_n_u32(kCanonicalNan)));
}

Sum8 canonical(Sum8 sum) { return {canonical(sum.first), canonical(sum.second)}; }

struct Lanes8 {
  using Sum = Sum8;
  static constexpr std::size_t kLanes = 8;
  static constexpr std::size_t kTile = 8;
  static Sum add(Sum a, Sum b) {
    return {vaddq_f32(a.first, b.first), vaddq_f32(a.second, b.second)};
  }
  static Sum zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
  static Sum multiply_add(Sum sum, Sum a, Sum b) {
    return {vfmaq_f32(sum.first, a.first, b.first), vfmaq_f32(sum.second, a.second, b.second)};
  }
  static float total(Sum sum) { return vaddvq_f32(vaddq_f32(sum.first, sum.second)); }
};

struct Float32Vector : Lanes8, OnCopy<Float32Vector, float> {
  using Storage = float;
  static Sum load(const Storage* p) {
    return {vreinterpretq_f32_u8(load16(p)), vreinterpretq_f32_u8(load16(p + 4))};
  }
  static void store(Storage* p, Sum sum) {
    sum = canonical(sum);
    store16(p, vreinterpretq_u8_f32(sum.first));
    store16(p + 4, vreinterpretq_u8_f32(sum.second));
  }
};

struct Bfloat16Vector : Lanes8, OnCopy<Bfloat16Vector, std::uint16_t> {
  using Storage = std::uint16_t;
  static Sum load(const Storage* p) {
    const uint16x8_t halves = vreinterpretq_u16_u8(load16(p));
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(halves, 16))};
  }
  static void store(Storage* p, Sum sum) {
    sum = canonical(sum);
    const uint32x4_t first = vreinterpretq_u32_f32(sum.first);
    const uint32x4_t second = vreinterpretq_u32_f32(sum.second);
    const uint16x4_t low = vaddhn_u32(first, term(first));  // the upper half of every sum
    store16(p, vreinterpretq_u8_u16(vaddhn_high_u32(low, second, term(second))));
  }
  static uint32x4_t term(uint32x4_t bits) {  // as in Bfloat16::narrow
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vaddq_u32(odd, vdupq_n_u32(0x7fff));
  }
};

struct Float16Vector : Lanes8, OnCopy<Float16Vector, std::uint16_t> {
  using Storage = std::uint16_t;
  static Sum load(const Storage* p) {
    const float16x8_t halves = vreinterpretq_f16_u8(load16(p));
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
  }
  static void store(Storage* p, Sum sum) {
    sum = canonical(sum);
    store16(p, vreinterpretq_u8_f16(vcvt_high_f16_f32(vcvt_f16_f32(sum.first), sum.second)));
  }
};

}  // namespace

const Isa kNeonIsa = {"neon",
                      {reduce<Float32Vector>, reduce<Bfloat16Vector>, reduce<Float16Vector>},
                      {product<Float32Vector, Float32>, product<Bfloat16Vector, Bfloat16>,
                       product<Float16Vector, Float16>}};

}  // namespace tpk
