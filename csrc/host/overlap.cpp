#include "overlap.h"

#include <chrono>
#include <utility>

namespace tpk {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(20);

}  // namespace

Reducer::Reducer(Slot& slot) : slot_(slot), thread_([this] { work(); }) {}

Reducer::~Reducer() {
  abandon("left in the middle of a reduction");
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Reducer::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !tasks_.empty(); });
    if (stop_) return;
    const auto task = tasks_.front();
    lock.unlock();
    std::exception_ptr error;
    try {
      task();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error) {
      error_ = error;
      tasks_.clear();
    } else {
      tasks_.pop_front();
    }
    changed_.notify_all();
  }
}

// The thread bounds its own waits; this one only has to notice what concerns the caller.
template <class Ready>
void Reducer::wait(std::unique_lock<std::mutex>& lock, Ready ready) {
  while (!ready()) {
    if (error_) std::rethrow_exception(error_);
    changed_.wait_for(lock, kSlice);
    lock.unlock();
    slot_.domain().run_hook();
    lock.lock();
  }
  if (error_) std::rethrow_exception(error_);
}

void Reducer::make_room() {
  std::unique_lock lock(mutex_);
  wait(lock, [&] { return slot_.open_rounds() < slot_.buffers() || tasks_.empty(); });
}

void Reducer::submit(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_all();
}

void Reducer::join() {
  std::unique_lock lock(mutex_);
  wait(lock, [&] { return tasks_.empty(); });
}

void Reducer::abandon(const std::string& reason) {
  std::unique_lock lock(mutex_);
  if (tasks_.empty()) return;
  lock.unlock();
  slot_.domain().fail(reason);  // ends the wait of the thread
  lock.lock();
  changed_.wait(lock, [&] { return tasks_.empty(); });
}

}  // namespace tpk
