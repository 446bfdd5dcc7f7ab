// The memory of a caller that a message is gathered from or scattered to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

namespace tpk {

struct SendPart {
  const void* data;
  std::uint64_t bytes;
};

struct ReceivePart {
  void* data;
  std::uint64_t bytes;
};

template <class Part>
std::uint64_t total_of(const std::vector<Part>& parts) {
  std::uint64_t total = 0;
  for (const Part& part : parts) {
    if (part.data == nullptr && part.bytes != 0) {
      throw std::invalid_argument("a null address with a size that is not zero");
    }
    if (__builtin_add_overflow(total, part.bytes, &total) ||
        total > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      throw std::invalid_argument("the parts of a message are larger than 2^63 bytes");
    }
  }
  return total;
}

inline void copy(const SendPart& part, std::uint64_t offset, std::byte* cell, std::uint64_t bytes) {
  std::memcpy(cell, static_cast<const std::byte*>(part.data) + offset, bytes);
}

inline void copy(const ReceivePart& part, std::uint64_t offset, const std::byte* cell,
                 std::uint64_t bytes) {
  std::memcpy(static_cast<std::byte*>(part.data) + offset, cell, bytes);
}

// Where the next byte of a message is in the memory of the caller. The parts have to stay where they are.
template <class Part>
class Cursor {
 public:
  Cursor() = default;
  explicit Cursor(const std::vector<Part>& parts) : parts_(&parts) {}

  // Between there and a cell, by the direction of `Part`.
  template <class Cell>
  void move(Cell* cell, std::uint64_t bytes) {
    while (bytes != 0) {
      const Part& part = (*parts_)[index_];
      const std::uint64_t length = std::min(bytes, part.bytes - offset_);
      if (length != 0) copy(part, offset_, cell, length);
      cell += length;
      bytes -= length;
      offset_ += length;
      if (offset_ == part.bytes) {
        ++index_;
        offset_ = 0;
      }
    }
  }

 private:
  const std::vector<Part>* parts_ = nullptr;
  std::size_t index_ = 0;
  std::uint64_t offset_ = 0;  // in that part
};

}  // namespace tpk
