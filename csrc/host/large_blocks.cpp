#include "large_blocks.h"

#include <cstdlib>

namespace tpk {
namespace {

constexpr std::size_t kAlignment = 64;  // of every tensor of torch

}  // namespace

LargeBlocks& LargeBlocks::instance() {
  static LargeBlocks* const blocks = new LargeBlocks;  // tensors may be freed after static objects
  return *blocks;
}

void* LargeBlocks::take(std::size_t& bytes) {
  if (bytes >= kLarge) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = free_.size(); i-- > 0;) {
      const Free found = free_[i];
      if (found.bytes < bytes || found.bytes - bytes > bytes / 8) continue;
      free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
      kept_ -= found.bytes;
      bytes = found.bytes;
      return found.memory;
    }
  }
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return std::aligned_alloc(kAlignment, bytes);
}

void LargeBlocks::give(void* memory, std::size_t bytes) {
  std::vector<Free> old;  // freed without the lock
  if (bytes < kLarge || bytes > kMostBytes) {
    old.push_back({memory, bytes});
  } else {
    const std::lock_guard lock(mutex_);
    free_.push_back({memory, bytes});
    kept_ += bytes;
    while (kept_ > kMostBytes) {
      old.push_back(free_.front());
      kept_ -= free_.front().bytes;
      free_.erase(free_.begin());
    }
  }
  for (const Free& block : old) std::free(block.memory);
}

}  // namespace tpk
