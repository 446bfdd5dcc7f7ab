// Where things are in a symmetric segment:
//
//   Control | RankStatus[world] | bell[world] | slot 0 | slot 1 | ... | ring 0 -> 1 | ring 0 -> 2 | ...
//   slot:       rank 0 | rank 1 | ...
//   rank area:  Signals | Descriptor[buffers] | buffer 0 | buffer 1 | ...
//   ring:       RingSignals | where[ring_cells] | cell 0 | cell 1 | ...
//   cell:       MessageHeader | ring_cell_bytes bytes
//
// There is a ring for every ordered pair of ranks, or none at all. With `ring_reach`, those of ranks further apart
// (the last rank is next to the first) come last and have `ring_far_cells` cells. Rank areas, buffers and rings
// start on pages of their own, cells on cache lines. All offsets are 64-bit.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "tpk/signal.h"

namespace tpk {

inline constexpr std::uint32_t kMagic = 0x314b5054;  // "TPK1"
inline constexpr std::uint32_t kLayoutVersion = 3;
inline constexpr std::uint64_t kPage = 4096;

struct Shape {
  std::uint32_t world;
  std::uint32_t slots;
  std::uint64_t capacity;        // bytes of one buffer
  std::uint32_t buffers;         // per rank and slot
  std::uint32_t ring_cells = 0;  // 0: no rings
  std::uint64_t ring_cell_bytes = 0;
  std::uint32_t ring_reach = 0;  // 0: all rings are alike
  std::uint32_t ring_far_cells = 0;
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

struct RingSignals {
  Signal sent;      // cells filled; written by the source
  Signal received;  // cells read, the credit; written by the destination
};

// In the first cell of a message. The payload goes on in the cells that follow.
struct alignas(64) MessageHeader {
  std::uint64_t tag;
  std::uint64_t bytes;  // of the payload
  std::uint64_t head;   // of these, what describes the rest; see RingSet
};

static_assert(sizeof(Control) == 128 && sizeof(RankStatus) == 256 && sizeof(Descriptor) == 64);

class Layout {
 public:
  explicit Layout(const Shape& shape) : shape_(shape) {
    require(shape.world >= 1 && shape.world <= 1024, "world", "1..1024", shape.world);
    require(shape.slots >= (shape.ring_cells ? 0 : 1) && shape.slots <= 65536, "slots",
            "1..65536, or 0 with rings", shape.slots);
    require(shape.buffers >= 1 && shape.buffers <= 64, "buffers", "1..64", shape.buffers);
    // Every rank's share of a reduce-scatter chunk must hold an element.
    require(shape.capacity >= 64 && shape.capacity / 64 >= shape.world / 8 &&
                shape.capacity <= (std::uint64_t{1} << 44),
            "capacity", "64 bytes (8 per rank) to 2^44 bytes", shape.capacity);
    require(shape.ring_cells <= 65536, "ring_cells", "0..65536", shape.ring_cells);
    require((shape.ring_cells == 0) == (shape.ring_cell_bytes == 0) &&
                shape.ring_cell_bytes <= (std::uint64_t{1} << 40),
            "ring_cell_bytes", "1 to 2^40 bytes with rings, 0 without", shape.ring_cell_bytes);
    require(shape.ring_reach < shape.world, "ring_reach", "less than world", shape.ring_reach);
    require((shape.ring_reach == 0) == (shape.ring_far_cells == 0) && shape.ring_far_cells <= 65536,
            "ring_far_cells", "1..65536 with ring_reach, 0 without", shape.ring_far_cells);
    stride_ = round_up(shape.capacity, kPage);
    buffers_offset_ = round_up(sizeof(Signals) + shape.buffers * sizeof(Descriptor), kPage);
    area_ = buffers_offset_ + shape.buffers * stride_;
    slots_offset_ = round_up(
        sizeof(Control) + shape.world * (sizeof(RankStatus) + sizeof(Signal)), kPage);
    if (shape.ring_cells != 0) {
      cell_stride_ = sizeof(MessageHeader) + round_up(shape.ring_cell_bytes, sizeof(MessageHeader));
      ring_ = round_up(cells_offset(shape.ring_cells) + shape.ring_cells * cell_stride_, kPage);
      far_ring_ = round_up(cells_offset(shape.ring_far_cells) + shape.ring_far_cells * cell_stride_, kPage);
    }
    std::uint64_t slots = 0, rings = 0, far = 0;
    if (__builtin_mul_overflow(area_, std::uint64_t{shape.world} * shape.slots, &slots) ||
        __builtin_mul_overflow(ring_, std::uint64_t{near_count()}, &rings) ||
        __builtin_mul_overflow(far_ring_, std::uint64_t{ring_count() - near_count()}, &far) ||
        __builtin_add_overflow(rings, far, &rings) ||
        __builtin_add_overflow(slots, slots_offset_, &rings_offset_) ||
        __builtin_add_overflow(rings, rings_offset_, &bytes_) ||
        bytes_ > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      throw std::invalid_argument("a segment of this shape is larger than 2^63 bytes");
    }
  }

  const Shape& shape() const { return shape_; }
  std::uint64_t bytes() const { return bytes_; }

  Control& control(std::byte* base) const { return *reinterpret_cast<Control*>(base); }

  RankStatus& status(std::byte* base, std::uint32_t rank) const {
    return *reinterpret_cast<RankStatus*>(base + sizeof(Control) + rank * sizeof(RankStatus));
  }

  Signal& bell(std::byte* base, std::uint32_t rank) const {
    return *reinterpret_cast<Signal*>(base + sizeof(Control) + shape_.world * sizeof(RankStatus) +
                                      rank * sizeof(Signal));
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

  std::uint32_t ring_count() const {
    return shape_.ring_cells ? shape_.world * (shape_.world - 1) : 0;
  }

  // Of two different ranks.
  std::uint32_t ring(std::uint32_t source, std::uint32_t destination) const {
    const std::uint32_t ahead = (destination + shape_.world - source) % shape_.world;
    const std::uint32_t near = near_of_rank(), far = shape_.world - 1 - near;
    if (far == 0) return source * near + ahead - 1;
    const std::uint32_t reach = shape_.ring_reach;
    if (ahead <= reach) return source * near + ahead - 1;
    if (shape_.world - ahead <= reach) return source * near + near - (shape_.world - ahead);
    return near_count() + source * far + ahead - reach - 1;
  }

  std::uint32_t cells(std::uint32_t ring) const {
    return ring < near_count() ? shape_.ring_cells : shape_.ring_far_cells;
  }

  RingSignals& ring_signals(std::byte* base, std::uint32_t ring) const {
    return *reinterpret_cast<RingSignals*>(base + ring_offset(ring));
  }

  // Which cell is the one sent as number `index` (modulo cells): a source takes the free one that was used last,
  // which is the likeliest to be in the caches.
  std::uint32_t& where(std::byte* base, std::uint32_t ring, std::uint32_t index) const {
    return reinterpret_cast<std::uint32_t*>(base + ring_offset(ring) + sizeof(RingSignals))[index];
  }

  MessageHeader& message_header(std::byte* base, std::uint32_t ring, std::uint32_t cell) const {
    return *reinterpret_cast<MessageHeader*>(this->cell(base, ring, cell));
  }

  std::byte* payload(std::byte* base, std::uint32_t ring, std::uint32_t cell) const {
    return this->cell(base, ring, cell) + sizeof(MessageHeader);
  }

 private:
  static std::uint64_t cells_offset(std::uint32_t cells) {
    return sizeof(RingSignals) + round_up(cells * sizeof(std::uint32_t), sizeof(Signal));
  }

  std::uint32_t near_of_rank() const {
    const std::uint32_t peers = shape_.world - 1;
    return shape_.ring_reach == 0 ? peers : std::min(2 * shape_.ring_reach, peers);
  }

  std::uint32_t near_count() const { return shape_.ring_cells ? shape_.world * near_of_rank() : 0; }

  std::uint64_t ring_offset(std::uint32_t ring) const {
    const std::uint64_t near = std::min(ring, near_count());
    return rings_offset_ + near * ring_ + (ring - near) * far_ring_;
  }

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

  std::byte* cell(std::byte* base, std::uint32_t ring, std::uint32_t cell) const {
    return base + ring_offset(ring) + cells_offset(cells(ring)) + cell * cell_stride_;
  }

  Shape shape_;
  std::uint64_t stride_ = 0;          // from one buffer to the next
  std::uint64_t buffers_offset_ = 0;  // of buffer 0 in a rank area
  std::uint64_t area_ = 0;            // size of a rank area
  std::uint64_t slots_offset_ = 0;
  std::uint64_t cell_stride_ = 0;  // from one cell to the next
  std::uint64_t ring_ = 0;         // size of a ring
  std::uint64_t far_ring_ = 0;
  std::uint64_t rings_offset_ = 0;
  std::uint64_t bytes_ = 0;
};

}  // namespace tpk
