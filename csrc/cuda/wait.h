// A stream that waits for a flag, and one that writes it: what lies between kernels of a product
// and the collectives of another library.
#pragma once

#include "channel.h"

namespace tpk::device {

// Ends when `flag` is at least `expected`, or after `timeout` nanoseconds with a record of it; at
// once if the record has something to say already. What was stored before the flag was, is there
// for what follows in the stream.
TPK_DEVICE void wait_for(const std::int32_t* flag, std::int32_t expected, const Wait& wait,
                         std::int64_t timeout, std::int32_t* record) {
  if (load_relaxed(record + kState) == kIntact) await(flag, expected, wait, timeout, record);
}

}  // namespace tpk::device
