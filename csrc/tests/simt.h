// Runs kernels written against csrc/cuda/device.h on the host. A block is a thread of the system and its
// CUDA threads are fibers, each of which the sanitizers take for a thread of its own: what a kernel's
// barriers, releases and acquires do not order, ThreadSanitizer reports.
//
// Fibers change only where a kernel waits or touches a flag, to one chosen at random: seeds are schedules.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace tpk::simt {

struct Launch {
  int blocks;
  int threads;
  std::size_t shared_bytes = 0;
  std::uint64_t seed = 1;
};

inline constexpr std::size_t kStackBytes = 128 << 10;

class Block {
 public:
  Block(const Launch& launch, int index, const std::function<void()>& kernel)
      : launch_(launch), index_(index), kernel_(kernel), random_(launch.seed * 7919 + index) {}

  // Runs all threads of the block to their end.
  void run() {
    // Aligned as dynamic shared memory of a kernel is asked to be, and full of NaN.
    memory_.reset(static_cast<std::byte*>(
        std::aligned_alloc(1024, (launch_.shared_bytes + 1023) / 1024 * 1024 + 1024)));
    for (std::size_t i = 0; i < launch_.shared_bytes; ++i) memory_.get()[i] = std::byte{0xff};
    fibers_ = std::vector<Fiber>(launch_.threads);
    current_block() = this;
#if defined(__SANITIZE_THREAD__)
    scheduler_.tsan = __tsan_get_current_fiber();
#endif
    for (int i = 0; i < launch_.threads; ++i) start(i);
    std::vector<int> running(launch_.threads);
    for (int i = 0; i < launch_.threads; ++i) running[i] = i;
    while (!running.empty()) {
      const std::size_t pick = random_() % running.size();
      Fiber& fiber = fibers_[running[pick]];
      active_.store(running[pick], std::memory_order_relaxed);
      enter(fiber);
      if (fiber.ended.load(std::memory_order_acquire)) {
        running[pick] = running.back();
        running.pop_back();
      }
      // Other ranks may have to go on for this block to.
      if (random_() % (2 * launch_.threads) == 0) std::this_thread::yield();
    }
    for (Fiber& fiber : fibers_) finish(fiber);
    current_block() = nullptr;
  }

  // Lets other threads of the block run.
  void pause() { leave(fibers_[thread()]); }

  // Returns when `count` threads have come to barrier `id`.
  void sync(int id, int count) {
    Barrier& barrier = barriers_[id];
    const std::uint32_t generation = barrier.generation.load(std::memory_order_acquire);
    if (barrier.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
      barrier.arrived.store(0, std::memory_order_relaxed);
      barrier.generation.store(generation + 1, std::memory_order_release);
    }
    while (barrier.generation.load(std::memory_order_acquire) == generation) pause();
  }

  // As sync of all threads; whether `value` is true for one of them.
  bool sync_or(bool value) {
    if (value) any_.store(true, std::memory_order_relaxed);
    sync(0, launch_.threads);
    const bool any = any_.load(std::memory_order_relaxed);
    sync(0, launch_.threads);
    any_.store(false, std::memory_order_relaxed);
    sync(0, launch_.threads);
    return any;
  }

  void let_successor_start() { successor_.store(true, std::memory_order_relaxed); }

  // No wait comes after it, or the next kernel could take the place of the one that is waited for.
  void check_wait() const {
    if (!successor_.load(std::memory_order_relaxed)) return;
    std::fprintf(stderr, "a block waits that has let the next kernel start\n");
    std::abort();
  }

  const Launch& launch() const { return launch_; }
  int index() const { return index_; }
  int thread() const { return active_.load(std::memory_order_relaxed); }
  std::byte* memory() { return memory_.get(); }

  static Block*& current_block() {
    static thread_local Block* block = nullptr;
    return block;
  }

 private:
  struct Fiber {
    ucontext_t context;
    void* stack = nullptr;
    std::atomic<bool> ended{false};
    void* tsan = nullptr;
    void* fake_stack = nullptr;
  };
  struct Barrier {
    std::atomic<int> arrived{0};
    std::atomic<std::uint32_t> generation{0};
  };
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  void start(int index) {
    Fiber& fiber = fibers_[index];
    fiber.stack = ::mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fiber.stack == MAP_FAILED) std::abort();
    ::getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    ::makecontext(&fiber.context, &Block::main, 0);
#if defined(__SANITIZE_THREAD__)
    fiber.tsan = __tsan_create_fiber(0);
#endif
  }

  static void finish(Fiber& fiber) {
#if defined(__SANITIZE_THREAD__)
    __tsan_destroy_fiber(fiber.tsan);
#endif
    ::munmap(fiber.stack, kStackBytes);
  }

  static void main() {
    Block& block = *current_block();
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack_, &block.scheduler_bytes_);
#endif
    block.kernel_();
    Fiber& fiber = block.fibers_[block.thread()];
    fiber.ended.store(true, std::memory_order_release);
    block.leave(fiber);
  }

  // From the scheduler to a fiber, and back. No order between the two is meant: barriers give it.
  void enter(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&scheduler_.fake_stack, fiber.stack, kStackBytes);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(fiber.tsan, __tsan_switch_to_fiber_no_sync);
#endif
    ::swapcontext(&scheduler_.context, &fiber.context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(scheduler_.fake_stack, nullptr, nullptr);
#endif
  }

  void leave(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
    void** keep = fiber.ended.load(std::memory_order_relaxed) ? nullptr : &fiber.fake_stack;
    __sanitizer_start_switch_fiber(keep, scheduler_stack_, scheduler_bytes_);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(scheduler_.tsan, __tsan_switch_to_fiber_no_sync);
#endif
    ::swapcontext(&fiber.context, &scheduler_.context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fiber.fake_stack, &scheduler_stack_, &scheduler_bytes_);
#endif
  }

  const Launch launch_;
  const int index_;
  const std::function<void()>& kernel_;
  std::minstd_rand random_;
  std::unique_ptr<std::byte, Free> memory_;
  std::vector<Fiber> fibers_;
  Fiber scheduler_;
  const void* scheduler_stack_ = nullptr;
  std::size_t scheduler_bytes_ = 0;
  std::atomic<int> active_{0};
  Barrier barriers_[16];
  std::atomic<bool> any_{false};
  std::atomic<bool> successor_{false};
};

// Runs `kernel` on all threads of all blocks at the same time; returns when they have ended.
inline void run(const Launch& launch, const std::function<void()>& kernel) {
  std::vector<std::thread> threads;
  for (int index = 0; index < launch.blocks; ++index) {
    threads.emplace_back([&, index] { Block(launch, index, kernel).run(); });
  }
  for (std::thread& thread : threads) thread.join();
}

inline Block& block() { return *Block::current_block(); }

inline int thread_index() { return block().thread(); }
inline int block_threads() { return block().launch().threads; }
inline int block_index() { return block().index(); }
inline int grid_blocks() { return block().launch().blocks; }
inline std::byte* shared_memory() { return block().memory(); }

inline void sync_block() { block().sync(0, block().launch().threads); }
inline bool sync_block_or(bool value) { return block().sync_or(value); }
inline void sync_threads(int id, int count) { block().sync(id, count); }

template <class T>
void check_alignment(const std::byte* at) {
  if (reinterpret_cast<std::uintptr_t>(at) % alignof(T) == 0) return;
  std::fprintf(stderr, "access of %zu bytes at %p\n", sizeof(T), static_cast<const void*>(at));
  std::abort();
}

template <class Word>
auto& atomic(Word* word) {
  using Value = std::remove_const_t<Word>;
  static_assert(sizeof(std::atomic<Value>) == sizeof(Value));
  return *reinterpret_cast<std::atomic<Value>*>(const_cast<Value*>(word));
}

inline std::int32_t load_acquire(const std::int32_t* word) {
  block().check_wait();
  block().pause();
  return atomic(word).load(std::memory_order_acquire);
}
inline void store_release(std::int32_t* word, std::int32_t value) {
  atomic(word).store(value, std::memory_order_release);
  block().pause();
}
inline std::int32_t add_release(std::int32_t* word, std::int32_t value) {
  block().pause();
  return atomic(word).fetch_add(value, std::memory_order_acq_rel);
}
inline std::int32_t load_relaxed(const std::int32_t* word) {
  return atomic(word).load(std::memory_order_relaxed);
}
inline bool claim(std::int32_t* word, std::int32_t expected, std::int32_t value) {
  return atomic(word).compare_exchange_strong(expected, value, std::memory_order_relaxed);
}

inline std::int64_t load_constant(const std::int64_t* word) { return *word; }

// Objects of the caller are of other types; and not aligned, this is an error as on a GPU.
template <class T>
T load(const std::byte* at) {
  check_alignment<T>(at);
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}
template <class T>
void store(std::byte* at, const T& value) {
  check_alignment<T>(at);
  std::memcpy(at, &value, sizeof(T));
}

inline std::int64_t nanoseconds() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}
inline void rest() {
  block().pause();
  std::this_thread::yield();
}
inline void await_predecessor() {}
inline void release_successor() { block().let_successor_start(); }

}  // namespace tpk::simt
