// Policies: products of rows of all ranks, which somebody else brings while the products go on. The flags
// DONE of the workspace's channels say what is there; see tp_kernels/kernels/_gather.py. The products take
// rows in the order of arrival; those of this rank are there from the start.
//
//   AwaitRows   y_p = act(x w_p^T + b_p)    x [rows, K] is awaited, a tile needs some of its rows
//   AwaitSum    c_p = a_p^T b_p             [K, M_p], [K, N]; one of the two is awaited, and rows are summed over
//
// What is brought later than the timeout allows leaves a record; nothing more is written then.
#pragma once

#include "channel.h"
#include "gemm_sm90/epilogue.h"
#include "gemm_sm90/mainloop.h"

namespace tpk::device {

// The flags, for the one thread that waits.
class Arrived {
 public:
  TPK_DEVICE explicit Arrived(const AwaitArguments& of) : of_(of) {}

  TPK_DEVICE std::int64_t rows() const { return of_.arrival.division.start(of_.arrival.world); }
  TPK_DEVICE bool is_own(std::int64_t first, std::int64_t stop) const {
    const std::int64_t mine = of_.arrival.division.start(of_.workspace.rank);
    return first >= mine && stop <= mine + of_.arrival.division.rows(of_.workspace.rank);
  }
  // Wait for rows [first, stop); lasts as long as two waits of whoever brings them, so that the record is
  // theirs if they wait in vain.
  TPK_DEVICE bool wait(std::int64_t first, std::int64_t stop) const {
    const Workspace& w = of_.workspace;
    bool fresh = false;
    for (int channel = 0; channel < of_.arrival.channels; ++channel) {
      const std::int32_t rounds = of_.arrival.rounds(first, stop, channel);
      // An acquire empties the caches of the multiprocessor: not for what this thread has observed before.
      if (rounds <= (channel == 0 ? seen_ : 0)) continue;
      const Wait wait{w.rank, w.operation, -1, static_cast<std::int32_t>(kDone), channel};
      if (!await(word(w, w.rank, channel, kDone), rounds, wait, 2 * w.timeout, w.record)) {
        return false;
      }
      if (channel == 0) seen_ = rounds;
      fresh = true;
    }
    if (fresh) fence_observed_for_loads();
    return true;
  }
  // After the last wait of each block: the last block clears the flags.
  TPK_DEVICE void leave() const {
    const Workspace& w = of_.workspace;
    std::int32_t* finished = word(w, w.rank, 0, kFinished);
    if (add_release(finished, 1) != grid_blocks() - 1) return;
    // Of chunks that no tile waits for, since their rows are this rank's own, flags come later.
    if (!wait(0, rows())) return;
    for (int channel = 0; channel < of_.arrival.channels; ++channel) {
      *word(w, w.rank, channel, kDone) = 0;
    }
    *finished = 0;
  }

 private:
  const AwaitArguments& of_;
  mutable std::int32_t seen_ = 0;  // rounds of channel 0, which is the only one of copies
};

// What both policies have in common: tiles of several products side by side.
template <class Config>
class Await {
 public:
  using Arguments = AwaitArguments;
  static constexpr int kRegistersToLoad = 88;
  TPK_DEVICE explicit Await(const Arguments& arguments) : of_(arguments), arrived_(arguments) {}

  TPK_DEVICE static bool intact(const Arguments& of) {
    return load_relaxed(of.workspace.record + kState) == kIntact;
  }
  TPK_DEVICE void leave_loads(bool alive) const {
    if (alive) arrived_.leave();
  }
  TPK_DEVICE void finish(const Tile& tile, const Sums<Config>& sums, bool alive,
                         Shared<Config>& shared) const {
    if (!alive) return;
    const Product& product = of_.products[tile.pair];
    const Target target{product.out + tile.row * product.width + tile.column, product.width,
                        tile.rows, columns_left<Config>(product.width, tile)};
    Added added{};
    if (product.bias != nullptr) added = {product.bias + tile.column, 0};
    if (of_.add) added = {target.corner, target.pitch};
    if (added.corner == nullptr) {  // apart: a constant null leaves out the checks of every element
      store_tile<Config>(sums, shared, target, Added{}, of_.activation);
    } else {
      store_tile<Config>(sums, shared, target, added, of_.activation);
    }
  }
  TPK_DEVICE void leave(Shared<Config>&) const {}

 protected:
  // The product and the columns of column block `block` of all products side by side.
  TPK_DEVICE void choose(Tile& tile, std::int32_t block) const {
    tile.pair = 0;
    while (block >= of_.products[tile.pair].tiles) block -= of_.products[tile.pair++].tiles;
    tile.stop = tile.pair + 1;
    tile.column = block * Config::kN;
  }

  const Arguments& of_;
  const Arrived arrived_;
};

template <class Config>
class AwaitRows : public Await<Config> {
 public:
  using Await<Config>::Await;

  TPK_DEVICE bool next(Tile& tile) {
    const AwaitArguments& of = this->of_;
    const ArrivalOrder order{of.arrival.division, Config::kM, of.workspace.rank, of.workspace.world};
    const auto own = static_cast<std::int32_t>(order.blocks(order.rank));
    const auto later = static_cast<std::int32_t>(order.turns()) - own;
    for (; place_ < (own + later) * of.tiles; place_ += grid_blocks()) {
      const bool mine = place_ < own * of.tiles;
      const Cell at = mine ? cell(place_, own, of.tiles)
                           : cell(place_ - own * of.tiles, later, of.tiles);
      const std::int64_t block = order.at(at.row + (mine ? 0 : own));
      if (block < 0) continue;
      const std::int64_t first = block * Config::kM;
      tile.row = static_cast<std::int32_t>(first);
      tile.rows = static_cast<std::int32_t>(smaller(this->arrived_.rows() - first, Config::kM));
      this->choose(tile, at.column);
      place_ += grid_blocks();
      return true;
    }
    return false;
  }
  TPK_DEVICE bool arrive(const Tile& tile) const {
    const std::int32_t stop = tile.row + tile.rows;
    return this->arrived_.is_own(tile.row, stop) || this->arrived_.wait(tile.row, stop);
  }
  TPK_DEVICE std::int32_t block(std::int32_t index, bool&) const { return index; }

 private:
  std::int32_t place_ = block_index();
};

template <class Config>
class AwaitSum : public Await<Config> {
 public:
  using Await<Config>::Await;

  TPK_DEVICE bool next(Tile& tile) {
    const std::int32_t rows = this->of_.row_blocks;
    if (place_ >= rows * this->of_.tiles) return false;
    const Cell at = cell(place_, rows, this->of_.tiles);
    place_ += grid_blocks();
    this->choose(tile, at.column);
    const std::int64_t first = std::int64_t{at.row} * Config::kM;
    tile.row = static_cast<std::int32_t>(first);
    tile.rows = static_cast<std::int32_t>(
        larger(smaller(this->of_.products[tile.pair].rows - first, Config::kM), 0));
    turn_ = index_ = 0;
    step_ = 1;
    return true;
  }
  TPK_DEVICE bool arrive(const Tile&) const { return true; }
  TPK_DEVICE std::int32_t block(std::int32_t, bool& alive) {
    const AwaitArguments& of = this->of_;
    const ArrivalOrder order{of.arrival.division, kBlockK, of.workspace.rank, of.workspace.world};
    const std::int64_t block = following(order);
    const std::int64_t first = block * kBlockK;
    const std::int64_t stop = smaller(first + kBlockK, this->arrived_.rows());
    // After one tile everything is there.
    if (alive && turn_ > waited_) {
      alive = this->arrived_.is_own(first, stop) || this->arrived_.wait(first, stop);
      waited_ = turn_;
    }
    return static_cast<std::int32_t>(block);
  }

 private:
  // order.at of the turns in order, without those that have no block and without its divisions: one thread
  // asks for every stage.
  TPK_DEVICE std::int64_t following(const ArrivalOrder& order) {
    for (;;) {
      const std::int32_t turn = turn_++;
      if (turn < order.blocks(order.rank)) return order.first_block(order.rank) + turn;
      int part = order.rank + step_;
      if (part >= order.world) part -= order.world;
      const std::int32_t index = index_;
      if (++step_ == order.world) {
        step_ = 1;
        ++index_;
      }
      if (index < order.blocks(part)) return order.first_block(part) + index;
    }
  }

  std::int32_t place_ = block_index();
  std::int32_t turn_ = 0, waited_ = 0;
  std::int32_t step_ = 1, index_ = 0;  // of the turns of peers: which peer, which of its blocks
};

}  // namespace tpk::device
