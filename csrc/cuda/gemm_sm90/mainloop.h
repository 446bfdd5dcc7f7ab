// Loads and products of tiles, through a ring of stages in shared memory. A policy says which tiles, in
// which order, and when their operands may be read:
//
//   intact()              whether anything may be written; asked once, by one thread
//   count(), tile(index)  the tiles that this block goes through
//   arrive(tile)          wait for its rows, if they are awaited; false if they have not come
//   block(index, alive)   which block of the sum comes at place `index`; may wait, and clear `alive`
//   leave_loads(alive)    after all loads. These three are called by the one thread that loads
//   finish(index, tile, sums, alive, shared)    what becomes of the sums, which are void if not `alive`
//   leave(shared)         after all tiles. These two are called by all threads that multiply
#pragma once

#include "gemm_sm90/config.h"

namespace tpk::device {

template <Major major, int kRows>
TPK_DEVICE void load_operand(const TensorMap* map, Barrier* barrier, std::byte* to, std::int64_t row,
                             std::int64_t k) {
  const auto x = static_cast<std::int32_t>(row), y = static_cast<std::int32_t>(k);
  if constexpr (major == Major::K) {
    load_box(map, barrier, to, y, x);
  } else {
    TPK_UNROLL
    for (int panel = 0; panel < kRows / 64; ++panel) {
      load_box(map, barrier, to + panel * kAtomBytes, x + 64 * panel, y);
    }
  }
}

// One thread. Loads everything, also if it may not be used, so that those who wait for it go on.
template <class Config, class Policy>
TPK_DEVICE void load_tiles(const Operands& operands, Shared<Config>& shared, Policy& policy) {
  Place<Config::kStages> place;
  bool alive = shared.intact;
  for (std::int64_t index = 0; index < policy.count(); ++index) {
    const Tile tile = policy.tile(index);
    if (tile.rows <= 0) continue;
    alive = alive && policy.arrive(tile);
    for (int pair = tile.pair; pair < tile.stop; ++pair) {
      const std::int64_t blocks = ceil_div(operands.k[pair], kBlockK);
      for (std::int64_t block = 0; block < blocks; ++block) {
        const std::int64_t k = policy.block(block, alive) * kBlockK;
        shared.empty[place.stage].wait(place.parity ^ 1);
        shared.alive[place.stage] = alive;
        Barrier* full = &shared.full[place.stage];
        full->arrive_and_expect(Config::kStageBytes);
        load_operand<Config::kMajorA, Config::kM>(&operands.a[pair], full, shared.a[place.stage],
                                                  tile.row, k);
        load_operand<Config::kMajorB, Config::kN>(&operands.b[pair], full, shared.b[place.stage],
                                                  tile.column, k);
        place.advance();
      }
    }
  }
  policy.leave_loads(alive);
}

TPK_DEVICE void arrive_as_warp(Barrier& barrier) {
  if (thread_index() % 32 == 0) barrier.arrive();
}

// The sums of a tile that takes `stages` stages, of the threads of warpgroup `group` of those that share
// it; whether they may be used. `next`: the team that multiplies after this one, if it has to know.
template <class Config>
TPK_DEVICE bool multiply_tile(Sums<Config>& sums, Shared<Config>& shared,
                              Place<Config::kStages>& place, std::int64_t stages, int group,
                              Barrier* next) {
  Products products;
  bool alive = true;
  int before = 0;
  for (std::int64_t block = 0; block < stages; ++block) {
    const int stage = place.stage;
    shared.full[stage].wait(place.parity);
    alive = shared.alive[stage];
    const std::uint32_t a =
        shared_address(shared.a[stage]) + group * (Config::kAtoms * kAtomBytes);
    const std::uint32_t b = shared_address(shared.b[stage]);
    products.open(sums);
    TPK_UNROLL
    for (int step = 0; step < kBlockK / 16; ++step) {
      TPK_UNROLL
      for (int atom = 0; atom < Config::kAtoms; ++atom) {
        products.multiply<typename Config::Number, Config::kN, Config::kMajorA, Config::kMajorB>(
            sums[atom],
            descriptor<Config::kMajorA>(a + atom * kAtomBytes + step * kStepBytes<Config::kMajorA>),
            descriptor<Config::kMajorB>(b + step * kStepBytes<Config::kMajorB>),
            block > 0 || step > 0);
      }
    }
    products.commit();
    products.wait<1>(sums);  // of the stage before; this one's go on
    if (block > 0) arrive_as_warp(shared.empty[before]);
    before = stage;
    place.advance();
  }
  if (next != nullptr) arrive_as_warp(*next);
  products.wait<0>(sums);
  if (stages > 0) arrive_as_warp(shared.empty[before]);
  return alive;
}

// Threads of a team, `thread` 0 .. kTeamThreads - 1.
template <class Config, class Policy>
TPK_DEVICE void multiply_tiles(const Operands& operands, Shared<Config>& shared, Policy& policy,
                               int team) {
  const int group = thread_index() / 128 % Config::kGroups;
  Place<Config::kStages> place;
  std::uint32_t turn_parity = team == 0 ? 1 : 0;  // team 0 need not wait for its first turn
  for (std::int64_t index = 0; index < policy.count(); ++index) {
    const Tile tile = policy.tile(index);
    const std::int64_t stages = stages_of(operands, tile);
    if (index % Config::kTeams != team) {
      place.advance(stages);
      continue;
    }
    Barrier* next = nullptr;
    if constexpr (Config::kTeams == 2) {
      shared.turn[team].wait(turn_parity);
      turn_parity ^= 1;
      next = &shared.turn[1 - team];
    }
    Sums<Config> sums;
    const bool alive = multiply_tile<Config>(sums, shared, place, stages, group, next);
    policy.finish(index, tile, sums, alive, shared);
  }
  policy.leave(shared);
}

// All threads of a block. 64 Ki registers are 168 for each; loads leave theirs to the sums.
template <class Config, class Policy>
TPK_DEVICE void run_products(const Operands& operands, Policy policy) {
  using Memory = Shared<Config>;
  Memory& shared = *reinterpret_cast<Memory*>(shared_memory());
  if (thread_index() == 0) {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      shared.full[stage].init(1);
      shared.empty[stage].init(4 * Config::kGroups);
    }
    for (int team = 0; team < 2; ++team) {
      shared.turn[team].init(4);
      for (std::int32_t& failed : shared.failed[team]) failed = 0;
    }
    shared.intact = policy.intact();
    fence_barriers();
  }
  sync_block();
  if (thread_index() < 256) {
    take_registers<232>();
    multiply_tiles<Config>(operands, shared, policy, thread_index() / Config::kTeamThreads);
  } else {
    give_registers<40>();
    if (thread_index() == 256) load_tiles<Config>(operands, shared, policy);
  }
}

}  // namespace tpk::device
