// Is another process still there?
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

namespace tpk {

// Start of `pid` in clock ticks since boot; 0 if it is not known.
std::uint64_t process_start_time(pid_t pid);

// Whether these processes, of which this is one, may have to take turns on its cores: more of them use cores of
// this one, or no other cores, than those are.
bool share_cores(const std::vector<pid_t>& processes);

// Changes in every child that fork() makes. Unlike getpid() it costs no system call, so that every call
// of a collective can look at it.
unsigned fork_generation();

// One particular process, also after its pid has been given to another one.
class ProcessWatch {
 public:
  ProcessWatch(pid_t pid, std::uint64_t start_time);
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  bool ended() const;
  bool stopped() const;  // by SIGSTOP, a terminal or a debugger
  pid_t pid() const { return pid_; }

 private:
  bool ended_by_stat() const;

  pid_t pid_;
  std::uint64_t start_time_;
  int fd_ = -1;  // pidfd; -1 where the kernel has none
  bool gone_ = false;
};

}  // namespace tpk
