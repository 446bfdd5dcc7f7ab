// A POSIX shared memory object, mapped whole.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace tpk {

class Segment {
 public:
  // Makes a new object, mode 0600, with all its pages reserved: a full file system is an error
  // here and never a SIGBUS at the first store. Leaves nothing behind when it throws.
  static std::shared_ptr<Segment> create(const std::string& name, std::uint64_t size);

  // Maps an object that `create` of the same user has made with the same size.
  static std::shared_ptr<Segment> open(const std::string& name, std::uint64_t size);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Takes the name away; mappings stay. Does nothing the second time.
  void unlink();

  std::byte* base() const { return base_; }
  std::uint64_t size() const { return size_; }

 private:
  Segment(std::string name, std::byte* base, std::uint64_t size, bool linked);

  std::string name_;
  std::byte* base_;
  std::uint64_t size_;
  bool linked_;  // this object made the name and has not removed it
  pid_t owner_;  // a forked child must not remove the name
};

}  // namespace tpk
