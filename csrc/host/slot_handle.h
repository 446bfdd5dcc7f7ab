// A slot as Python holds it: with its thread and its default timeout.
#pragma once

#include <memory>
#include <optional>

#include "overlap.h"
#include "slot.h"

namespace tpk {

struct SlotHandle {
  SlotHandle(std::shared_ptr<Domain> domain, int index) : slot(std::move(domain), index) {}

  // The thread that reduces in the background, from its first use on.
  Reducer& reducer() {
    if (!thread) thread = std::make_unique<Reducer>(slot);
    return *thread;
  }

  double seconds(std::optional<double> timeout) const {
    const double result = timeout.value_or(slot.domain().timeout());
    check_timeout(result);  // also by calls that need not wait
    return result;
  }

  Slot slot;
  std::unique_ptr<Reducer> thread;  // goes before the slot does
};

// The steps of a round that are left once its buffer is filled: `out` becomes the sum.
inline void complete(Slot& slot, const Descriptor& descriptor, void* out, std::uint64_t count,
                     Bias bias, double timeout) {
  slot.publish(descriptor);
  slot.reduce_all({out, count, Dtype{descriptor.dtype}, bias}, timeout);
  slot.finish();
}

}  // namespace tpk
