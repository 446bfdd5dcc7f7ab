// One call at a time on an object that threads share, and none after a fault.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>

#include "domain.h"

namespace tpk {

// What a call is, in the sentences about what went wrong.
struct Entry {
  const char* op;
  const char* object;
  int slot = -1;  // as in a Fault
};

// Counters at the moment of an interruption, as in a Fault.
struct Progress {
  std::uint32_t expected = 0;
  std::uint32_t seen = 0;
};

class Exclusive {
 public:
  // Runs `call` as the only one. A fault is permanent: the counters of ranks that left a call half-way no longer
  // agree, and nobody knows how much of a message has arrived. Anything else that interrupts a call, but for a
  // refusal of wrong arguments, is a fault too, which the peers are told.
  template <class Call, class Asked = Progress (*)()>
  auto run(Domain& domain, const Entry& entry, Call&& call, Asked progress = [] { return Progress{}; }) {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) {
      throw std::logic_error(std::string(entry.op) + ": another thread is using " + entry.object);
    }
    domain.check_process();
    if (broken_) throw Fault(*broken_);
    domain.check_member(entry.slot, entry.op);
    try {
      return call();
    } catch (const Fault& fault) {
      broken_ = fault;
      throw;
    } catch (const std::logic_error&) {
      throw;  // refused before anything was moved or published
    } catch (...) {
      interrupt(domain, entry, progress());
      throw;
    }
  }

 private:
  void interrupt(Domain& domain, const Entry& entry, Progress progress) {
    const std::string detail = std::string("interrupted in ") + entry.op;
    broken_ = Fault(FaultKind::closed, domain.rank(), entry.slot, entry.op, progress.expected, progress.seen,
                    detail);
    domain.fail(detail);
  }

  std::mutex mutex_;
  std::optional<Fault> broken_;
};

}  // namespace tpk
