// Messages through rings: sizes at the edges of cells and rings, in parts, slow ends, epochs that wrap,
// all pairs at once; and wrong use, tags, peers that are late, leave or are interrupted.
#include <algorithm>
#include <chrono>
#include <map>

#include "ranks.h"
#include "ring.h"

using namespace tpk;
using namespace tpk::test;

namespace {

constexpr std::uint32_t kBeforeWrap = 0u - 20;

Shape shape_of(std::uint32_t world, std::uint32_t cells, std::uint64_t cell_bytes) {
  return {world, 1, 64, 1, cells, cell_bytes};
}

void pause(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

struct Rings {
  explicit Rings(const Shape& shape, std::uint32_t epoch = 0) : ranks(shape, epoch) {
    const int world = static_cast<int>(shape.world);
    for (int rank = 0; rank < world; ++rank) {
      const std::shared_ptr<Domain> domain(&ranks.domain(rank), [](Domain*) {});
      for (int peer = 0; peer < world; ++peer) {
        if (peer == rank) continue;
        senders[{rank, peer}] = std::make_unique<RingSender>(domain, peer);
        receivers[{rank, peer}] = std::make_unique<RingReceiver>(domain, peer);
      }
    }
  }

  RingSender& sender(int from, int to) { return *senders.at({from, to}); }
  RingReceiver& receiver(int at, int from) { return *receivers.at({at, from}); }

  Ranks ranks;
  std::map<std::pair<int, int>, std::unique_ptr<RingSender>> senders;
  std::map<std::pair<int, int>, std::unique_ptr<RingReceiver>> receivers;
};

Bytes random_bytes(std::size_t size, Random& random) {
  Bytes data(size);
  for (auto& byte : data) byte = static_cast<std::byte>(random());
  return data;
}

// Up to `left` bytes in a few parts, of which some are empty.
template <class Part, class Pointer>
std::vector<Part> split(Pointer data, std::size_t left, Random& random) {
  std::vector<Part> parts;
  while (left != 0 || random() % 4 == 0) {
    const std::size_t size = random() % 3 == 0 ? left : random() % (left + 1);
    parts.push_back({data, size});
    data += size;
    left -= size;
  }
  return parts;
}

std::size_t random_size(const Shape& shape, Random& random) {
  const std::size_t cell = shape.ring_cell_bytes, ring = cell * shape.ring_cells;
  switch (random() % 6) {
    case 0: return random() % 3;
    case 1: return cell + random() % 3 - 1;
    case 2: return ring + random() % 3 - 1;
    case 3: return cell * (random() % (3 * shape.ring_cells));
    default: return random() % (2 * ring + 2);
  }
}

// Both ends draw the messages from the same seed, and how they move from seeds of their own.
struct Stream {
  Stream(const Shape& shape, int from, int to, std::uint64_t own)
      : shape(shape), common(1000 * from + to), own(own + 1000 * from + to) {}

  Bytes next() {
    tag = common();
    return random_bytes(random_size(shape, common), common);
  }

  void dawdle(int one_in) {
    if (own() % one_in == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 300));
  }

  Shape shape;
  Random common, own;
  std::uint64_t tag = 0;
};

void send_all(RingSender& sender, Stream stream, int messages, int pace) {
  for (int message = 0; message < messages; ++message) {
    Bytes data = stream.next();
    stream.dawdle(pace);
    sender.send(split<SendPart>(data.data(), data.size(), stream.own), stream.tag, kTimeout);
    std::fill(data.begin(), data.end(), kPoison);  // the sender's memory is free again
  }
}

void receive_all(RingReceiver& receiver, Stream stream, int messages, int pace) {
  for (int message = 0; message < messages; ++message) {
    const Bytes expected = stream.next();
    stream.dawdle(pace);
    if (stream.own() % 4 == 0) {
      while (!receiver.poll()) std::this_thread::yield();
    }
    Bytes data = poisoned(expected.size());
    std::size_t at = 0;
    if (stream.own() % 2) {
      const Message announced = receiver.peek(stream.tag, kTimeout);
      CHECK_EQUAL(announced.bytes, expected.size());
      CHECK_EQUAL(announced.tag, stream.tag);
    }
    while (stream.own() % 3 == 0 && at < data.size()) {
      const std::size_t size = stream.own() % (data.size() - at);
      const std::uint64_t left =
          receiver.read(split<ReceivePart>(data.data() + at, size, stream.own), stream.tag, false,
                        kTimeout);
      CHECK_EQUAL(left, data.size() - at);
      at += size;
    }
    const auto rest = split<ReceivePart>(data.data() + at, data.size() - at, stream.own);
    CHECK_EQUAL(receiver.read(rest, stream.tag, true, kTimeout), data.size() - at);
    CHECK(data == expected);
  }
  CHECK(!receiver.poll());
}

// All pairs of a world at once; every rank sends and receives in threads of their own.
void exchange(const Shape& shape, int messages, int send_pace, int receive_pace) {
  Rings rings(shape, kBeforeWrap);
  std::vector<std::thread> threads;
  for (auto& [ends, sender] : rings.senders) {
    threads.emplace_back(
        [&, from = ends.first, to = ends.second, sender = sender.get()] {
          send_all(*sender, Stream(shape, from, to, 1), messages, send_pace);
        });
  }
  for (auto& [ends, receiver] : rings.receivers) {
    threads.emplace_back(
        [&, to = ends.first, from = ends.second, receiver = receiver.get()] {
          receive_all(*receiver, Stream(shape, from, to, 2), messages, receive_pace);
        });
  }
  for (auto& thread : threads) thread.join();
}

void random_messages() {
  for (const std::uint32_t cells : {1u, 2u, 3u, 7u}) {
    for (const std::uint64_t cell_bytes : {1u, 64u, 100u}) {
      exchange(shape_of(2, cells, cell_bytes), 60, 20, 20);
    }
  }
  exchange(shape_of(2, 3, 256), 60, 2, 1000);  // a slow producer
  exchange(shape_of(2, 3, 256), 60, 1000, 2);  // a slow consumer
}

void many_pairs() { exchange(shape_of(4, 3, 100), 25, 10, 10); }

void send_bytes(RingSender& sender, std::size_t bytes, std::uint64_t tag = 0,
                double timeout = kTimeout) {
  const Bytes data(bytes);
  sender.send({{data.data(), bytes}}, tag, timeout);
}

std::uint64_t receive_bytes(RingReceiver& receiver, std::size_t bytes, bool whole = true,
                            double timeout = kTimeout) {
  Bytes data(bytes);
  return receiver.read({{data.data(), bytes}}, std::nullopt, whole, timeout);
}

// What fits is sent without the receiver; more is not, and nothing unread is overwritten.
void credit() {
  Rings rings(shape_of(2, 3, 100), 0u - 2);
  RingSender& sender = rings.sender(0, 1);
  RingReceiver& receiver = rings.receiver(1, 0);
  send_bytes(sender, 101, 7);  // two cells
  send_bytes(sender, 0, 8);
  CHECK_EQUAL(receive_bytes(receiver, 100, false), 101u);  // the first cell is free again
  send_bytes(sender, 1, 9);
  const Fault fault = CATCH(Fault, send_bytes(sender, 1, 10, 0.05));
  CHECK(fault.kind == FaultKind::timeout);
  CHECK_EQUAL(fault.op, "send");
  CHECK_EQUAL(fault.peer, 1);
  CHECK_EQUAL(fault.slot, -1);
  CHECK_EQUAL(fault.expected, 0u);
  CHECK_EQUAL(fault.seen, 0u - 1);
  CHECK(fault.detail.find("rank 1 did not receive what was sent before within 0.05 s") == 0);
  for (const std::uint64_t tag : {7u, 8u, 9u}) {
    CHECK_EQUAL(receiver.peek(std::nullopt, kTimeout).tag, tag);
    receive_bytes(receiver, tag == 8 ? 0 : 1);
  }
  // Nobody knows what became of the message that failed.
  CHECK_EQUAL(std::string(CATCH(Fault, send_bytes(sender, 1)).what()), std::string(fault.what()));
}

// A message of another size stays where it is, also when it was read in part.
void sizes() {
  Rings rings(shape_of(2, 4, 10));
  RingReceiver& receiver = rings.receiver(1, 0);
  CHECK(!receiver.poll());
  send_bytes(rings.sender(0, 1), 25, 3);
  send_bytes(rings.sender(0, 1), 0, 4);
  CHECK(receiver.poll());
  for (const std::size_t wrong : {0u, 24u, 26u}) CHECK_EQUAL(receive_bytes(receiver, wrong), 25u);
  CHECK_EQUAL(receive_bytes(receiver, 26, false), 25u);
  CHECK_EQUAL(receive_bytes(receiver, 0, false), 25u);
  CHECK_EQUAL(receive_bytes(receiver, 20, false), 25u);
  CHECK_EQUAL(receiver.peek(3, kTimeout).bytes, 5u);
  CHECK_EQUAL(receive_bytes(receiver, 4), 5u);
  CHECK_EQUAL(receive_bytes(receiver, 6, false), 5u);
  CHECK(receiver.poll());
  CHECK_EQUAL(receive_bytes(receiver, 5), 5u);
  CHECK_EQUAL(receive_bytes(receiver, 1), 0u);
  CHECK_EQUAL(receiver.peek(4, kTimeout).bytes, 0u);
  CHECK(receiver.poll());
  CHECK_EQUAL(receiver.read({}, 4, true, kTimeout), 0u);  // ends the empty message
  CHECK(!receiver.poll());
}

void tags() {
  Rings rings(shape_of(2, 2, 64));
  RingReceiver& receiver = rings.receiver(1, 0);
  send_bytes(rings.sender(0, 1), 5, ~0ull);
  CHECK_EQUAL(receiver.peek(~0ull, kTimeout).tag, ~0ull);
  const Fault fault = CATCH(Fault, receiver.peek(3, kTimeout));
  CHECK(fault.kind == FaultKind::mismatch);
  CHECK_EQUAL(fault.op, "recv");
  CHECK_EQUAL(fault.peer, 0);
  CHECK_EQUAL(fault.detail,
              "rank 0 sent a message with tag 18446744073709551615 where tag 3 was expected");
  CHECK(CATCH(Fault, receiver.poll()).kind == FaultKind::mismatch);
}

void wrong_use() {
  Rings rings(shape_of(2, 2, 64));
  RingSender& sender = rings.sender(0, 1);
  RingReceiver& receiver = rings.receiver(0, 1);
  const std::shared_ptr<Domain> domain(&rings.ranks.domain(0), [](Domain*) {});
  for (const int peer : {-1, 0, 2}) CATCH(std::invalid_argument, RingSender(domain, peer));
  CATCH(std::logic_error, RingSender(domain, 1));  // claimed
  CATCH(std::logic_error, RingReceiver(domain, 1));
  CATCH(std::invalid_argument, sender.send({{nullptr, 1}}, 0, 1));
  CATCH(std::invalid_argument, sender.send({{&rings, 1ull << 63}}, 0, 1));
  CATCH(std::invalid_argument, sender.send({{&rings, 5}, {&rings, ~0ull}}, 0, 1));
  CATCH(std::invalid_argument, sender.send({}, 0, NAN));
  CATCH(std::invalid_argument, receiver.read({{nullptr, 1}}, {}, true, 1));
  CATCH(std::invalid_argument, receiver.read({}, {}, true, -1));
  CATCH(std::invalid_argument, receiver.peek({}, NAN));
  sender.send({{nullptr, 0}}, 1, kTimeout);  // a refusal leaves the ring as it was
  CHECK_EQUAL(rings.receiver(1, 0).read({{nullptr, 0}}, 1, true, kTimeout), 0u);

  for (const auto& [cells, bytes] : {std::pair{3u, 64u}, {2u, 65u}}) {  // of the same total size
    const Shape shape = shape_of(2, cells, bytes);
    CHECK_EQUAL(Layout(shape).bytes(), rings.ranks.segment()->size());
    CATCH(std::invalid_argument, Domain(rings.ranks.segment(), 0, shape, 1));
  }
  Ranks none(Shape{2, 1, 64, 1});
  const std::shared_ptr<Domain> without(&none.domain(0), [](Domain*) {});
  CATCH(std::invalid_argument, RingSender(without, 1));
}

void shapes() {
  for (const Shape& shape :
       {Shape{2, 1, 64, 1, 1, 0}, Shape{2, 1, 64, 1, 0, 64}, Shape{2, 0, 64, 1, 0, 0},
        Shape{2, 1, 64, 1, 70000, 64}, Shape{2, 1, 64, 1, 1, 1ull << 41},
        Shape{1024, 1, 1024, 1, 65536, 1ull << 40}}) {
    CATCH(std::invalid_argument, Layout{shape});
  }
  CHECK_EQUAL(Layout(Shape{3, 2, 64, 1}).ring_count(), 0u);
  const Shape shape{3, 2, 5000, 2, 3, 100};
  CHECK(Layout(shape).bytes() > Layout(Shape{3, 2, 5000, 2}).bytes());
  const Layout layout(shape);
  // Everything is apart from everything else, and inside.
  std::vector<std::pair<std::byte*, std::byte*>> areas;
  const auto add = [&](auto* start, std::uint64_t size) {
    auto* byte = reinterpret_cast<std::byte*>(start);
    areas.emplace_back(byte, byte + size);
  };
  std::byte* base = reinterpret_cast<std::byte*>(1 << 20);
  add(base + layout.bytes(), 1);
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    add(&layout.status(base, rank), sizeof(RankStatus));
    for (std::uint32_t slot = 0; slot < 2; ++slot) {
      for (std::uint32_t i = 0; i < 2; ++i) add(layout.buffer(base, slot, rank, i), 5000);
    }
    for (std::uint32_t to = 0; to < 3; ++to) {
      if (to == rank) continue;
      const std::uint32_t ring = layout.ring(rank, to);
      CHECK(ring < layout.ring_count());
      add(&layout.ring_signals(base, ring), sizeof(RingSignals));
      for (std::uint32_t cell = 0; cell < 3; ++cell) {
        add(&layout.message_header(base, ring, cell), sizeof(MessageHeader));
        add(layout.payload(base, ring, cell), 100);
      }
    }
  }
  std::sort(areas.begin(), areas.end());
  for (std::size_t i = 1; i < areas.size(); ++i) CHECK(areas[i - 1].second <= areas[i].first);
  CHECK(areas.back().first == base + layout.bytes());
}

// One thread may send while another receives, but not two do the same.
void concurrent_use() {
  Rings rings(shape_of(2, 1, 8));
  std::thread sending([&] { send_bytes(rings.sender(0, 1), 16); });
  std::thread receiving([&] { receive_bytes(rings.receiver(0, 1), 1); });
  while (!rings.receiver(1, 0).poll()) std::this_thread::yield();
  pause(20);  // both are inside: the ring is full, and the other one empty
  CATCH(std::logic_error, send_bytes(rings.sender(0, 1), 1));
  CATCH(std::logic_error, rings.receiver(0, 1).poll());
  CHECK_EQUAL(receive_bytes(rings.receiver(1, 0), 16), 16u);
  send_bytes(rings.sender(1, 0), 1);
  sending.join();
  receiving.join();
}

// The first word of a peer that goes ends every wait for it at once.
void leaving() {
  for (const bool fails : {false, true}) {
    for (const bool sends : {false, true}) {
      Rings rings(shape_of(3, 1, 8));
      std::thread leaver([&] {
        pause(30);
        if (fails) {
          rings.ranks.domain(1).fail("out of memory");
        } else {
          rings.ranks.domain(1).close();
        }
      });
      const auto start = Clock::now();
      const Fault fault =
          sends ? CATCH(Fault, send_bytes(rings.sender(0, 1), 16))
                : CATCH(Fault, receive_bytes(rings.receiver(0, 1), 1));
      CHECK(Clock::now() - start < std::chrono::seconds(5));
      leaver.join();
      CHECK(fault.kind == FaultKind::peer_lost);
      CHECK_EQUAL(fault.op, sends ? "send" : "recv");
      CHECK_EQUAL(fault.peer, 1);
      CHECK_EQUAL(fault.expected - fault.seen, 1u);
      CHECK_EQUAL(fault.detail, fails ? "rank 1 failed: out of memory" : "rank 1 closed the group");
      if (!sends) CHECK(CATCH(Fault, rings.receiver(2, 1).poll()).kind == FaultKind::peer_lost);
      CHECK(CATCH(Fault, send_bytes(rings.sender(1, 0), 1)).kind == FaultKind::closed);
      send_bytes(rings.sender(0, 2), 1);  // the other pairs go on
      CHECK_EQUAL(receive_bytes(rings.receiver(2, 0), 1), 1u);
    }
  }
}

// What was sent before its sender left is received.
void leaving_in_order() {
  for (int repeat = 0; repeat < 20; ++repeat) {
    Rings rings(shape_of(2, 2, 8));
    std::thread first([&] {
      send_bytes(rings.sender(0, 1), 40, 1);
      send_bytes(rings.sender(0, 1), 8, 2);
      rings.ranks.domain(0).close();
    });
    CHECK_EQUAL(receive_bytes(rings.receiver(1, 0), 40), 40u);
    while (repeat % 2 && !rings.receiver(1, 0).poll()) std::this_thread::yield();
    CHECK_EQUAL(receive_bytes(rings.receiver(1, 0), 8), 8u);
    CHECK(CATCH(Fault, receive_bytes(rings.receiver(1, 0), 8)).kind == FaultKind::peer_lost);
    first.join();
  }
}

// A peer that stops in the middle of a message is late, and which cell did not come is known.
void half_a_message() {
  Rings rings(shape_of(2, 4, 8));
  std::thread half([&] { CATCH(Fault, send_bytes(rings.sender(0, 1), 48, 0, 0.05)); });
  half.join();
  CHECK_EQUAL(receive_bytes(rings.receiver(1, 0), 32, false), 48u);
  CHECK(rings.receiver(1, 0).poll());  // it has begun
  const Fault fault = CATCH(Fault, receive_bytes(rings.receiver(1, 0), 16, true, 0.05));
  CHECK(fault.kind == FaultKind::timeout);
  CHECK_EQUAL(fault.expected, 5u);
  CHECK_EQUAL(fault.seen, 4u);
  CHECK(fault.detail.find("rank 0 did not send within 0.05 s") == 0);
}

void closed_by_another_thread() {
  Rings rings(shape_of(2, 1, 8));
  std::thread closer([&] {
    pause(30);
    rings.ranks.domain(0).close();
  });
  CHECK(CATCH(Fault, receive_bytes(rings.receiver(0, 1), 1)).kind == FaultKind::closed);
  closer.join();
}

// An end that sleeps is woken by the other one, and does not wait for its time slice of 20 ms.
void sleepers_are_woken() {
  Rings rings(shape_of(2, 1, 8));
  std::vector<double> delays, leaves;
  for (int call = 0; call < 15; ++call) {
    Clock::time_point sent, received;
    std::thread sleeper([&] {
      if (call % 2) {
        receive_bytes(rings.receiver(1, 0), 1);
      } else {
        send_bytes(rings.sender(0, 1), 16);
      }
      received = Clock::now();
    });
    pause(7 + call % 3);
    sent = Clock::now();
    if (call % 2) {
      send_bytes(rings.sender(0, 1), 1);
    } else {
      receive_bytes(rings.receiver(1, 0), 16);
    }
    sleeper.join();
    delays.push_back(std::chrono::duration<double>(received - sent).count());
  }
  for (int call = 0; call < 15; ++call) {  // also when the peer leaves
    Rings pair(shape_of(2, 1, 8));
    Clock::time_point left, noticed;
    std::thread sleeper([&] {
      if (call % 2) {
        CATCH(Fault, receive_bytes(pair.receiver(1, 0), 1));
      } else {
        CATCH(Fault, send_bytes(pair.sender(1, 0), 16));
      }
      noticed = Clock::now();
    });
    pause(7 + call % 3);
    left = Clock::now();
    pair.ranks.domain(0).close();
    sleeper.join();
    leaves.push_back(std::chrono::duration<double>(noticed - left).count());
  }
  for (auto* some : {&delays, &leaves}) {
    std::sort(some->begin(), some->end());
    CHECK((*some)[10] < 5e-3);
  }
}

// An exception that is no fault (as from Ctrl-C) leaves the wait, and peers need not wait for it.
void interrupted() {
  struct Interrupt {};
  const Shape shape = shape_of(2, 1, 8);
  const std::string name = "/tpk-test-ring-" + std::to_string(::getpid());
  const auto segment = Segment::create(name, Layout(shape).bytes());
  segment->unlink();
  Domain::format(*segment, shape);
  const auto domain =
      std::make_shared<Domain>(segment, 0, shape, kTimeout, [] { throw Interrupt{}; });
  const auto peer = std::make_shared<Domain>(segment, 1, shape, kTimeout);
  for (const auto& rank : {domain, peer}) rank->join();
  for (const auto& rank : {domain, peer}) rank->open_peers(kTimeout);
  RingReceiver receiver(domain, 1), other(peer, 0);
  RingSender sender(domain, 1);
  CATCH(Interrupt, receive_bytes(receiver, 1));
  CHECK(CATCH(Fault, receiver.poll()).detail == "interrupted in recv");
  CHECK(CATCH(Fault, send_bytes(sender, 1)).kind == FaultKind::closed);
  CHECK_EQUAL(CATCH(Fault, receive_bytes(other, 1)).detail, "rank 0 failed: interrupted in recv");
}

}  // namespace

int main() {
  random_messages();
  many_pairs();
  credit();
  sizes();
  tags();
  wrong_use();
  shapes();
  concurrent_use();
  leaving();
  leaving_in_order();
  half_a_message();
  closed_by_another_thread();
  sleepers_are_woken();
  interrupted();
}
