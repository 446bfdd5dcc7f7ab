// What SIMT kernels ask of the processor, and the only place of the device side with memory orders.
// Compiled for the host, against csrc/tests/simt.h, the same kernels run under sanitizers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tpk/channel.h"

#if defined(__CUDACC__)
#define TPK_DEVICE __device__ __forceinline__
#else
#define TPK_DEVICE inline
#include "simt.h"
#endif

namespace tpk::device {

#if defined(__CUDACC__)

TPK_DEVICE int thread_index() { return threadIdx.x; }
TPK_DEVICE int block_threads() { return blockDim.x; }
TPK_DEVICE int block_index() { return blockIdx.x; }
TPK_DEVICE int grid_blocks() { return gridDim.x; }

TPK_DEVICE void sync_block() { __syncthreads(); }
TPK_DEVICE bool sync_block_or(bool value) { return __syncthreads_or(value); }

// `count` threads, a multiple of 32, that all name barrier `id`, 1 to 15.
TPK_DEVICE void sync_threads(int id, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}

// Of this block; aligned to 1024 bytes.
TPK_DEVICE std::byte* shared_memory() {
  extern __shared__ __align__(1024) std::byte memory[];
  return memory;
}

// Flags that other devices poll or write: system scope.
TPK_DEVICE std::int32_t load_acquire(const std::int32_t* word) {
  std::int32_t value;
  asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
TPK_DEVICE void store_release(std::int32_t* word, std::int32_t value) {
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Counters of this device alone.
TPK_DEVICE std::int32_t add_release(std::int32_t* word, std::int32_t value) {
  std::int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(value)
               : "memory");
  return before;
}

// Plain words that another block of this device may write meanwhile; ordered by nothing.
TPK_DEVICE std::int32_t load_relaxed(const std::int32_t* word) {
  std::int32_t value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
// What no kernel writes.
TPK_DEVICE std::int64_t load_constant(const std::int64_t* word) {
  return __ldg(reinterpret_cast<const long long*>(word));
}
// True for the one who turns the word from `expected` into `value`.
TPK_DEVICE bool claim(std::int32_t* word, std::int32_t expected, std::int32_t value) {
  std::int32_t before;
  asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(word), "r"(expected), "r"(value)
               : "memory");
  return before == expected;
}

// Plain data, in one access. Of a structure of 16 bytes the compiler would sometimes make four.
template <class T>
TPK_DEVICE T load(const std::byte* at) {
  if constexpr (sizeof(T) == sizeof(uint4)) {
    const uint4 value = *reinterpret_cast<const uint4*>(at);
    return reinterpret_cast<const T&>(value);
  } else {
    return *reinterpret_cast<const T*>(at);
  }
}
template <class T>
TPK_DEVICE void store(std::byte* at, const T& value) {
  if constexpr (sizeof(T) == sizeof(uint4)) {
    *reinterpret_cast<uint4*>(at) = reinterpret_cast<const uint4&>(value);
  } else {
    *reinterpret_cast<T*>(at) = value;
  }
}

TPK_DEVICE std::int64_t nanoseconds() {
  std::int64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}
TPK_DEVICE void rest() { __nanosleep(64); }

// Programmatic dependent launch: wait for the kernel before in the stream; let the next one start.
TPK_DEVICE void await_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
TPK_DEVICE void release_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#else

using simt::add_release;
using simt::await_predecessor;
using simt::block_index;
using simt::block_threads;
using simt::claim;
using simt::grid_blocks;
using simt::load;
using simt::load_acquire;
using simt::load_constant;
using simt::load_relaxed;
using simt::nanoseconds;
using simt::release_successor;
using simt::rest;
using simt::shared_memory;
using simt::store;
using simt::store_release;
using simt::sync_block;
using simt::sync_block_or;
using simt::sync_threads;
using simt::thread_index;

#endif

}  // namespace tpk::device
