// Loads and products of tiles, through a ring of stages in shared memory. A policy says which tiles, in
// which order, and when their operands may be read:
//
//   kRegistersToLoad      that the threads that load need
//   intact(arguments)     whether anything may be written; asked once, by one thread
//
// called by the one thread that loads:
//   next(tile)            the next tile of this block; false if there is none
//   arrive(tile)          wait for its rows, if they are awaited; false if they have not come
//   block(index, alive)   which block of the sum comes at place `index`; may wait, and clear `alive`
//   leave_loads(alive)    after all loads
//
// called by all threads that multiply:
//   finish(tile, sums, alive, shared)   what becomes of the sums, which are void if not `alive`
//   leave(shared)                       after all tiles
#pragma once

#include "gemm_sm90/config.h"

namespace tpk::device {

template <Major major, int kRows>
TPK_DEVICE void load_operand(const TensorMap* map, Barrier* barrier, std::byte* to, std::int32_t row,
                             std::int32_t k) {
  if constexpr (major == Major::K) {
    load_box(map, barrier, to, k, row);
  } else {
    TPK_UNROLL
    for (int panel = 0; panel < kRows / 64; ++panel) {
      load_box(map, barrier, to + panel * kAtomBytes, row + 64 * panel, k);
    }
  }
}

TPK_DEVICE std::int32_t blocks_of(const Operands& operands, int pair) {
  return (operands.k[pair] + kBlockK - 1) / kBlockK;
}

// The places of tiles in shared memory; each team has two.
template <class Config>
struct TilePlace {
  int place;
  std::uint32_t parity = 0;

  TPK_DEVICE void advance(int by) {
    place += by;
    if (place >= 2 * Config::kTeams) {
      place -= 2 * Config::kTeams;
      parity ^= 1;
    }
  }
};
template <class Config>
TPK_DEVICE void tell(Shared<Config>& shared, TilePlace<Config>& next, const Tile& tile) {
  shared.done[next.place].wait(next.parity ^ 1);
  shared.tile[next.place] = tile;
  shared.told[next.place].arrive();
  next.advance(1);
}

// One thread. Loads everything, also if it may not be used, so that those who wait for it go on.
template <class Config, class Policy>
TPK_DEVICE void load_tiles(const Operands& operands, Shared<Config>& shared, Policy& policy) {
  Place<Config::kStages> place;
  TilePlace<Config> to{0};
  bool alive = shared.intact;
  Tile tile;
  while (policy.next(tile)) {
    tile.more = true;
    tile.stages = 0;
    if (tile.rows > 0) {
      for (int pair = tile.pair; pair < tile.stop; ++pair) tile.stages += blocks_of(operands, pair);
    }
    tile.stage = place.stage;
    tile.parity = place.parity;
    tell(shared, to, tile);
    if (tile.rows <= 0) continue;
    alive = alive && policy.arrive(tile);
    for (int pair = tile.pair; pair < tile.stop; ++pair) {
      const std::int32_t blocks = blocks_of(operands, pair);
      TPK_NO_UNROLL
      for (std::int32_t block = 0; block < blocks; ++block) {
        const std::int32_t k = policy.block(block, alive) * kBlockK;
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
  tile.more = false;
  for (int team = 0; team < Config::kTeams; ++team) tell(shared, to, tile);
  policy.leave_loads(alive);
}

TPK_DEVICE void arrive_as_warp(Barrier& barrier) {
  sync_warp();
  if (thread_index() % 32 == 0) barrier.arrive();
}

// The sums of a tile, of the threads of warpgroup `group` of those that share it; whether they may be
// used. `next`: the team that multiplies after this one, if it has to know.
template <class Config>
TPK_DEVICE bool multiply_tile(Sums<Config>& sums, Shared<Config>& shared, const Tile& tile, int group,
                              Barrier* next) {
  Products products;
  Place<Config::kStages> place{tile.stage, tile.parity};
  // Zeroed, rather than overwritten by the first product, for which the compiler would keep the registers
  // of the tile before.
  TPK_UNROLL
  for (auto& atom : sums) {
    TPK_UNROLL
    for (float& sum : atom) sum = 0;
  }
  const std::int32_t stages = tile.stages;
  bool alive = true;
  int before = 0;
  TPK_NO_UNROLL
  for (std::int32_t block = 0; block < stages; ++block) {
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
            descriptor<Config::kMajorB>(b + step * kStepBytes<Config::kMajorB>));
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

// Threads of a team.
template <class Config, class Policy>
TPK_DEVICE void multiply_tiles(Shared<Config>& shared, Policy& policy, int team) {
  const int group = thread_index() / 128 % Config::kGroups;
  TilePlace<Config> from{team};
  std::uint32_t turn_parity = team == 0 ? 1 : 0;  // team 0 need not wait for its first turn
  for (;;) {
    shared.told[from.place].wait(from.parity);
    const Tile& tile = shared.tile[from.place];  // not copied: registers are for sums
    if (!tile.more) break;
    Barrier* next = nullptr;
    if constexpr (Config::kTeams == 2) {
      shared.turn[team].wait(turn_parity);
      turn_parity ^= 1;
      next = &shared.turn[1 - team];
    }
    Sums<Config> sums;
    const bool alive = multiply_tile<Config>(sums, shared, tile, group, next);
    policy.finish(tile, sums, alive, shared);
    arrive_as_warp(shared.done[from.place]);
    from.advance(Config::kTeams);
  }
  policy.leave(shared);
}

// All threads of a block. Of 64 Ki registers each thread has 168; those that load keep what the policy says
// and leave the others to those that multiply.
template <class Config, class Policy>
TPK_DEVICE void run_products(const Operands& operands, const typename Policy::Arguments& arguments) {
  using Memory = Shared<Config>;
  Memory& shared = *reinterpret_cast<Memory*>(shared_memory());
  if (thread_index() == 0) {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      shared.full[stage].init(1);
      shared.empty[stage].init(4 * Config::kGroups);
    }
    for (int place = 0; place < 4; ++place) {
      shared.told[place].init(1);
      shared.done[place].init(4 * Config::kGroups);
    }
    for (int team = 0; team < 2; ++team) {
      shared.turn[team].init(4);
      for (std::int32_t& failed : shared.failed[team]) failed = 0;
    }
    shared.intact = Policy::intact(arguments);
    fence_barriers();
  }
  if (thread_index() == 256) {  // or the first load waits for them
    prefetch(&operands.a[0]);
    prefetch(&operands.b[0]);
  }
  sync_block();
  if (thread_index() < 256) {
    take_registers<(3 * 168 - Policy::kRegistersToLoad) / 2>();
    Policy policy(arguments);
    multiply_tiles<Config>(shared, policy, thread_index() / Config::kTeamThreads);
  } else {
    give_registers<Policy::kRegistersToLoad>();
    if (thread_index() == 256) {
      Policy policy(arguments);
      load_tiles<Config>(operands, shared, policy);
    }
  }
}

}  // namespace tpk::device
