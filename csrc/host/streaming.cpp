#include "streaming.h"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tpk {

void streaming_copy(void* out, const void* in, std::size_t bytes) {
#if defined(__SSE2__)
  constexpr std::size_t kLine = 64;
  auto* to = static_cast<std::byte*>(out);
  const auto* from = static_cast<const std::byte*>(in);
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % kLine;
  if (bytes >= head + kLine) {
    std::memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    for (; bytes >= kLine; to += kLine, from += kLine, bytes -= kLine) {
      __m128i quarter[4];
      for (int i = 0; i < 4; ++i) {
        quarter[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
      }
      for (int i = 0; i < 4; ++i) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, quarter[i]);
      }
    }
    // These stores are not ordered by a release: whoever publishes next relies on this fence.
    _mm_sfence();
  }
  if (bytes != 0) std::memcpy(to, from, bytes);
#else
  if (bytes != 0) std::memcpy(out, in, bytes);
#endif
}

}  // namespace tpk
