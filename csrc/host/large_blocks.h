// Memory of large results that is used again.
//
// The C library maps a large allocation anew, and every page of it is zeroed when it is first touched, which
// takes longer than the copy that fills it. So the blocks that were freed last are kept for the next ones of
// about their size, up to `kMostBytes` in a process.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

namespace tpk {

class LargeBlocks {
 public:
  static constexpr std::size_t kLarge = 128 << 10;  // from where the C library may map
  static constexpr std::size_t kMostBytes = 128 << 20;

  static LargeBlocks& instance();

  // Memory of at least `bytes`, which becomes the true size; null if there is none. Aligned for tensors.
  void* take(std::size_t& bytes);
  // Back what `take` gave, with the size that it said.
  void give(void* memory, std::size_t bytes);

 private:
  struct Free {
    void* memory;
    std::size_t bytes;
  };

  std::mutex mutex_;
  std::vector<Free> free_;  // the one freed last at the end
  std::size_t kept_ = 0;    // bytes of all of them
};

}  // namespace tpk
