// The rings of a rank with several peers, moved together: whatever the rank waits for, all others go on.
//
// A message has a head, which describes the rest of it, and a body. It is announced with its head, so that the
// receiver can provide memory for the body. Nothing here waits but `step`, and that for anything that happens.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ring.h"

namespace tpk {

struct RingEvent {
  enum Kind : int {
    announced = 0,  // a message with its head; `receive` takes its body, unless it is empty
    received = 1,   // the body of the announced one is complete
    sent = 2,       // all of a message is in the ring
  } kind;
  int peer;
  std::uint64_t tag;    // of the message that was announced
  std::string head;
  std::uint64_t bytes;  // of its body
};

class RingSet {
 public:
  // Takes both ends of this rank with each peer.
  RingSet(std::shared_ptr<Domain> domain, const std::vector<int>& peers);
  ~RingSet();

  // Begins a message whose first part is its head. True if all of it is in the ring; else the parts have to stay
  // until `step` says `sent`, and the peer takes no other message before that.
  bool send(int peer, std::vector<SendPart> parts, std::uint64_t tag);
  bool sending(int peer) const;

  // Memory for the body of the message announced by `peer`. True if it has arrived; else the memory has to stay
  // until `step` says `received`.
  bool receive(int peer, std::vector<ReceivePart> parts);

  // Moves what can move and returns the first event; nothing at the end of `timeout` seconds, of which 0 waits
  // for nothing. A fault if `awaited` (-1: nobody) has left and nothing else is there, or if any rank has
  // failed. `op` is for the fault.
  std::optional<RingEvent> step(const char* op, double timeout, int awaited);

 private:
  class Sender;
  class Receiver;
  Sender& sender(int peer) const;
  Receiver& receiver(int peer) const;
  bool ready(Look look) const;
  void check_peers(const char* op, int awaited) const;

  std::shared_ptr<Domain> domain_;
  // By peer. Of a few peers, a vector is found through as fast as anything.
  std::vector<std::unique_ptr<Sender>> senders_;
  std::vector<std::unique_ptr<Receiver>> receivers_;
  std::size_t first_ = 0;  // that is looked at: everybody's turn comes
  Exclusive exclusive_;
  WaitPolicy policy_;
};

}  // namespace tpk
