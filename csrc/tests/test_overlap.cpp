// Rounds reduced on a thread of their own while the rank fills and publishes the next ones.
#include "overlap.h"

#include "ranks.h"

using namespace tpk;
using namespace tpk::test;

namespace {

constexpr int kRounds = 40;
constexpr std::size_t kCount = 100;

Descriptor describe(std::int64_t d0 = 0) { return {21, 0, {d0, 0, 0}}; }

void fill(Slot& slot, float value) {
  auto* data = reinterpret_cast<float*>(slot.buffer(slot.rank(), slot.begin(kTimeout)));
  std::fill(data, data + kCount, value);
}

// Some ranks have the thread and others reduce by themselves, at epochs that wrap: equal results.
void threads_and_none() {
  for (const std::uint32_t world : {2u, 3u}) {
    for (const std::uint32_t buffers : {1u, 2u, 3u}) {
      for (const Shots shots : {Shots::one, Shots::two}) {
        Ranks ranks(Shape{world, 1, 4096, buffers}, 0u - 9);
        ranks.run([&](Slot& slot) {
          const bool threaded = slot.rank() != 1;
          Reducer reducer(slot);
          std::vector<std::vector<float>> sums(kRounds, std::vector<float>(kCount, NAN));
          for (int round = 0; round < kRounds; ++round) {
            if (threaded) reducer.make_room();
            fill(slot, static_cast<float>(10 * round + slot.rank()));
            slot.publish(describe(round));
            const Reduction reduction{sums[round].data(), kCount, Dtype::float32, {}, shots};
            const auto read = [&slot, reduction] {
              slot.reduce_all(reduction, kTimeout);
              slot.finish();
            };
            threaded ? reducer.submit(read) : read();
          }
          reducer.join();
          CHECK(slot.idle());
          for (int round = 0; round < kRounds; ++round) {
            const float expected = 10.0f * round * world + (world == 2 ? 1 : 3);
            for (const float sum : sums[round]) CHECK_EQUAL(sum, expected);
          }
        });
      }
    }
  }
}

void a_fault_reaches_the_caller() {
  Ranks ranks(Shape{2, 1, 4096, 2});
  Slot& slot = ranks.slot(0);
  float sum[kCount];
  Reducer reducer(slot);
  fill(slot, 1);
  slot.publish(describe());
  reducer.submit([&] { slot.reduce_all({sum, kCount, Dtype::float32}, 0.05); });
  const Fault fault = CATCH(Fault, reducer.join());
  CHECK(fault.kind == FaultKind::timeout);
  CHECK_EQUAL(fault.peer, 1);
  // It stays: nothing that follows can be right.
  CATCH(Fault, reducer.submit([] {}));
  CATCH(Fault, reducer.make_room());
}

void abandoned_work_writes_nothing_more() {
  Ranks ranks(Shape{2, 1, 4096, 2});
  Slot& slot = ranks.slot(0);
  const auto start = Clock::now();
  {
    Reducer reducer(slot);
    auto sum = std::make_unique<std::vector<float>>(kCount);
    fill(slot, 1);
    slot.publish(describe());
    reducer.submit([&slot, out = sum->data()] {
      slot.reduce_all({out, kCount, Dtype::float32}, kTimeout);  // the peer never comes
    });
    reducer.abandon("no longer wanted");
    sum.reset();
    // Destroying a reducer with work left does the same.
  }
  CHECK(Clock::now() - start < std::chrono::seconds(10));
  const Fault fault = CATCH(
      Fault, ranks.slot(1).exclusive("test", [&] { barrier(ranks.slot(1), kTimeout); }));
  // The round it had published is no barrier; had it not, the peer would be told why it left.
  CHECK(fault.kind == FaultKind::mismatch);
}

void whoever_is_first() {
  Ranks ranks(Shape{3, 1, 4096, 2});
  Slot& slot = ranks.slot(0);
  for (Slot* one : {&slot, &ranks.slot(2)}) {
    fill(*one, 1);
    one->publish(describe());
  }
  CHECK_EQUAL(slot.wait_any({1, 2}, kTimeout), 1u);
  const Fault fault = CATCH(Fault, slot.wait_any({1}, 0.05));
  CHECK_EQUAL(fault.peer, 1);
  CATCH(std::invalid_argument, slot.wait_any({7}, 0.05));
}

}  // namespace

int main() {
  threads_and_none();
  a_fault_reaches_the_caller();
  abandoned_work_writes_nothing_more();
  whoever_is_first();
}
