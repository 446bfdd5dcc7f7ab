// Rounds step by step: overlap, bias, wrong use; and faults: late, different, closed, failed.
#include <algorithm>
#include <chrono>

#include "ranks.h"

using namespace tpk;
using namespace tpk::test;

namespace {

Shape shape_of(std::uint32_t world, std::uint32_t buffers, std::uint64_t capacity = 4096) {
  return {world, 1, capacity, buffers};
}

Descriptor describe(std::int64_t d0 = 0) { return {20, 0, {d0, 0, 0}}; }

void reduce_with_bias() {
  Random random(5);
  for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::float16}) {
    const std::size_t size = size_of(dtype);
    const std::size_t columns = 37, rows = 11, count = rows * columns;
    Ranks ranks(shape_of(3, 2));
    std::vector<Bytes> inputs;
    for (int rank = 0; rank < 3; ++rank) inputs.push_back(random_values(dtype, count, random));
    const Bytes bias = random_values(dtype, columns, random);
    for (const Shots shots : {Shots::one, Shots::two}) {
      ranks.run([&](Slot& slot) {
        const auto& input = inputs[slot.rank()];
        std::memcpy(slot.buffer(slot.rank(), slot.begin(kTimeout)), input.data(), input.size());
        slot.publish(describe());
        // Own rows, then a range that starts and ends inside of rows.
        for (const auto& [first, length] : {std::pair{columns * 3, columns * 4}, {50ul, 201ul}}) {
          Bytes part = poisoned(length * size);
          slot.reduce(part.data(), first, length, dtype, {bias.data(), columns}, kTimeout);
          check_sum(dtype, part, inputs, first, length, &bias);
        }
        slot.wait_all(kTimeout);
        slot.finish();

        std::memcpy(slot.buffer(slot.rank(), slot.begin(kTimeout)), input.data(), input.size());
        slot.publish(describe());
        Bytes whole = poisoned(count * size);
        slot.reduce_all({whole.data(), count, dtype, {bias.data(), columns}, shots}, kTimeout);
        slot.finish();
        check_sum(dtype, whole, inputs, 0, count, &bias);
      });
    }
  }
}

// All buffers in flight, at epochs that wrap: every round must be read from its own buffer.
void rounds_overlap() {
  for (const std::uint32_t buffers : {2u, 3u, 5u}) {
    Ranks ranks(shape_of(3, buffers), 0u - 7);
    ranks.run([&](Slot& slot) {
      int published = 0;
      for (int round = 0; round < 40; ++round) {
        for (; published < std::min<int>(40, round + buffers); ++published) {
          const float value = static_cast<float>(100 * published + slot.rank());
          std::memcpy(slot.buffer(slot.rank(), slot.begin(kTimeout)), &value, sizeof(value));
          slot.publish(describe(published));
        }
        float sum = NAN;
        slot.reduce(&sum, 0, 1, Dtype::float32, {}, kTimeout);
        CHECK_EQUAL(sum, 300.0f * round + 3);
        slot.finish();
      }
    });
  }
}

// One buffer that is never copied: filled again as soon as the call has returned.
void in_place() {
  Random random(11);
  for (const std::uint32_t world : {1u, 2u, 3u, 5u}) {
    for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::float16}) {
      const std::size_t size = size_of(dtype);
      Ranks ranks(shape_of(world, 1, 40000 * 4), 0u - 3);
      for (const std::size_t count : {0ul, 1ul, 77ul, 33000ul}) {
        std::vector<Bytes> inputs;
        for (std::uint32_t rank = 0; rank < world; ++rank) {
          inputs.push_back(random_values(dtype, count, random));
        }
        std::vector<Bytes> results(world);
        ranks.run([&](Slot& slot) {
          const Bytes& input = inputs[slot.rank()];
          std::byte* data = slot.buffer(slot.rank(), 0);
          for (int call = 0; call < 3; ++call) {
            slot.begin(kTimeout);
            std::copy(input.begin(), input.end(), data);
            slot.publish(describe());
            slot.reduce_in_place(count, dtype, kTimeout);
            slot.finish();
            results[slot.rank()].assign(data, data + count * size);
            std::fill(data, data + count * size, kPoison);
            // Read by the peers without a copy, and then changed.
            slot.begin(kTimeout);
            std::copy(input.begin(), input.end(), data);
            slot.publish(describe());
            Bytes sums = poisoned(count * size);
            slot.reduce(sums.data(), 0, count, dtype, {}, kTimeout);
            slot.finish();
            slot.settle(kTimeout);
            std::fill(data, data + count * size, kPoison);
            CHECK(sums == results[slot.rank()]);
          }
        });
        check_sum(dtype, results[0], inputs, 0, count);
        for (const Bytes& result : results) CHECK(result == results[0]);
      }
    }
  }
}

void wrong_use() {
  Ranks ranks(shape_of(2, 2, 64));
  Slot& slot = ranks.slot(0);
  const auto refused = [&](auto call) {
    CATCH(std::logic_error, slot.exclusive("test", [&] { call(); }));
  };
  float value = 0;
  refused([&] { slot.finish(); });
  refused([&] { slot.wait(1, 1); });
  refused([&] { slot.publish(describe()); });
  refused([&] { slot.round_buffer(); });
  slot.begin(kTimeout);
  refused([&] { slot.begin(kTimeout); });
  refused([&] { barrier(slot, kTimeout); });
  slot.publish(describe());
  slot.begin(kTimeout);
  slot.publish(describe());
  refused([&] { slot.begin(kTimeout); });  // both buffers are in flight
  refused([&] { slot.wait(2, 1); });
  refused([&] { slot.wait(-1, 1); });
  refused([&] { slot.wait(1, -1); });
  refused([&] { slot.wait(1, NAN); });
  refused([&] { slot.reduce(&value, 0, 17, Dtype::float32, {}, 1); });
  refused([&] { slot.reduce(&value, ~0ull, 1, Dtype::float32, {}, 1); });
  refused([&] { slot.reduce(&value, 0, 1, Dtype::int64, {}, 1); });
  refused([&] { slot.buffer(0, 2); });
  CATCH(std::logic_error, Slot(std::make_shared<Domain>(ranks.segment(), 0, shape_of(2, 2, 64), 1), 1));
  // A refusal leaves the slot as it was.
  Slot& other = ranks.slot(1);
  for (int round = 0; round < 2; ++round) {
    other.begin(kTimeout);
    other.publish(describe());
    other.wait(0, kTimeout);
    slot.wait(1, kTimeout);
    other.finish();
    slot.finish();
  }
  CHECK(slot.idle() && other.idle());
}

void refused_shapes() {
  for (const Shape& shape : {Shape{0, 1, 64, 1}, Shape{1, 0, 64, 1}, Shape{1, 1, 64, 0},
                             Shape{1, 1, 8, 1}, Shape{1024, 1, 64, 1}, Shape{2000, 1, 1 << 20, 1},
                             Shape{1024, 65536, 1ull << 44, 64}}) {
    CATCH(std::invalid_argument, Layout{shape});
  }
  CHECK(Layout(Shape{8, 4, 3ull << 30, 3}).bytes() > 8ull * 4 * 3 * (3ull << 30));
}

void concurrent_use() {
  Ranks ranks(shape_of(2, 2));
  std::atomic<bool> inside{false}, leave{false};
  std::thread holder([&] {
    ranks.slot(0).exclusive("hold", [&] {
      inside = true;
      while (!leave) std::this_thread::yield();
    });
  });
  while (!inside) std::this_thread::yield();
  CATCH(std::logic_error, ranks.slot(0).exclusive("test", [] {}));
  leave = true;
  holder.join();
  ranks.slot(0).exclusive("test", [] {});
}

Fault fault_of(Slot& slot, double timeout) {
  return CATCH(Fault, slot.exclusive("barrier", [&] { barrier(slot, timeout); }));
}

void late() {
  Ranks ranks(shape_of(2, 2));
  const auto start = Clock::now();
  const Fault fault = fault_of(ranks.slot(0), 0.1);
  const std::chrono::duration<double> waited = Clock::now() - start;
  CHECK(waited.count() >= 0.1 && waited.count() < 5);
  CHECK(fault.kind == FaultKind::timeout);
  CHECK_EQUAL(fault.peer, 1);
  CHECK_EQUAL(fault.slot, 0);
  CHECK_EQUAL(fault.op, std::string("barrier"));
  CHECK_EQUAL(fault.expected, 1u);
  CHECK_EQUAL(fault.seen, 0u);
  // The slot stays broken and says so at once.
  const Fault again = fault_of(ranks.slot(0), 50);
  CHECK(again.kind == FaultKind::timeout && again.detail == fault.detail);
}

// A sleeper is woken by the signal and does not only notice it when its slice of sleep is over.
void sleepers_are_woken() {
  Ranks ranks(shape_of(2, 2));
  std::vector<double> delays;
  Clock::time_point published;
  ranks.run([&](Slot& slot) {
    for (int round = 0; round < 31; ++round) {
      barrier(slot, kTimeout);
      slot.begin(kTimeout);
      if (slot.rank() == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(3 + round % 11));
        published = Clock::now();
      }
      slot.publish(describe());
      slot.wait_all(kTimeout);
      if (slot.rank() == 0) {
        delays.push_back(std::chrono::duration<double>(Clock::now() - published).count());
      }
      slot.finish();
    }
  });
  std::sort(delays.begin(), delays.end());
  CHECK(delays[15] < 3e-3);
}

void no_credit() {
  Ranks ranks(shape_of(2, 1));
  Slot& fast = ranks.slot(0);
  Slot& slow = ranks.slot(1);
  slow.begin(kTimeout);
  slow.publish(describe());
  fast.begin(kTimeout);
  fast.publish(describe());
  fast.finish();
  // The peer has not read the only buffer, so it must not be overwritten.
  const Fault fault = CATCH(Fault, fast.exclusive("begin", [&] { fast.begin(0.05); }));
  CHECK(fault.kind == FaultKind::timeout);
  CHECK_EQUAL(fault.expected, 1u);
}

void different() {
  Ranks ranks(shape_of(3, 2));
  std::vector<std::unique_ptr<Fault>> faults(3);
  ranks.run([&](Slot& slot) {
    slot.begin(kTimeout);
    slot.publish(describe(slot.rank() == 2 ? 7 : 5));
    try {
      slot.wait_all(kTimeout);
    } catch (const Fault& fault) {
      faults[slot.rank()] = std::make_unique<Fault>(fault);
    }
  });
  for (const auto& fault : faults) {
    CHECK(fault && fault->kind == FaultKind::mismatch);
    CHECK(fault->detail.find("d (5, 0, 0)") != std::string::npos);
    CHECK(fault->detail.find("d (7, 0, 0)") != std::string::npos);
  }
  CHECK_EQUAL(faults[0]->peer, 2);
  CHECK_EQUAL(faults[2]->peer, 0);
}

// Ranks that call different collectives, or the same with other counts, find out; none hangs.
void different_collectives() {
  for (const int variant : {0, 1, 2}) {
    Ranks ranks(shape_of(2, 2, 64));
    std::atomic<int> mismatches{0};
    ranks.run([&](Slot& slot) {
      float data[64] = {};
      try {
        if (variant == 0 && slot.rank() == 0) {
          barrier(slot, kTimeout);
        } else if (variant == 1) {
          const std::uint64_t first = slot.rank() == 0 ? 30 : 10;  // same total
          reduce_scatter(slot, data, data, {first, 40 - first}, Dtype::float32, op_reduce_scatter,
                         kTimeout);
        } else {
          const std::uint64_t count = slot.rank() == 0 ? 0 : 60;
          all_reduce(slot, data, data, count, Dtype::float32, op_all_reduce, kTimeout);
        }
      } catch (const Fault& fault) {
        mismatches += fault.kind == FaultKind::mismatch;
      }
    });
    CHECK_EQUAL(mismatches.load(), 2);
  }
}

void leaving() {
  for (const bool fails : {false, true}) {
    Ranks ranks(shape_of(3, 2));
    Slot& slot = ranks.slot(0);
    std::thread leaver([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      if (fails) {
        ranks.domain(1).fail("out of memory");
      } else {
        ranks.domain(1).close();
      }
    });
    const Fault fault = fault_of(slot, kTimeout);
    leaver.join();
    CHECK(fault.kind == FaultKind::peer_lost);
    CHECK_EQUAL(fault.peer, 1);
    CHECK_EQUAL(fault.detail, std::string(fails ? "rank 1 failed: out of memory"
                                                : "rank 1 closed the group"));
    ranks.domain(1).close();
    CHECK(fault_of(ranks.slot(1), 1).kind == FaultKind::closed);
  }
}

// A peer that leaves after it has published everything is not missed.
void leaving_in_order() {
  for (int repeat = 0; repeat < 50; ++repeat) {
    Ranks ranks(shape_of(2, 2));
    std::thread first([&] {
      ranks.slot(0).exclusive("barrier", [&] { barrier(ranks.slot(0), kTimeout); });
      ranks.domain(0).close();
    });
    ranks.slot(1).exclusive("barrier", [&] { barrier(ranks.slot(1), kTimeout); });
    first.join();
  }
}

void closed_by_another_thread() {
  Ranks ranks(shape_of(2, 2));
  std::thread closer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    ranks.domain(0).close();
  });
  CHECK(fault_of(ranks.slot(0), kTimeout).kind == FaultKind::closed);
  closer.join();
}

// Two ranks over one segment, of which the first has a hook in its waits.
struct Hooked {
  explicit Hooked(Domain::Hook hook) {
    const Shape shape = shape_of(2, 2);
    const std::string name = "/tpk-test-hook-" + std::to_string(::getpid());
    const auto segment = Segment::create(name, Layout(shape).bytes());
    segment->unlink();
    Domain::format(*segment, shape);
    domain = std::make_shared<Domain>(segment, 0, shape, kTimeout, std::move(hook));
    peer = std::make_shared<Domain>(segment, 1, shape, kTimeout);
    for (auto* rank : {&domain, &peer}) (*rank)->join();
    for (auto* rank : {&domain, &peer}) (*rank)->open_peers(kTimeout);
    slot = std::make_unique<Slot>(domain, 0);
    other = std::make_unique<Slot>(peer, 0);
  }

  std::shared_ptr<Domain> domain, peer;
  std::unique_ptr<Slot> slot, other;
};

// An exception that is no fault (as from Ctrl-C) leaves the wait, and peers need not wait for it.
void interrupted() {
  struct Interrupt {};
  Hooked ranks([] { throw Interrupt{}; });
  Slot& slot = *ranks.slot;
  CATCH(Interrupt, slot.exclusive("barrier", [&] { barrier(slot, kTimeout); }));
  CHECK(fault_of(slot, 1).detail.find("interrupted") != std::string::npos);
  barrier(*ranks.other, kTimeout);  // the interrupted rank had published this round
  CHECK(fault_of(*ranks.other, kTimeout).kind == FaultKind::peer_lost);
}

// A peer that publishes and leaves after the signal was looked at, and before its state is, has not
// left the round.
void leaving_at_the_last_moment() {
  Hooked* access = nullptr;
  Hooked ranks([&] {
    if (access == nullptr) return;  // still waiting for the ranks to join
    access->other->begin(kTimeout);
    access->other->publish(Descriptor{op_barrier, 0, {0, 0, 0}});
    access->peer->close();
    access = nullptr;
  });
  access = &ranks;
  ranks.slot->exclusive("barrier", [&] { barrier(*ranks.slot, kTimeout); });
}

}  // namespace

int main() {
  reduce_with_bias();
  rounds_overlap();
  in_place();
  wrong_use();
  refused_shapes();
  concurrent_use();
  late();
  sleepers_are_woken();
  no_credit();
  different();
  different_collectives();
  leaving();
  leaving_in_order();
  closed_by_another_thread();
  interrupted();
  leaving_at_the_last_moment();
}
