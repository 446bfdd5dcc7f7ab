#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "fault.h"

namespace tpk {
namespace {

constexpr const char* kDirectory = "/dev/shm";

std::string path_of(const std::string& name) { return kDirectory + name; }

[[noreturn]] void fail(int code, const std::string& what, const std::string& name) {
  throw SystemError(code, what + ": " + std::strerror(code), path_of(name));
}

void check_arguments(const std::string& name, std::uint64_t size) {
  if (name.size() < 2 || name.size() > 250 || name[0] != '/' ||
      name.find('/', 1) != std::string::npos) {
    throw std::invalid_argument("segment name '" + name +
                                "' must be a slash followed by 1 to 249 other characters");
  }
  if (size == 0 || size > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max())) {
    throw std::invalid_argument("segment size " + std::to_string(size) + " is not supported");
  }
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

// Removes the name again unless the segment is complete.
class NameGuard {
 public:
  explicit NameGuard(std::string name) : name_(std::move(name)) {}
  ~NameGuard() {
    if (!name_.empty()) ::shm_unlink(name_.c_str());
  }
  void release() { name_.clear(); }

 private:
  std::string name_;
};

std::uint64_t free_bytes(int fd, const std::string& name) {
  struct statvfs info;
  if (::fstatvfs(fd, &info) != 0) fail(errno, "cannot read the free space", name);
  return static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize;
}

std::byte* map(int fd, std::uint64_t size, const std::string& name) {
  void* base = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) fail(errno, "cannot map " + std::to_string(size) + " bytes", name);
  return static_cast<std::byte*>(base);
}

}  // namespace

Segment::Segment(std::string name, std::byte* base, std::uint64_t size, bool linked)
    : name_(std::move(name)), base_(base), size_(size), linked_(linked), owner_(::getpid()) {}

Segment::~Segment() {
  ::munmap(base_, size_);
  if (linked_ && owner_ == ::getpid()) ::shm_unlink(name_.c_str());
}

std::shared_ptr<Segment> Segment::create(const std::string& name, std::uint64_t size) {
  check_arguments(name, size);
  Descriptor fd(::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, S_IRUSR | S_IWUSR));
  if (fd.get() < 0) fail(errno, "cannot create the shared segment", name);
  NameGuard guard(name);
  if (::fchmod(fd.get(), S_IRUSR | S_IWUSR) != 0) fail(errno, "cannot set the mode", name);

  const std::uint64_t free = free_bytes(fd.get(), name);
  const std::string needs = "a shared segment of " + std::to_string(size) + " bytes does not fit: " +
                            std::to_string(free) + " bytes are free in " + kDirectory;
  if (size > free) throw SystemError(ENOSPC, needs, path_of(name));
  int code = 0;
  do {
    code = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(size));
  } while (code == EINTR);
  if (code == ENOSPC) throw SystemError(ENOSPC, needs, path_of(name));
  if (code != 0) fail(code, "cannot reserve " + std::to_string(size) + " bytes", name);

  std::byte* base = map(fd.get(), size, name);
  guard.release();
  return std::shared_ptr<Segment>(new Segment(name, base, size, true));
}

std::shared_ptr<Segment> Segment::open(const std::string& name, std::uint64_t size) {
  check_arguments(name, size);
  Descriptor fd(::shm_open(name.c_str(), O_RDWR, 0));
  if (fd.get() < 0) fail(errno, "cannot open the shared segment", name);
  struct stat info;
  if (::fstat(fd.get(), &info) != 0) fail(errno, "cannot examine the shared segment", name);
  if (!S_ISREG(info.st_mode) || info.st_uid != ::geteuid() || (info.st_mode & 0777) != 0600) {
    throw SystemError(EPERM, "the shared segment is not a private file (mode 0600) of this user",
                      path_of(name));
  }
  if (static_cast<std::uint64_t>(info.st_size) != size) {
    throw SystemError(EINVAL,
                      "the shared segment has " + std::to_string(info.st_size) + " bytes, not " +
                          std::to_string(size),
                      path_of(name));
  }
  return std::shared_ptr<Segment>(new Segment(name, map(fd.get(), size, name), size, false));
}

void Segment::unlink() {
  if (!linked_ || owner_ != ::getpid()) return;
  linked_ = false;
  if (::shm_unlink(name_.c_str()) != 0 && errno != ENOENT) {
    fail(errno, "cannot unlink the shared segment", name_);
  }
}

}  // namespace tpk
