// A thread that reduces published rounds while the caller computes the next ones.
//
// Worth having where a core is free for it. Where none is, the caller reduces between its products.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "slot.h"

namespace tpk {

class Reducer {
 public:
  explicit Reducer(Slot& slot);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Returns when a buffer of this rank is free, so that a round may begin.
  void make_room();
  // `task` reads and finishes the oldest round that no task was submitted for; it must be published.
  void submit(std::function<void()> task);
  // Returns when all that was submitted is done; throws what the thread has thrown.
  void join();
  // What is not done is given up, and this rank with it. Returns when nothing is written any more.
  void abandon(const std::string& reason);

 private:
  void work();
  template <class Ready>
  void wait(std::unique_lock<std::mutex>& lock, Ready ready);

  Slot& slot_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;  // the first one is in work
  std::exception_ptr error_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace tpk
