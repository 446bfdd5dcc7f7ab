// Collectives against sums in double, for all worlds, dtypes and lengths, over epochs that wrap.
#include <numeric>

#include "ranks.h"

using namespace tpk;
using namespace tpk::test;

namespace {

constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::bfloat16, Dtype::float16};
constexpr std::uint32_t kBeforeWrap = 0xfffffff0;
// So small that short messages take every way there is.
constexpr Tuning kSmallTuning{128, 64, 192, 512};

// From nothing to a few pieces, often at the edges of pieces.
std::size_t random_length(std::size_t piece, Random& random) {
  switch (random() % 4) {
    case 0: return random() % 5;
    case 1: return piece * (1 + random() % 3) + random() % 3 - 1;
    default: return random() % (piece * 3);
  }
}

std::vector<Bytes> random_inputs(int world, Dtype dtype, std::size_t count, Random& random) {
  std::vector<Bytes> inputs;
  for (int rank = 0; rank < world; ++rank) inputs.push_back(random_values(dtype, count, random));
  return inputs;
}

std::vector<Bytes> poisoned_outputs(int world, std::size_t bytes) {
  return std::vector<Bytes>(world, poisoned(bytes));
}

void test_all_reduce(Ranks& ranks, int world, Dtype dtype, Shots shots, Random& random) {
  const std::size_t piece = ranks.slot(0).capacity() / size_of(dtype);
  const std::size_t count = random_length(piece, random);
  const auto inputs = random_inputs(world, dtype, count, random);
  auto outputs = poisoned_outputs(world, count * size_of(dtype));
  auto in_place = inputs;
  ranks.run([&](Slot& slot) {
    const int rank = slot.rank();
    all_reduce(slot, inputs[rank].data(), outputs[rank].data(), count, dtype, op_all_reduce,
               kTimeout, shots);
    all_reduce(slot, in_place[rank].data(), in_place[rank].data(), count, dtype, op_all_reduce,
               kTimeout, shots);
  });
  check_sum(dtype, outputs[0], inputs, 0, count);
  for (int rank = 0; rank < world; ++rank) {
    CHECK(outputs[rank] == outputs[0]);
    CHECK(in_place[rank] == outputs[0]);
  }
  // Rows that pieces cut anywhere.
  const Bytes bias = random_values(dtype, 1 + random() % 50, random);
  ranks.run([&](Slot& slot) {
    all_reduce(slot, inputs[slot.rank()].data(), outputs[slot.rank()].data(), count, dtype,
               op_all_reduce, kTimeout, shots, {bias.data(), bias.size() / size_of(dtype)});
  });
  check_sum(dtype, outputs[0], inputs, 0, count, &bias);
  for (const Bytes& output : outputs) CHECK(output == outputs[0]);
}

std::vector<std::uint64_t> random_counts(int world, std::size_t piece, Random& random) {
  std::vector<std::uint64_t> counts(world);
  for (auto& count : counts) count = random() % 3 == 0 ? 0 : random_length(piece / world, random);
  return counts;
}

std::vector<std::size_t> starts_of(const std::vector<std::uint64_t>& counts) {
  std::vector<std::size_t> starts(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), starts.begin(), std::size_t{0});
  return starts;
}

void test_reduce_scatter(Ranks& ranks, int world, Dtype dtype, Random& random) {
  const auto counts = random_counts(world, ranks.slot(0).capacity() / size_of(dtype), random);
  const auto starts = starts_of(counts);
  const auto inputs = random_inputs(world, dtype, starts.back() + counts.back(), random);
  std::vector<Bytes> outputs;
  for (const auto count : counts) outputs.push_back(poisoned(count * size_of(dtype)));
  ranks.run([&](Slot& slot) {
    const int rank = slot.rank();
    reduce_scatter(slot, inputs[rank].data(), outputs[rank].data(), counts, dtype,
                   op_reduce_scatter, kTimeout);
  });
  for (int rank = 0; rank < world; ++rank) {
    check_sum(dtype, outputs[rank], inputs, starts[rank], counts[rank]);
  }
}

void test_all_gather(Ranks& ranks, int world, Dtype dtype, Random& random) {
  const std::size_t size = size_of(dtype);
  const auto counts = random_counts(world, ranks.slot(0).capacity() / size * world, random);
  const auto starts = starts_of(counts);
  const std::size_t total = starts.back() + counts.back();
  std::vector<Bytes> inputs;
  Bytes expected;
  for (const auto count : counts) {
    Bytes input(count * size);
    for (auto& byte : input) byte = static_cast<std::byte>(random());
    expected.insert(expected.end(), input.begin(), input.end());
    inputs.push_back(input);
  }
  auto outputs = poisoned_outputs(world, total * size);
  auto in_place = outputs;
  ranks.run([&](Slot& slot) {
    const int rank = slot.rank();
    all_gather(slot, inputs[rank].data(), outputs[rank].data(), counts, dtype, op_all_gather,
               kTimeout);
    std::byte* own = in_place[rank].data() + starts[rank] * size;
    if (counts[rank] != 0) std::memcpy(own, inputs[rank].data(), counts[rank] * size);
    all_gather(slot, own, in_place[rank].data(), counts, dtype, op_all_gather, kTimeout);
  });
  for (int rank = 0; rank < world; ++rank) {
    CHECK(outputs[rank] == expected);
    CHECK(in_place[rank] == expected);
  }
}

void random_calls() {
  Random random(3);
  for (const int world : {1, 2, 3, 4, 8}) {
    for (const std::uint32_t buffers : {1u, 2u, 3u, 5u}) {
      const Shape shape{static_cast<std::uint32_t>(world), 2, 320, buffers};
      const auto tuning = random() % 2 ? std::optional<Tuning>(kSmallTuning) : std::nullopt;
      Ranks ranks(shape, kBeforeWrap - static_cast<std::uint32_t>(random() % 64), kTimeout, tuning);
      for (int call = 0; call < 12; ++call) {
        const Dtype dtype = kDtypes[call % 3];
        for (const Shots shots : {Shots::automatic, Shots::one, Shots::two}) {
          test_all_reduce(ranks, world, dtype, shots, random);
        }
        test_reduce_scatter(ranks, world, dtype, random);
        test_all_gather(ranks, world, dtype, random);
        test_all_gather(ranks, world, Dtype::uint8, random);
        test_all_gather(ranks, world, Dtype::int64, random);
        ranks.run([](Slot& slot) { barrier(slot, kTimeout); });
      }
    }
  }
}

void one_shot_is_two_shot() {
  Random random(4);
  for (const int world : {2, 3, 4, 8}) {
    Ranks ranks(Shape{static_cast<std::uint32_t>(world), 1, 128 << 10, 3});
    for (const Dtype dtype : kDtypes) {
      const std::size_t count = 100000 + random() % 1000;
      const auto inputs = random_inputs(world, dtype, count, random);
      for (const Shots shots : {Shots::one, Shots::two}) {
        auto outputs = poisoned_outputs(world, count * size_of(dtype));
        auto automatic = outputs;
        ranks.run([&](Slot& slot) {
          const int rank = slot.rank();
          all_reduce(slot, inputs[rank].data(), outputs[rank].data(), count, dtype, op_all_reduce,
                     kTimeout, shots);
          all_reduce(slot, inputs[rank].data(), automatic[rank].data(), count, dtype,
                     op_all_reduce, kTimeout);
        });
        for (int rank = 0; rank < world; ++rank) {
          CHECK(outputs[rank] == outputs[0]);
          CHECK(automatic[rank] == outputs[0]);
        }
        check_sum(dtype, outputs[0], inputs, 0, count);
      }
    }
  }
}

// Many calls with nothing between them: a lost credit would let one rank overwrite what another
// still reads.
void back_to_back() {
  for (const int world : {2, 4}) {
    for (const std::uint32_t buffers : {1u, 2u, 3u}) {
      const Shape shape{static_cast<std::uint32_t>(world), 1, 64, buffers};
      Ranks ranks(shape, 0u - 500);
      ranks.run([&](Slot& slot) {
        for (int call = 0; call < 1000; ++call) {
          float in[20], out[20];
          std::fill(in, in + 20, static_cast<float>(call + slot.rank()));
          std::fill(out, out + 20, NAN);
          all_reduce(slot, in, out, 20, Dtype::float32, op_all_reduce, kTimeout);
          for (const float value : out) CHECK_EQUAL(value, world * call + world * (world - 1) / 2.0f);
        }
      });
    }
  }
}

}  // namespace

int main() {
  random_calls();
  one_shot_is_two_shot();
  back_to_back();
}
