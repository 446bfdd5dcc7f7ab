// The host's side of csrc/cuda/hopper.h. Tensor loads are made by a unit of their own, in any order and
// not before somebody waits for them; ThreadSanitizer takes it for a thread. Products are computed when
// they are waited for, from descriptors of shared memory and into the sums of each thread, as the
// processor lays them out. So who reads too early, or gives memory back too early, gets wrong numbers or
// a data race.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "simt.h"

#if !defined(TPK_PATIENCE_SECONDS)
#define TPK_PATIENCE_SECONDS 50  // as exchange.h
#endif

namespace tpk::simt {

// Of 2-byte numbers; boxes whose rows are 128 bytes in shared memory.
struct TensorMap {
  const std::uint16_t* base;
  std::int64_t columns, rows;
  std::int64_t pitch;  // numbers from one row to the next
  int box_columns, box_rows;
};

inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(static_cast<const std::byte*>(pointer) - shared_memory());
}
// Lines of 128 bytes keep their 16-byte chunks at places that depend on the line.
inline std::uint32_t swizzled(std::uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// Only relaxed operations on words of the emulation itself: the emulation must not order anything.
template <class T>
struct Word {
  std::atomic<T> value{};
  operator T() const { return value.load(std::memory_order_relaxed); }
  void operator=(T other) { value.store(other, std::memory_order_relaxed); }
  void operator=(const Word& other) { *this = static_cast<T>(other); }
};

struct Barrier;
inline void make_some_loads();

struct Barrier {
  Word<int> count, missing;
  Word<std::int64_t> bytes;
  std::atomic<int> order;  // what comes before an arrival comes before the end of the phase
  std::atomic<std::uint32_t> phases;

  void init(int arrivals) {
    count = arrivals;
    missing = arrivals;
    bytes = 0;
    order.store(0, std::memory_order_relaxed);
    phases.store(0, std::memory_order_release);
  }
  void arrive() {
    block().pause();
    order.fetch_add(1, std::memory_order_acq_rel);
    if (missing == 0) fail("more arrivals at a barrier than it has");
    missing = missing - 1;
    end_phase();
  }
  void arrive_and_expect(int announced) {
    bytes = bytes + announced;
    arrive();
  }
  void complete(int arrived) {
    order.fetch_add(1, std::memory_order_acq_rel);
    bytes = bytes - arrived;
    end_phase();
  }
  void wait(std::uint32_t parity) {
    const auto begin = std::chrono::steady_clock::now();
    block().pause();
    while ((phases.load(std::memory_order_acquire) & 1) == parity) {
      make_some_loads();
      block().pause();
      if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(5 + TPK_PATIENCE_SECONDS)) {
        fail("a barrier is waited for in vain");
      }
    }
  }
  static void fail(const char* what) {
    std::fprintf(stderr, "%s\n", what);
    std::abort();
  }

 private:
  void end_phase() {
    if (missing == 0 && bytes == 0) {
      missing = count;
      phases.fetch_add(1, std::memory_order_acq_rel);
    }
  }
};

// Tensor loads of a block that have been asked for and not been made.
struct Loads {
  struct Load {
    Word<const TensorMap*> map;
    Word<Barrier*> barrier;
    Word<std::byte*> to;
    Word<std::int32_t> x, y;

    void operator=(const Load& other) {
      map = other.map;
      barrier = other.barrier;
      to = other.to;
      x = other.x;
      y = other.y;
    }
  };
  static constexpr int kMost = 256;
  Load load[kMost];
  Word<int> count;
  Word<std::uint32_t> dice;
  std::atomic<int> asked{0};
  Word<void*> unit;  // a fiber of ThreadSanitizer that never runs anything else
};
inline Loads& loads() {
  static thread_local Loads all{};
  return all;
}

// Checks at the end of a block that nothing is on its way any more.
struct LoadsEnd {
  LoadsEnd() {
#if defined(__SANITIZE_THREAD__)
    loads().unit = __tsan_create_fiber(0);
#endif
  }
  ~LoadsEnd() {
    if (loads().count != 0) Barrier::fail("a block has ended before its tensor loads");
#if defined(__SANITIZE_THREAD__)
    __tsan_destroy_fiber(loads().unit);
#endif
  }
};

inline void load_box(const TensorMap* map, Barrier* barrier, std::byte* to, std::int32_t x,
                     std::int32_t y) {
  static thread_local LoadsEnd end;
  Loads& all = loads();
  if (all.count == Loads::kMost) Barrier::fail("too many tensor loads on their way");
  Loads::Load& load = all.load[all.count];
  load.map = map;
  load.barrier = barrier;
  load.to = to;
  load.x = x;
  load.y = y;
  all.count = all.count + 1;
  all.asked.fetch_add(1, std::memory_order_release);
}

inline void make_load(const TensorMap& map, std::byte* to, std::int32_t x, std::int32_t y) {
  const std::uint32_t start = shared_address(to);
  if (start % 1024) Barrier::fail("a tensor load to a place that is not 1024-byte aligned");
  for (int row = 0; row < map.box_rows; ++row) {
    for (int column = 0; column < map.box_columns; column += 8) {
      std::uint16_t chunk[8] = {};
      for (int i = 0; i < 8; ++i) {
        const bool inside = y + row < map.rows && x + column + i < map.columns;
        if (inside) chunk[i] = map.base[(y + row) * map.pitch + x + column + i];
      }
      std::memcpy(shared_memory() + swizzled(start + row * 128 + column * 2), chunk, 16);
    }
  }
}

inline void make_some_loads() {
  Loads& all = loads();
  all.dice = all.dice * 1664525u + 1013904223u;
  const std::uint32_t dice = all.dice >> 8;
  if (all.count == 0 || dice % 4 != 0) return;
  Loads::Load& load = all.load[dice / 4 % all.count];
  const TensorMap* map = load.map;
  Barrier* barrier = load.barrier;
  std::byte* to = load.to;
  const std::int32_t x = load.x, y = load.y;
  Loads::Load& last = all.load[all.count - 1];
  load = last;
  all.count = all.count - 1;
#if defined(__SANITIZE_THREAD__)
  void* self = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(all.unit, __tsan_switch_to_fiber_no_sync);
#endif
  all.asked.load(std::memory_order_acquire);
  make_load(*map, to, x, y);
  barrier->complete(map->box_rows * map->box_columns * 2);
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(self, __tsan_switch_to_fiber_no_sync);
#endif
}

// Barriers of warps.
inline void sync_warp() {
  struct Warp {
    std::atomic<int> arrived{0};
    std::atomic<std::uint32_t> generation{0};
  };
  static thread_local Warp warps[32]{};
  Warp& warp = warps[thread_index() / 32];
  const std::uint32_t generation = warp.generation.load(std::memory_order_acquire);
  if (warp.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == 32) {
    warp.arrived.store(0, std::memory_order_relaxed);
    warp.generation.store(generation + 1, std::memory_order_release);
  }
  while (warp.generation.load(std::memory_order_acquire) == generation) block().pause();
}

// An operand of `multiply` in shared memory, by the fields of its descriptor.
struct Operand {
  std::uint64_t descriptor;
  bool k_major;

  std::uint16_t at(int row, int k) const {
    const auto start = static_cast<std::uint32_t>(descriptor & 0x3fff) << 4;
    const auto leading = static_cast<std::uint32_t>(descriptor >> 16 & 0x3fff) << 4;
    const auto stride = static_cast<std::uint32_t>(descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1) Barrier::fail("a descriptor without swizzle");
    const std::uint32_t offset =
        k_major ? row / 8 * stride + row % 8 * 128 + k * 2
                : row / 64 * leading + row % 64 * 2 + k / 8 * stride + k % 8 * 128;
    std::uint16_t value;
    std::memcpy(&value, shared_memory() + swizzled(start + offset), 2);
    return value;
  }
};

template <class Number>
float widen(std::uint16_t bits) {
  float pair[2];
  Number::widen(bits, pair);
  return pair[0];
}

// Products of one thread.
class Products {
 public:
  ~Products() {
    if (!open_.empty() || !committed_.empty()) Barrier::fail("products that nobody has waited for");
  }
  template <class Number, int N>
  void multiply(float* sums, Operand a, Operand b) {
    open_.push_back([=] {
      const int lane = thread_index() % 32, warp = thread_index() / 32 % 4;
      for (int h = 0; h < 2; ++h) {
        float row[16];
        for (int k = 0; k < 16; ++k) row[k] = widen<Number>(a.at(16 * warp + lane / 4 + 8 * h, k));
        for (int j = 0; j < N / 8; ++j) {
          for (int e = 0; e < 2; ++e) {
            float& sum = sums[4 * j + 2 * h + e];
            float total = sum;
            for (int k = 0; k < 16; ++k) {
              total += row[k] * widen<Number>(b.at(8 * j + 2 * (lane % 4) + e, k));
            }
            sum = total;
          }
        }
      }
    });
  }
  void commit() {
    committed_.push_back(std::move(open_));
    open_.clear();
  }
  void wait(int left) {
    while (static_cast<int>(committed_.size()) > left) {
      for (const auto& product : committed_.front()) product();
      committed_.erase(committed_.begin());
    }
    sync_warp();  // its instruction is one of the whole warp
  }

 private:
  std::vector<std::function<void()>> open_;
  std::vector<std::vector<std::function<void()>>> committed_;
};

}  // namespace tpk::simt
