// Where things are in a symmetric segment:
//
//   Control | RankStatus[world] | slot 0 | slot 1 | ...
//   slot:       rank 0 | rank 1 | ...
//   rank area:  Signals | Descriptor[buffers] | buffer 0 | buffer 1 | ...
//
// Rank areas and buffers start on pages of their own. All offsets are 64-bit.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "tpk/signal.h"

namespace tpk {

inline constexpr std::uint32_t kMagic = 0x314b5054;  // "TPK1"
inline constexpr std::uint32_t kLayoutVersion = 2;
inline constexpr std::uint64_t kPage = 4096;

struct Shape {
  std::uint32_t world;
  std::uint32_t slots;
  std::uint64_t capacity;  // bytes of one buffer
  std::uint32_t buffers;   // per rank and slot
};

// Sizes in bytes from which ranks go another way; all ranks must go the same, see csrc/host/tuning.h.
struct Tuning {
  std::uint64_t two_shot;           // reduce in two shots what has to be copied into buffers first,
  std::uint64_t two_shot_resident;  // and what is in them already
  std::uint64_t piece;              // longer messages move in pieces of this size
  std::uint64_t streaming;          // results of this size bypass the caches
};

struct alignas(64) Control {
  std::atomic<std::uint32_t> magic;  // published last
  std::uint32_t version;
  Shape shape;
  std::uint64_t bytes;
  Tuning tuning;
};

enum class RankState : std::uint32_t { absent = 0, alive = 1, closed = 2, failed = 3 };

struct alignas(64) RankStatus {
  std::atomic<std::uint32_t> state;  // published after the other members
  std::int64_t pid;
  std::uint64_t start_time;  // with pid, names a process for good: pids are reused
  char message[192];         // why it failed, zero-terminated
};

// What a rank believes a round to be. Peers compare it with their own before they read data.
struct alignas(64) Descriptor {
  std::uint32_t op;
  std::uint32_t dtype;
  std::int64_t d[3];
};

struct Signals {
  Signal ready;    // rounds published
  Signal reduced;  // rounds whose part this rank has reduced in place
  Signal done;     // rounds read
};

static_assert(sizeof(Control) == 128 && sizeof(RankStatus) == 256 && sizeof(Descriptor) == 64);

class Layout {
 public:
  explicit Layout(const Shape& shape) : shape_(shape) {
    require(shape.world >= 1 && shape.world <= 1024, "world", "1..1024", shape.world);
    require(shape.slots >= 1 && shape.slots <= 65536, "slots", "1..65536", shape.slots);
    require(shape.buffers >= 1 && shape.buffers <= 64, "buffers", "1..64", shape.buffers);
    // Every rank's share of a reduce-scatter chunk must hold an element.
    require(shape.capacity >= 64 && shape.capacity / 64 >= shape.world / 8 &&
                shape.capacity <= (std::uint64_t{1} << 44),
            "capacity", "64 bytes (8 per rank) to 2^44 bytes", shape.capacity);
    stride_ = round_up(shape.capacity, kPage);
    buffers_offset_ = round_up(sizeof(Signals) + shape.buffers * sizeof(Descriptor), kPage);
    area_ = buffers_offset_ + shape.buffers * stride_;
    slots_offset_ = round_up(sizeof(Control) + shape.world * sizeof(RankStatus), kPage);
    std::uint64_t data = 0;
    if (__builtin_mul_overflow(area_, std::uint64_t{shape.world} * shape.slots, &data) ||
        data > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) - slots_offset_) {
      throw std::invalid_argument("a segment of this shape is larger than 2^63 bytes");
    }
    bytes_ = slots_offset_ + data;
  }

  const Shape& shape() const { return shape_; }
  std::uint64_t bytes() const { return bytes_; }

  Control& control(std::byte* base) const { return *reinterpret_cast<Control*>(base); }

  RankStatus& status(std::byte* base, std::uint32_t rank) const {
    return *reinterpret_cast<RankStatus*>(base + sizeof(Control) + rank * sizeof(RankStatus));
  }

  Signals& signals(std::byte* base, std::uint32_t slot, std::uint32_t rank) const {
    return *reinterpret_cast<Signals*>(area(base, slot, rank));
  }

  Descriptor& descriptor(std::byte* base, std::uint32_t slot, std::uint32_t rank,
                         std::uint32_t index) const {
    return *reinterpret_cast<Descriptor*>(area(base, slot, rank) + sizeof(Signals) +
                                          index * sizeof(Descriptor));
  }

  std::byte* buffer(std::byte* base, std::uint32_t slot, std::uint32_t rank,
                    std::uint32_t index) const {
    return area(base, slot, rank) + buffers_offset_ + index * stride_;
  }

 private:
  static std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
    return (value + unit - 1) / unit * unit;
  }

  static void require(bool holds, const char* name, const char* range, std::uint64_t value) {
    if (!holds) {
      throw std::invalid_argument(std::string(name) + "=" + std::to_string(value) +
                                  " is not in the supported range: " + range);
    }
  }

  std::byte* area(std::byte* base, std::uint32_t slot, std::uint32_t rank) const {
    return base + slots_offset_ + (std::uint64_t{slot} * shape_.world + rank) * area_;
  }

  Shape shape_;
  std::uint64_t stride_ = 0;          // from one buffer to the next
  std::uint64_t buffers_offset_ = 0;  // of buffer 0 in a rank area
  std::uint64_t area_ = 0;            // size of a rank area
  std::uint64_t slots_offset_ = 0;
  std::uint64_t bytes_ = 0;
};

}  // namespace tpk
