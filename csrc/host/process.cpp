#include "process.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace tpk {
namespace {

struct Stat {
  char state = 0;  // 0: no such process, or no /proc
  std::uint64_t start_time = 0;
};

Stat read_stat(pid_t pid) {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%ld/stat", static_cast<long>(pid));
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  char text[1024];
  const ssize_t length = ::read(fd, text, sizeof(text) - 1);
  ::close(fd);
  if (length <= 0) return {};
  text[length] = '\0';
  // The command in field 2 may hold spaces and parentheses: fields are counted from its end.
  const char* field = std::strrchr(text, ')');
  if (field == nullptr || field[1] != ' ') return {};
  field += 2;
  Stat stat;
  stat.state = *field;
  for (int number = 3; number < 22; ++number) {
    field = std::strchr(field, ' ');
    if (field == nullptr) return stat;
    ++field;
  }
  stat.start_time = std::strtoull(field, nullptr, 10);
  return stat;
}

std::atomic<unsigned> generation{0};

// Registered before any rank can exist.
const int registered = ::pthread_atfork(nullptr, nullptr, [] { ++generation; });

int open_pidfd(pid_t pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
#else
  (void)pid;
  errno = ENOSYS;
  return -1;
#endif
}

}  // namespace

unsigned fork_generation() {
  static_cast<void>(registered);
  return generation.load(std::memory_order_relaxed);
}

std::uint64_t process_start_time(pid_t pid) { return read_stat(pid).start_time; }

bool share_cores(const std::vector<pid_t>& processes) {
  // A call fails with more than CPU_SETSIZE cores, which are enough, and for a process that has ended.
  cpu_set_t own, all;
  CPU_ZERO(&own);
  if (::sched_getaffinity(0, sizeof(own), &own) != 0) return false;
  all = own;
  int sharing = 0, confined = 0;
  for (const pid_t process : processes) {
    cpu_set_t cores, common;
    CPU_ZERO(&cores);
    if (::sched_getaffinity(process, sizeof(cores), &cores) != 0) continue;
    CPU_AND(&common, &own, &cores);
    if (CPU_COUNT(&common) == 0) continue;
    CPU_OR(&all, &all, &cores);
    ++sharing;
    confined += CPU_EQUAL(&common, &cores) ? 1 : 0;
  }
  return sharing > CPU_COUNT(&all) || confined > CPU_COUNT(&own);
}

ProcessWatch::ProcessWatch(pid_t pid, std::uint64_t start_time)
    : pid_(pid), start_time_(start_time), fd_(open_pidfd(pid)) {
  // The pidfd may already be of a process that was given the pid of one that ended.
  gone_ = (fd_ < 0 && errno == ESRCH) || ended_by_stat();
}

ProcessWatch::~ProcessWatch() {
  if (fd_ >= 0) ::close(fd_);
}

bool ProcessWatch::ended() const {
  if (gone_) return true;
  if (fd_ < 0) return ended_by_stat();
  pollfd entry{fd_, POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0 && (entry.revents & POLLIN) != 0;
}

bool ProcessWatch::stopped() const {
  const char state = read_stat(pid_).state;
  return state == 'T' || state == 't';
}

bool ProcessWatch::ended_by_stat() const {
  const Stat stat = read_stat(pid_);
  if (stat.state == 0) return ::kill(pid_, 0) != 0 && errno == ESRCH;
  if (stat.state == 'Z' || stat.state == 'X') return true;
  return start_time_ != 0 && stat.start_time != start_time_;
}

}  // namespace tpk
