// Rings that move together: all ranks send to all others first and receive in between, with messages larger than the
// rings; what is announced, in which order; who wakes whom; who is gone.
#include <algorithm>
#include <chrono>
#include <deque>
#include <map>

#include "ranks.h"
#include "ring_set.h"

using namespace tpk;
using namespace tpk::test;

namespace {

Shape shape_of(std::uint32_t world, std::uint32_t cells, std::uint64_t cell_bytes, std::uint32_t reach = 0,
               std::uint32_t far_cells = 0) {
  return {world, 1, 64, 1, cells, cell_bytes, reach, far_cells};
}

void pause(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

struct Sets {
  explicit Sets(const Shape& shape, std::uint32_t epoch = 0) : ranks(shape, epoch) {
    const int world = static_cast<int>(shape.world);
    for (int rank = 0; rank < world; ++rank) {
      std::vector<int> peers;
      for (int peer = 0; peer < world; ++peer) {
        if (peer != rank) peers.push_back(peer);
      }
      const std::shared_ptr<Domain> domain(&ranks.domain(rank), [](Domain*) {});
      sets.push_back(std::make_unique<RingSet>(domain, peers));
    }
  }

  RingSet& operator[](int rank) { return *sets[rank]; }

  Ranks ranks;
  std::vector<std::unique_ptr<RingSet>> sets;
};

Bytes random_bytes(std::size_t size, Random& random) {
  Bytes data(size);
  for (auto& byte : data) byte = static_cast<std::byte>(random());
  return data;
}

// The same at both ends.
struct Message {
  std::uint64_t tag;
  std::string head;
  Bytes body;
};

Message message_of(const Shape& shape, Random& random) {
  const std::size_t cell = shape.ring_cell_bytes, ring = cell * shape.ring_cells;
  const std::size_t sizes[] = {0, 1, cell - 1, cell, cell + 1, ring, ring + 1, random() % (3 * ring + 1)};
  Message made;
  made.tag = random();
  const Bytes head = random_bytes(random() % 4 == 0 ? sizes[random() % 8] : random() % 8, random);
  made.head.assign(reinterpret_cast<const char*>(head.data()), head.size());
  made.body = random_bytes(sizes[random() % 8], random);
  return made;
}

// One thread a rank: sends `count` messages to every peer and receives as many from each, in any order.
void run_rank(RingSet& set, const Shape& shape, int rank, int count) {
  struct Way {
    Random out, in;
    int to_send, to_receive;
    Message leaving, expected;
    Bytes arriving;
  };
  std::map<int, Way> ways;
  for (int peer = 0; peer < static_cast<int>(shape.world); ++peer) {
    if (peer == rank) continue;
    ways.emplace(peer, Way{Random(1000 * rank + peer), Random(1000 * peer + rank), count, count, {}, {}, {}});
  }
  Random own(77 + rank);
  const auto received = [&](int peer) {
    Way& way = ways.at(peer);
    CHECK(way.arriving == way.expected.body);
    --way.to_receive;
  };
  const auto busy = [&] {
    return std::any_of(ways.begin(), ways.end(), [](const auto& way) {
      return way.second.to_send != 0 || way.second.to_receive != 0;
    });
  };
  std::map<int, bool> sending;
  while (busy() || std::any_of(sending.begin(), sending.end(), [](const auto& it) { return it.second; })) {
    bool began = false;
    for (auto& [peer, way] : ways) {
      if (way.to_send == 0 || sending[peer] || own() % 3 == 0) continue;
      way.leaving = message_of(shape, way.out);
      const auto& [tag, head, body] = way.leaving;
      const std::size_t half = body.size() / 2;
      sending[peer] = !set.send(peer,
                                {{head.data(), head.size()}, {body.data(), half},
                                 {body.data() + half, body.size() - half}},
                                tag);
      --way.to_send;
      began = true;
      if (!sending[peer]) std::fill(way.leaving.body.begin(), way.leaving.body.end(), kPoison);
    }
    if (own() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 200));
    const bool waits = !began && std::none_of(ways.begin(), ways.end(), [&](const auto& way) {
      return way.second.to_send != 0 && !sending[way.first];
    });
    const auto event = set.step("test", waits ? kTimeout : 0, -1);
    CHECK(event || !waits);
    if (!event) continue;
    Way& way = ways.at(event->peer);
    if (event->kind == RingEvent::sent) {
      CHECK(sending[event->peer]);
      sending[event->peer] = false;
    } else if (event->kind == RingEvent::received) {
      received(event->peer);
    } else {
      way.expected = message_of(shape, way.in);
      CHECK_EQUAL(event->tag, way.expected.tag);
      CHECK(event->head == way.expected.head);
      CHECK_EQUAL(event->bytes, way.expected.body.size());
      way.arriving = poisoned(event->bytes);
      const std::size_t third = event->bytes / 3;
      if (event->bytes == 0 ||
          set.receive(event->peer, {{way.arriving.data(), third},
                                    {way.arriving.data() + third, event->bytes - third}})) {
        received(event->peer);
      }
    }
  }
}

void exchange(const Shape& shape, int count) {
  Sets sets(shape, 0u - 10);  // epochs wrap
  std::vector<std::thread> threads;
  for (int rank = 0; rank < static_cast<int>(shape.world); ++rank) {
    threads.emplace_back([&, rank] { run_rank(sets[rank], shape, rank, count); });
  }
  for (auto& thread : threads) thread.join();
}

void all_to_all() {
  for (const std::uint32_t cells : {1u, 2u, 5u}) {
    for (const std::uint64_t cell_bytes : {1u, 64u, 100u}) exchange(shape_of(2, cells, cell_bytes), 40);
  }
  exchange(shape_of(3, 3, 64), 30);
  exchange(shape_of(4, 3, 100, 1, 1), 20);  // rings of ranks 0 and 2, 1 and 3 have one cell
}

RingEvent event_of(RingSet& set, int awaited = -1) {
  const auto event = set.step("test", kTimeout, awaited);
  CHECK(event);
  return *event;
}

bool send(RingSet& set, int peer, const Bytes& body, std::uint64_t tag = 0) {
  return set.send(peer, {{"head", 4}, {body.data(), body.size()}}, tag);
}

// The body waits for memory, nothing else does; the others go on.
void announcements() {
  Sets sets(shape_of(3, 2, 8));
  const Bytes small(4), large(20);
  CHECK(send(sets[0], 2, small, 1));
  CHECK(!send(sets[1], 2, large, 2));
  CATCH(std::logic_error, send(sets[1], 2, small));  // one at a time
  CATCH(std::invalid_argument, sets[2].receive(0, {}));
  std::map<int, std::uint64_t> tags;
  for (int i = 0; i < 2; ++i) {
    const RingEvent event = event_of(sets[2]);
    CHECK(event.kind == RingEvent::announced);
    CHECK_EQUAL(event.head, "head");
    tags[event.peer] = event.tag;
  }
  CHECK_EQUAL(tags[0], 1u);
  CHECK_EQUAL(tags[1], 2u);
  CHECK(!sets[2].step("test", 0.01, -1));
  Bytes body(20);
  CATCH(std::invalid_argument, sets[2].receive(1, {{body.data(), 19}}));
  CHECK(!sets[2].receive(1, {{body.data(), 20}}));
  CHECK(sets[2].receive(0, {{body.data(), 4}}));
  CHECK(event_of(sets[1]).kind == RingEvent::sent);
  CHECK(event_of(sets[2]).kind == RingEvent::received);
  CHECK(!sets[2].step("test", 0, -1));
  CATCH(std::invalid_argument, send(sets[0], 0, small));
  CATCH(std::invalid_argument, sets[0].step("test", NAN, -1));
}

// A rank that sleeps is woken by a message, and one with a message under way by the room for it.
void sleepers_are_woken() {
  std::vector<double> delays;
  Sets sets(shape_of(3, 1, 8));
  for (int call = 0; call < 24; ++call) {
    const Bytes large(8), small(2);  // with the head, two cells and one
    if (call % 2) CHECK(!send(sets[0], 1, large));
    Clock::time_point happened, noticed;
    std::thread sleeper([&] {
      const RingEvent event = event_of(sets[0]);
      CHECK(event.kind == (call % 2 ? RingEvent::sent : RingEvent::announced));
      noticed = Clock::now();
    });
    pause(7 + call % 3);
    happened = Clock::now();
    Bytes body(8);
    if (call % 2) {
      CHECK_EQUAL(event_of(sets[1]).bytes, 8u);
      sets[1].receive(0, {{body.data(), 8}});
      sleeper.join();
      while (sets[1].step("test", 0.01, -1)) {
      }
    } else {
      CHECK(send(sets[call % 4 == 0 ? 1 : 2], 0, small));
      sleeper.join();
      CHECK(sets[0].receive(call % 4 == 0 ? 1 : 2, {{body.data(), 2}}));
    }
    delays.push_back(std::chrono::duration<double>(noticed - happened).count());
  }
  std::sort(delays.begin(), delays.end());
  CHECK(delays[16] < 5e-3);  // not at the end of a slice of 20 ms
}

void leaving() {
  for (const bool fails : {false, true}) {
    Sets sets(shape_of(3, 1, 8));
    send(sets[1], 0, Bytes(1), 5);
    if (fails) {
      sets.ranks.domain(1).fail("out of memory");
    } else {
      sets.ranks.domain(1).close();
    }
    // What it sent is there, and who needs nothing of it goes on, unless it has failed.
    CHECK_EQUAL(event_of(sets[0], 1).tag, 5u);
    Bytes body(1);
    CHECK(sets[0].receive(1, {{body.data(), 1}}));
    CHECK(send(sets[2], 0, Bytes(1), 6));
    CHECK_EQUAL(event_of(sets[0], 1).tag, 6u);
    CHECK(sets[0].receive(2, {{body.data(), 1}}));
    if (fails) {
      const Fault fault = CATCH(Fault, sets[0].step("test", 5, 2));
      CHECK(fault.kind == FaultKind::peer_lost);
      CHECK_EQUAL(fault.peer, 1);
      CHECK_EQUAL(fault.detail, "rank 1 failed: out of memory");
      CHECK_EQUAL(CATCH(Fault, send(sets[0], 2, Bytes(1))).detail, fault.detail);  // for good
    } else {
      CHECK(!sets[0].step("test", 0.1, 2));
      CHECK_EQUAL(CATCH(Fault, sets[0].step("test", 5, 1)).detail, "rank 1 closed the group");
    }
    CHECK(CATCH(Fault, send(sets[1], 0, Bytes(1))).kind == FaultKind::closed);
  }
}

// A peer that leaves ends the wait of a sleeper at once.
void leaving_wakes() {
  std::vector<double> delays;
  for (int call = 0; call < 9; ++call) {
    Sets sets(shape_of(2, 1, 8));
    Clock::time_point left, noticed;
    std::thread sleeper([&] {
      CATCH(Fault, sets[0].step("test", kTimeout, 1));
      noticed = Clock::now();
    });
    pause(7 + call % 3);
    left = Clock::now();
    sets.ranks.domain(1).close();
    sleeper.join();
    delays.push_back(std::chrono::duration<double>(noticed - left).count());
  }
  std::sort(delays.begin(), delays.end());
  CHECK(delays[6] < 5e-3);
}

void interrupted() {
  struct Interrupt {};
  const Shape shape = shape_of(2, 1, 8);
  const auto segment = Segment::create("/tpk-test-set-" + std::to_string(::getpid()), Layout(shape).bytes());
  segment->unlink();
  Domain::format(*segment, shape);
  const auto domain = std::make_shared<Domain>(segment, 0, shape, kTimeout, [] { throw Interrupt{}; });
  const auto peer = std::make_shared<Domain>(segment, 1, shape, kTimeout);
  for (const auto& rank : {domain, peer}) rank->join();
  for (const auto& rank : {domain, peer}) rank->open_peers(kTimeout);
  RingSet set(domain, {1}), other(peer, {0});
  CATCH(Interrupt, set.step("recv", kTimeout, 1));
  CHECK_EQUAL(CATCH(Fault, set.step("recv", 1, 1)).detail, "interrupted in recv");
  CHECK_EQUAL(CATCH(Fault, other.step("recv", kTimeout, 0)).detail, "rank 0 failed: interrupted in recv");
}

// Rings of different lengths are apart from each other, and each pair has its own.
void layouts() {
  for (std::uint32_t world = 2; world <= 7; ++world) {
    for (std::uint32_t reach = 0; reach < world; ++reach) {
      const Layout layout(shape_of(world, 4, 100, reach, reach ? 2 : 0));
      std::byte* base = reinterpret_cast<std::byte*>(1 << 20);
      std::vector<std::pair<std::byte*, std::byte*>> areas;
      for (std::uint32_t from = 0; from < world; ++from) {
        for (std::uint32_t to = 0; to < world; ++to) {
          if (from == to) continue;
          const std::uint32_t ring = layout.ring(from, to);
          CHECK(ring < layout.ring_count());
          const std::uint32_t ahead = (to + world - from) % world;
          const bool near = reach == 0 || std::min(ahead, world - ahead) <= reach;
          CHECK_EQUAL(layout.cells(ring), near ? 4u : 2u);
          auto* start = reinterpret_cast<std::byte*>(&layout.ring_signals(base, ring));
          auto* last = layout.payload(base, ring, layout.cells(ring) - 1) + 100;
          auto* places = reinterpret_cast<std::byte*>(&layout.where(base, ring, layout.cells(ring) - 1) + 1);
          CHECK(places <= reinterpret_cast<std::byte*>(&layout.message_header(base, ring, 0)));
          areas.emplace_back(start, last);
        }
      }
      areas.emplace_back(reinterpret_cast<std::byte*>(&layout.bell(base, 0)),
                         reinterpret_cast<std::byte*>(&layout.bell(base, world - 1) + 1));
      areas.emplace_back(reinterpret_cast<std::byte*>(&layout.status(base, 0)),
                         reinterpret_cast<std::byte*>(&layout.status(base, world - 1) + 1));
      areas.emplace_back(base + layout.bytes(), base + layout.bytes());
      std::sort(areas.begin(), areas.end());
      for (std::size_t i = 1; i < areas.size(); ++i) CHECK(areas[i - 1].second <= areas[i].first);
    }
  }
  for (const Shape& shape : {shape_of(3, 2, 8, 3, 1), shape_of(3, 2, 8, 1, 0), shape_of(3, 2, 8, 0, 1)}) {
    CATCH(std::invalid_argument, Layout{shape});
  }
}

}  // namespace

int main() {
  all_to_all();
  announcements();
  sleepers_are_woken();
  leaving();
  leaving_wakes();
  interrupted();
  layouts();
}
