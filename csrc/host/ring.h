// Messages from one rank to another, in order, through a ring of cells with credits.
//
// A message is a tag, which its sender chooses, and any number of bytes; none is a message too. It moves
// cell by cell, so that the copy in and the copy out overlap. What fits into free cells is sent without
// the receiver; anything longer moves as the receiver reads. `timeout` bounds every single wait.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "domain.h"
#include "exclusive.h"
#include "ring_parts.h"

namespace tpk {

struct Message {
  std::uint64_t tag;
  std::uint64_t bytes;  // left to read
};

// What both ends of a ring have in common. One thread at a time may use an end.
class RingEnd {
 protected:
  RingEnd(std::shared_ptr<Domain> domain, int peer, bool sends);

  template <class Call>
  auto exclusive(const char* op, Call&& call) {
    const auto named = [&] {
      op_ = op;
      return call();
    };
    return exclusive_.run(*domain_, {op, "this ring"}, named, [&] { return Progress{count_, seen_}; });
  }

  std::uint32_t await(Signal& signal, std::uint32_t expected, double timeout, const char* what);
  Signal& peer_bell() const;
  MessageHeader& header() const;
  std::byte* payload() const;
  std::uint32_t cells() const { return cells_; }
  std::uint64_t cell_bytes() const { return domain_->layout().shape().ring_cell_bytes; }
  // Where the next cell is: the source decides, with credit for it, and the destination finds out.
  void pick_cell();
  void find_cell() { cell_ = domain_->layout().where(domain_->base(), ring_, index_); }
  // After a cell was filled or read.
  void next_cell() { index_ = index_ + 1 == cells_ ? 0 : index_ + 1; }

  std::shared_ptr<Domain> domain_;
  int peer_;
  std::uint32_t ring_;
  std::uint32_t cells_;
  RingSignals& signals_;
  Exclusive exclusive_;
  const char* op_ = "";
  WaitPolicy policy_;
  // Cells are counted modulo 2^32, which the number of cells need not divide: `index_`, that number modulo cells,
  // is counted apart.
  std::uint32_t count_;  // cells sent or received
  std::uint32_t seen_;   // of the peer's counter, which is looked at only where this is too old
  std::uint32_t index_ = 0;
  std::uint32_t cell_ = 0;  // that is filled or read
  // Of a source.
  std::vector<std::uint32_t> free_;      // cells, the one used last at the end
  std::vector<std::uint32_t> in_use_;    // by their number modulo cells
  std::uint32_t freed_;                  // cells that were received and are free again
  std::uint32_t freed_index_ = 0;
};

class RingSender : private RingEnd {
 public:
  RingSender(std::shared_ptr<Domain> domain, int peer)
      : RingEnd(std::move(domain), peer, true) {}

  // The parts one after the other are the payload. They may be overwritten after the return.
  void send(const std::vector<SendPart>& parts, std::uint64_t tag, double timeout);
};

class RingReceiver : private RingEnd {
 public:
  RingReceiver(std::shared_ptr<Domain> domain, int peer)
      : RingEnd(std::move(domain), peer, false) {}

  // Whether a message has begun to arrive; a fault if none can come any more. Does not wait.
  bool poll();

  // Waits for the next message and leaves it there. Any tag but `tag` is a mismatch.
  Message peek(std::optional<std::uint64_t> tag, double timeout);

  // Reads the next bytes of the message into the parts, and waits for it as `peek` does. Returns what
  // was left to read before: nothing was read if that is less than the parts hold, or, for a `whole`
  // message, not the same. A message with nothing left to read is over.
  std::uint64_t read(const std::vector<ReceivePart>& parts, std::optional<std::uint64_t> tag,
                     bool whole, double timeout);

 private:
  void open(std::optional<std::uint64_t> tag, double timeout);
  void take_cell(double timeout);
  void release_cell();

  bool open_ = false;         // `message_` has arrived and is not over
  bool holding_ = false;      // a cell whose credit is not given yet
  Message message_{};
  std::uint64_t offset_ = 0;  // in the cell
  std::uint64_t ready_ = 0;   // bytes of the cell from there
};

}  // namespace tpk
