#include "ring.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace tpk {
namespace {

std::uint32_t ring_of(const Domain& domain, int peer, bool sends) {
  if (domain.layout().ring_count() == 0) throw std::invalid_argument("the segment has no rings");
  if (peer < 0 || peer >= domain.world() || peer == domain.rank()) {
    throw std::invalid_argument("rank " + std::to_string(peer) + " is not a peer of rank " +
                                std::to_string(domain.rank()) + " in a group of " +
                                std::to_string(domain.world()));
  }
  return sends ? domain.layout().ring(domain.rank(), peer)
               : domain.layout().ring(peer, domain.rank());
}

}  // namespace

RingEnd::RingEnd(std::shared_ptr<Domain> domain, int peer, bool sends)
    : domain_(std::move(domain)), peer_(peer), ring_(ring_of(*domain_, peer, sends)),
      cells_(domain_->layout().cells(ring_)),
      signals_(domain_->layout().ring_signals(domain_->base(), ring_)),
      policy_(domain_->wait_policy()) {
  domain_->check_process();
  domain_->claim_ring(ring_);
  // Before any message both counters are the same, and the peer may have begun already.
  count_ = seen_ = freed_ = observe(sends ? signals_.sent : signals_.received);
  if (!sends) return;
  in_use_.resize(cells_);
  for (std::uint32_t cell = cells_; cell-- > 0;) free_.push_back(cell);
}

void RingEnd::pick_cell() {
  for (; freed_ != seen_; ++freed_) {
    free_.push_back(in_use_[freed_index_]);
    freed_index_ = freed_index_ + 1 == cells_ ? 0 : freed_index_ + 1;
  }
  cell_ = free_.back();
  free_.pop_back();
  in_use_[index_] = cell_;
  domain_->layout().where(domain_->base(), ring_, index_) = cell_;
}

std::uint32_t RingEnd::await(Signal& signal, std::uint32_t expected, double timeout,
                             const char* what) {
  return domain_->await(signal, expected, timeout, policy_, WaitFor{-1, op_, peer_, what});
}

Signal& RingEnd::peer_bell() const { return domain_->layout().bell(domain_->base(), peer_); }

MessageHeader& RingEnd::header() const {
  return domain_->layout().message_header(domain_->base(), ring_, cell_);
}

std::byte* RingEnd::payload() const {
  return domain_->layout().payload(domain_->base(), ring_, cell_);
}

void RingSender::send(const std::vector<SendPart>& parts, std::uint64_t tag, double timeout) {
  exclusive("send", [&] {
    check_timeout(timeout);
    const std::uint64_t total = total_of(parts);
    std::uint64_t left = total;
    Cursor<SendPart> source(parts);
    do {
      const std::uint32_t needed = credit_for(count_ + 1, cells());
      if (!reached(seen_, needed)) {
        seen_ = await(signals_.received, needed, timeout, "receive what was sent before");
      }
      pick_cell();
      if (left == total) header() = MessageHeader{tag, total, 0};
      const std::uint64_t bytes = std::min(left, cell_bytes());
      source.move(payload(), bytes);
      left -= bytes;
      raise(signals_.sent, ++count_, peer_bell());
      next_cell();
    } while (left != 0);
  });
}

bool RingReceiver::poll() {
  return exclusive("poll", [&] {
    const std::uint32_t next = count_ + 1;
    if (open_ || reached(observe(signals_.sent), next)) return true;
    domain_->check_peer(signals_.sent, next, WaitFor{-1, op_, peer_, ""});
    return false;
  });
}

Message RingReceiver::peek(std::optional<std::uint64_t> tag, double timeout) {
  return exclusive("recv", [&] {
    check_timeout(timeout);
    open(tag, timeout);
    return message_;
  });
}

std::uint64_t RingReceiver::read(const std::vector<ReceivePart>& parts,
                                 std::optional<std::uint64_t> tag, bool whole, double timeout) {
  return exclusive("recv", [&] {
    check_timeout(timeout);
    std::uint64_t wanted = total_of(parts);
    open(tag, timeout);
    const std::uint64_t before = message_.bytes;
    if (wanted > before || (whole && wanted != before)) return before;
    Cursor<ReceivePart> target(parts);
    do {
      if (!holding_ && wanted != 0) take_cell(timeout);
      const std::uint64_t bytes = std::min(wanted, ready_);
      target.move(payload() + offset_, bytes);
      wanted -= bytes;
      message_.bytes -= bytes;
      offset_ += bytes;
      ready_ -= bytes;
      if (holding_ && ready_ == 0) release_cell();
    } while (wanted != 0);
    if (message_.bytes == 0) open_ = false;
    return before;
  });
}

void RingReceiver::open(std::optional<std::uint64_t> tag, double timeout) {
  if (!open_) take_cell(timeout);
  if (tag && *tag != message_.tag) {
    throw Fault(FaultKind::mismatch, peer_, -1, op_, count_ + 1, seen_,
                "rank " + std::to_string(peer_) + " sent a message with tag " +
                    std::to_string(message_.tag) + " where tag " + std::to_string(*tag) +
                    " was expected");
  }
}

void RingReceiver::take_cell(double timeout) {
  const std::uint32_t next = count_ + 1;
  if (!reached(seen_, next)) seen_ = await(signals_.sent, next, timeout, "send");
  find_cell();
  if (!open_) {
    message_ = {header().tag, header().bytes};
    open_ = true;
  }
  holding_ = true;
  offset_ = 0;
  ready_ = std::min(message_.bytes, cell_bytes());
}

void RingReceiver::release_cell() {
  raise(signals_.received, ++count_, peer_bell());
  next_cell();
  holding_ = false;
}

}  // namespace tpk
