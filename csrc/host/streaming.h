// Copies of bytes, if wanted around the caches.
#pragma once

#include <cstddef>
#include <cstring>

namespace tpk {

// What is larger than the caches is not read again before it has left them: stores that go around
// them save reading every destination line first.
void streaming_copy(void* out, const void* in, std::size_t bytes);

// Does nothing if there is nothing to do: no bytes, or in place.
inline void copy_bytes(void* out, const void* in, std::size_t bytes, bool streaming = false) {
  if (bytes == 0 || out == in) return;
  streaming ? streaming_copy(out, in, bytes) : static_cast<void>(std::memcpy(out, in, bytes));
}

}  // namespace tpk
