#include "collectives.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "streaming.h"

namespace tpk {
namespace {

// A piece that is still in the caches of its writer when its peers read it is worth more rounds.
std::uint64_t elements_per_piece(const Slot& slot, Dtype dtype) {
  return std::min(slot.capacity(), slot.domain().tuning().piece) / size_of(dtype);
}

std::uint64_t divide_up(std::uint64_t a, std::uint64_t b) { return a / b + (a % b != 0); }

void check(const Slot& slot, const void* in, std::uint64_t in_count, const void* out,
           std::uint64_t out_count) {
  if (!slot.idle()) {
    throw std::logic_error("finish the rounds of this slot before a collective uses it");
  }
  if ((in == nullptr && in_count != 0) || (out == nullptr && out_count != 0)) {
    throw std::invalid_argument("a null address with a count that is not zero");
  }
}

void check_reducible(Dtype dtype) {
  if (!is_reducible(dtype)) throw std::invalid_argument("this dtype cannot be reduced");
}

// Where the parts of the ranks are in the whole.
struct Parts {
  Parts(const Slot& slot, const std::vector<std::uint64_t>& counts, Dtype dtype) : counts(counts) {
    if (counts.size() != static_cast<std::size_t>(slot.world())) {
      throw std::invalid_argument(std::to_string(counts.size()) + " counts for " +
                                  std::to_string(slot.world()) + " ranks");
    }
    const std::uint64_t limit = std::numeric_limits<std::int64_t>::max() / size_of(dtype);
    for (const std::uint64_t count : counts) {
      starts.push_back(total);
      if (count > limit - total) throw std::invalid_argument("counts are too large");
      total += count;
      largest = std::max(largest, count);
      digest = (digest ^ count) * 0x100000001b3;  // FNV-1a, in words
    }
  }

  Descriptor descriptor(std::uint32_t op, Dtype dtype, std::uint64_t piece) const {
    return {op, static_cast<std::uint32_t>(dtype),
            {static_cast<std::int64_t>(total), static_cast<std::int64_t>(digest),
             static_cast<std::int64_t>(piece)}};
  }

  const std::vector<std::uint64_t>& counts;
  std::vector<std::uint64_t> starts;
  std::uint64_t total = 0;
  std::uint64_t largest = 0;
  std::uint64_t digest = 0xcbf29ce484222325;
};

// Runs fill(piece, buffer) + publish and drain(piece) + finish for every piece. The next piece is
// published before this one is drained, so that no rank waits for another's copy.
template <class Describe, class Fill, class Drain>
void pipeline(Slot& slot, std::uint64_t pieces, double timeout, Describe describe, Fill fill,
              Drain drain) {
  const std::uint64_t ahead = std::min<std::uint64_t>(slot.buffers(), 2);
  std::uint64_t published = 0;
  for (std::uint64_t piece = 0; piece < pieces; ++piece) {
    for (; published < std::min(pieces, piece + ahead); ++published) {
      fill(published, slot.buffer(slot.rank(), slot.begin(timeout)));
      slot.publish(describe(published));
    }
    drain(piece);
    slot.finish();
  }
}

}  // namespace

void all_reduce(Slot& slot, const void* in, void* out, std::uint64_t count, Dtype dtype,
                std::uint32_t op, double timeout, Shots shots, Bias bias, std::int64_t detail) {
  check_reducible(dtype);
  check(slot, in, count, out, count);
  const std::uint64_t size = size_of(dtype);
  const std::uint64_t piece_count = elements_per_piece(slot, dtype);
  // Zero elements are a round too: ranks that disagree about the length must find out.
  const std::uint64_t pieces = std::max<std::uint64_t>(1, divide_up(count, piece_count));
  const bool streaming = count * size >= slot.domain().tuning().streaming;
  const auto length = [&](std::uint64_t piece) {
    return std::min(piece_count, count - piece * piece_count);
  };
  const auto from = [&](std::uint64_t piece) {
    return static_cast<const std::byte*>(in) + piece * piece_count * size;
  };
  pipeline(
      slot, pieces, timeout,
      [&](std::uint64_t piece) {
        return Descriptor{op, static_cast<std::uint32_t>(dtype),
                          {static_cast<std::int64_t>(count), detail, static_cast<std::int64_t>(piece)}};
      },
      [&](std::uint64_t piece, std::byte*) {
        slot.fill_summands(from(piece), length(piece), dtype, shots);
      },
      [&](std::uint64_t piece) {
        Reduction reduction{static_cast<std::byte*>(out) + piece * piece_count * size,
                            length(piece), dtype};
        reduction.bias = bias;
        reduction.bias.first = piece * piece_count;
        reduction.shots = shots;
        reduction.streaming = streaming;
        slot.reduce_all(reduction, timeout);
      });
}

void reduce_scatter(Slot& slot, const void* in, void* out, const std::vector<std::uint64_t>& counts,
                    Dtype dtype, std::uint32_t op, double timeout, Bias bias) {
  check_reducible(dtype);
  const Parts parts(slot, counts, dtype);
  check(slot, in, parts.total, out, counts[slot.rank()]);
  const std::uint64_t size = size_of(dtype);
  // A piece takes as much of every rank's part, so that all ranks have something to reduce.
  const std::uint64_t share = elements_per_piece(slot, dtype) / slot.world();
  const std::uint64_t pieces = std::max<std::uint64_t>(1, divide_up(parts.largest, share));
  const auto length = [&](int owner, std::uint64_t piece) {
    return std::min(share, counts[owner] - std::min(counts[owner], piece * share));
  };
  const auto from = [&](int owner, std::uint64_t piece) {
    return static_cast<const std::byte*>(in) + (parts.starts[owner] + piece * share) * size;
  };
  pipeline(
      slot, pieces, timeout,
      [&](std::uint64_t piece) { return parts.descriptor(op, dtype, piece); },
      [&](std::uint64_t piece, std::byte* buffer) {
        const int rank = slot.rank();
        for (int owner = 0; owner < slot.world(); ++owner) {
          if (owner == rank) continue;  // nobody else reads that part
          copy_bytes(buffer + owner * share * size, from(owner, piece),
                     length(owner, piece) * size);
        }
        slot.read_own_at(from(rank, piece), rank * share, dtype);
      },
      [&](std::uint64_t piece) {
        const int rank = slot.rank();
        Bias part = bias;
        if (part.data != nullptr) {  // element rank * share of the buffer is out[piece * share]
          const std::uint64_t back = rank * share % part.period;
          part.first = piece * share + part.period - back;
        }
        slot.reduce(static_cast<std::byte*>(out) + piece * share * size, rank * share,
                    length(rank, piece), dtype, part, timeout);
      });
}

void all_gather(Slot& slot, const void* in, void* out, const std::vector<std::uint64_t>& counts,
                Dtype dtype, std::uint32_t op, double timeout) {
  const Parts parts(slot, counts, dtype);
  check(slot, in, counts[slot.rank()], out, parts.total);
  const std::uint64_t size = size_of(dtype);
  const std::uint64_t share = elements_per_piece(slot, dtype);
  const std::uint64_t pieces = std::max<std::uint64_t>(1, divide_up(parts.largest, share));
  const bool streaming = parts.total * size >= slot.domain().tuning().streaming;
  const auto bytes = [&](int owner, std::uint64_t piece) {
    return std::min(share, counts[owner] - std::min(counts[owner], piece * share)) * size;
  };
  const auto place = [&](int owner, std::uint64_t piece) {
    return static_cast<std::byte*>(out) + (parts.starts[owner] + piece * share) * size;
  };
  pipeline(
      slot, pieces, timeout,
      [&](std::uint64_t piece) { return parts.descriptor(op, dtype, piece); },
      [&](std::uint64_t piece, std::byte* buffer) {
        const std::byte* from = static_cast<const std::byte*>(in) + piece * share * size;
        copy_bytes(buffer, from, bytes(slot.rank(), piece));
        copy_bytes(place(slot.rank(), piece), from, bytes(slot.rank(), piece), streaming);
      },
      [&](std::uint64_t piece) {
        const std::uint32_t index = slot.round_buffer();
        for (int step = 1; step < slot.world(); ++step) {  // not all from the same rank at once
          const int owner = (slot.rank() + step) % slot.world();
          slot.wait(owner, timeout);
          copy_bytes(place(owner, piece), slot.buffer(owner, index), bytes(owner, piece),
                     streaming);
        }
      });
}

void barrier(Slot& slot, double timeout) {
  check(slot, nullptr, 0, nullptr, 0);
  pipeline(
      slot, 1, timeout, [](std::uint64_t) { return Descriptor{op_barrier, 0, {0, 0, 0}}; },
      [](std::uint64_t, std::byte*) {}, [&](std::uint64_t) { slot.wait_all(timeout); });
}

}  // namespace tpk
