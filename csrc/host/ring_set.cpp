#include "ring_set.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace tpk {

class RingSet::Sender : private RingEnd {
 public:
  Sender(std::shared_ptr<Domain> domain, int peer) : RingEnd(std::move(domain), peer, true) {}

  int peer() const { return peer_; }
  bool busy() const { return busy_; }
  bool ready(Look look) const { return busy_ && reached(look(signals_.received), needed()); }

  void begin(std::vector<SendPart>&& parts, std::uint64_t tag) {
    const std::uint64_t total = total_of(parts);
    parts_ = std::move(parts);
    source_ = Cursor<SendPart>(parts_);
    header_ = {tag, total, parts_.empty() ? 0 : parts_.front().bytes};
    left_ = total;
    busy_ = true;
  }

  // Fills cells that are free; true if that was all.
  bool push() {
    do {
      if (!reached(seen_, needed())) {
        seen_ = observe(signals_.received);
        if (!reached(seen_, needed())) return false;
      }
      pick_cell();
      if (left_ == header_.bytes) header() = header_;
      const std::uint64_t bytes = std::min(left_, cell_bytes());
      source_.move(payload(), bytes);
      left_ -= bytes;
      raise(signals_.sent, ++count_, peer_bell());
      next_cell();
    } while (left_ != 0);
    busy_ = false;
    return true;
  }

 private:
  std::uint32_t needed() const { return credit_for(count_ + 1, cells()); }

  bool busy_ = false;
  MessageHeader header_{};
  std::vector<SendPart> parts_;
  Cursor<SendPart> source_;
  std::uint64_t left_ = 0;
};

class RingSet::Receiver : private RingEnd {
 public:
  Receiver(std::shared_ptr<Domain> domain, int peer) : RingEnd(std::move(domain), peer, false) {}

  int peer() const { return peer_; }
  bool announced() const { return state_ == State::announced; }
  bool ready(Look look) const { return !announced() && (holding_ || reached(look(signals_.sent), count_ + 1)); }

  // Reads what has arrived, up to the next event.
  std::optional<RingEvent> pull() {
    if (state_ == State::idle) {
      if (!take_cell()) return std::nullopt;
      message_ = header();
      if (message_.head > message_.bytes) {
        throw Fault(FaultKind::mismatch, peer_, -1, "recv", count_ + 1, seen_, "a message without a head");
      }
      left_ = message_.bytes;
      ready_ = std::min(left_, cell_bytes());
      head_.resize(message_.head);
      place({{head_.data(), message_.head}});
      state_ = State::head;
    }
    if (announced() || !move()) return std::nullopt;
    const std::uint64_t body = message_.bytes - message_.head;
    if (state_ == State::body || body == 0) {
      const bool empty = state_ == State::head;
      state_ = State::idle;
      if (!empty) return RingEvent{RingEvent::received, peer_, 0, {}, 0};
    } else {
      state_ = State::announced;
    }
    return RingEvent{RingEvent::announced, peer_, message_.tag, std::move(head_), body};
  }

  bool receive(std::vector<ReceivePart>&& parts) {
    if (!announced() || total_of(parts) != message_.bytes - message_.head) {
      throw std::invalid_argument("no message of this size was announced by rank " +
                                  std::to_string(peer_));
    }
    place(std::move(parts));
    state_ = State::body;
    if (!move()) return false;
    state_ = State::idle;
    return true;
  }

 private:
  enum class State { idle, head, announced, body };

  bool take_cell() {
    if (!reached(seen_, count_ + 1)) {
      seen_ = observe(signals_.sent);
      if (!reached(seen_, count_ + 1)) return false;
    }
    find_cell();
    holding_ = true;
    offset_ = 0;
    return true;
  }

  void place(std::vector<ReceivePart>&& parts) {
    parts_ = std::move(parts);
    wanted_ = total_of(parts_);
    target_ = Cursor<ReceivePart>(parts_);
  }

  // From cells to the parts; true if they are full.
  bool move() {
    while (true) {
      if (holding_) {
        const std::uint64_t bytes = std::min(wanted_, ready_);
        target_.move(payload() + offset_, bytes);
        wanted_ -= bytes;
        left_ -= bytes;
        offset_ += bytes;
        ready_ -= bytes;
        if (ready_ == 0) {
          raise(signals_.received, ++count_, peer_bell());
          next_cell();
          holding_ = false;
        }
      }
      if (wanted_ == 0) return true;
      if (!take_cell()) return false;
      ready_ = std::min(left_, cell_bytes());
    }
  }

  State state_ = State::idle;
  MessageHeader message_{};
  std::string head_;
  std::vector<ReceivePart> parts_;
  Cursor<ReceivePart> target_;
  std::uint64_t wanted_ = 0;   // to fill the parts
  std::uint64_t left_ = 0;     // of the message
  bool holding_ = false;       // a cell whose credit is not given yet
  std::uint64_t offset_ = 0;   // in the cell
  std::uint64_t ready_ = 0;    // bytes of the cell from there
};

RingSet::RingSet(std::shared_ptr<Domain> domain, const std::vector<int>& peers)
    : domain_(std::move(domain)), policy_(domain_->wait_policy()) {
  for (const int peer : peers) {
    senders_.push_back(std::make_unique<Sender>(domain_, peer));
    receivers_.push_back(std::make_unique<Receiver>(domain_, peer));
  }
}

RingSet::~RingSet() = default;

RingSet::Sender& RingSet::sender(int peer) const {
  for (const auto& sender : senders_) {
    if (sender->peer() == peer) return *sender;
  }
  throw std::invalid_argument("rank " + std::to_string(peer) + " is not a peer in this set of rings");
}

RingSet::Receiver& RingSet::receiver(int peer) const {
  for (const auto& receiver : receivers_) {
    if (receiver->peer() == peer) return *receiver;
  }
  throw std::invalid_argument("rank " + std::to_string(peer) + " is not a peer in this set of rings");
}

bool RingSet::send(int peer, std::vector<SendPart> parts, std::uint64_t tag) {
  return exclusive_.run(*domain_, {"send", "these rings"}, [&] {
    Sender& to = sender(peer);
    if (to.busy()) throw std::logic_error("send: another message to this peer is under way");
    to.begin(std::move(parts), tag);
    return to.push();
  });
}

bool RingSet::sending(int peer) const { return sender(peer).busy(); }

bool RingSet::receive(int peer, std::vector<ReceivePart> parts) {
  return exclusive_.run(*domain_, {"recv", "these rings"}, [&] { return receiver(peer).receive(std::move(parts)); });
}

bool RingSet::ready(Look look) const {
  for (const auto& receiver : receivers_) {
    if (receiver->ready(look)) return true;
  }
  for (const auto& sender : senders_) {
    if (sender->ready(look)) return true;
  }
  return false;
}

void RingSet::check_peers(const char* op, int awaited) const {
  // What a peer published before it left is as good as ever, so everything is looked at once more.
  const auto unless_ready = [&](auto&& check) {
    try {
      check();
    } catch (const Fault&) {
      if (!ready(observe)) throw;
    }
  };
  unless_ready([&] {
    if (awaited >= 0) domain_->check_left(WaitFor{-1, op, awaited, ""});
    domain_->check_others(WaitFor{-1, op, awaited, ""});
  });
}

std::optional<RingEvent> RingSet::step(const char* op, double timeout, int awaited) {
  return exclusive_.run(*domain_, {op, "these rings"}, [&]() -> std::optional<RingEvent> {
    check_timeout(timeout);
    std::optional<Clock::time_point> deadline;
    while (true) {
      const std::size_t count = receivers_.size();
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t index = first_ + i < count ? first_ + i : first_ + i - count;
        if (auto event = receivers_[index]->pull()) {
          first_ = index + 1 == count ? 0 : index + 1;
          return event;
        }
      }
      for (const auto& sender : senders_) {
        if (sender->busy() && sender->push()) {
          return RingEvent{RingEvent::sent, sender->peer(), 0, {}, 0};
        }
      }
      if (timeout == 0) return std::nullopt;
      if (!deadline) deadline = deadline_after(timeout);
      const auto on_slice = [&] {
        domain_->run_hook();
        domain_->check_member(-1, op);  // another thread may close this rank meanwhile
        check_peers(op, awaited);
      };
      if (!wait_for_bell(domain_->layout().bell(domain_->base(), domain_->rank()),
                         [&](Look look) { return ready(look); }, *deadline, policy_, on_slice)) {
        return std::nullopt;
      }
    }
  });
}

}  // namespace tpk
