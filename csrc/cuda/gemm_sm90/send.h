// Policy: products whose rows are summed over the ranks, each where it belongs; the steps, the rounds and
// the bits are those of tp_kernels/kernels/linear_reduce_scatter.py. A block is a channel. In a turn it takes
// the tile at the same place of every rank's part of the rows, this rank's last, and stores each where its
// owner sums; sums are one turn late, so that they wait for nothing that is not on its way for a whole turn.
#pragma once

#include "channel.h"
#include "gemm_sm90/epilogue.h"
#include "gemm_sm90/mainloop.h"
#include "sum.h"

namespace tpk::device {

template <class Config>
class Send {
 public:
  static_assert(Config::kTeams == 1);
  using Arguments = SendArguments;
  using Number = typename Config::Number;
  static constexpr int kRegistersToLoad = 40;

  TPK_DEVICE explicit Send(const Arguments& arguments)
      : of_(arguments),
        channel_{of_.workspace, block_index(),
                 *word(of_.workspace, of_.workspace.rank, block_index(), kEpoch), true} {}

  TPK_DEVICE static bool intact(const Arguments& of) {
    return load_relaxed(of.workspace.record + kState) == kIntact;
  }
  // tile.mark: the step of the turn; tile.to: first row in the part of its owner.
  TPK_DEVICE bool next(Tile& tile) {
    const Workspace& w = of_.workspace;
    if (place_ >= of_.row_blocks * of_.columns) return false;
    const Cell at = cell(place_, of_.row_blocks, of_.columns);
    const int owner = owner_of(step_);
    tile.to = at.row * Config::kM;
    tile.row = static_cast<std::int32_t>(of_.division.start(owner)) + tile.to;
    tile.column = at.column * Config::kN;
    tile.rows = static_cast<std::int32_t>(
        larger(smaller(of_.division.rows(owner) - tile.to, Config::kM), 0));
    tile.pair = 0;
    tile.stop = of_.pairs;
    tile.mark = step_;
    if (++step_ == w.world) {
      step_ = 0;
      place_ += grid_blocks();
    }
    return true;
  }
  TPK_DEVICE bool arrive(const Tile&) const { return true; }
  TPK_DEVICE std::int32_t block(std::int32_t index, bool&) const { return index; }
  TPK_DEVICE void leave_loads(bool) const {}

  TPK_DEVICE void finish(const Tile& tile, const Sums<Config>& sums, bool, Shared<Config>& shared) {
    const Workspace& w = of_.workspace;
    if (tile.mark == 0) {
      channel_.epoch = earlier(channel_.epoch, -1);
      observe(shared, kCredit, earlier(channel_.epoch, w.depth));  // hidden by the product before it
    }
    if (channel_.alive) {
      auto* chunk = reinterpret_cast<std::uint16_t*>(
          buffer(w, owner_of(tile.mark), channel_.index, channel_.epoch, w.rank));
      store_tile<Config>(sums, shared, {chunk, Config::kN, tile.rows, Config::kN}, Added{},
                         Activation::none);
    }
    if (tile.mark == w.world - 2) publish(kReady, channel_.epoch);
    if (tile.mark == w.world - 1) {
      if (down_ >= 0) sum(earlier(channel_.epoch, 1), shared);
      down_ = tile.to;
      right_ = tile.column;
    }
  }
  TPK_DEVICE void leave(Shared<Config>& shared) {
    sum(channel_.epoch, shared);
    if (channel_.alive) device::leave(channel_);
  }

 private:
  // Not all to the same rank at once, to itself last.
  TPK_DEVICE int owner_of(int step) const {
    const int owner = of_.workspace.rank + 1 + step;
    return owner < of_.workspace.world ? owner : owner - of_.workspace.world;
  }
  TPK_DEVICE static void sync() { sync_threads(1, Config::kTeamThreads); }

  // As those of channel.h, for the threads that multiply.
  TPK_DEVICE void observe(Shared<Config>& shared, std::int64_t signal, std::int32_t expected) {
    const Workspace& w = of_.workspace;
    const int peer = thread_index();
    // Two lines take turns: of one, no thread reads any more when it is written again.
    std::int32_t* failed = shared.failed[observed_++ % 2];
    channel_.alive = channel_.alive && shared.intact;
    if (channel_.alive && peer < w.world && peer != w.rank) {
      const Wait wait{w.rank, w.operation, static_cast<std::int32_t>(channel_.index),
                      static_cast<std::int32_t>(signal), peer};
      failed[peer] = !await(word(w, w.rank, channel_.index, signal) + peer, expected, wait,
                            w.timeout, w.record);
    }
    sync();  // what one thread has observed holds for all
    for (int rank = 0; rank < w.world; ++rank) channel_.alive = channel_.alive && !failed[rank];
  }
  TPK_DEVICE void publish(std::int64_t signal, std::int32_t epoch) const {
    sync();  // one thread releases for all
    if (channel_.alive) tell(channel_, signal, epoch);
  }

  // What all ranks have sent in round `epoch`, summed, to `out`.
  TPK_DEVICE void sum(std::int32_t epoch, Shared<Config>& shared) {
    const Workspace& w = of_.workspace;
    // Also what this rank has stored to itself is seen by all only after this.
    observe(shared, kReady, epoch);
    if (channel_.alive) {
      // As many loads under way with few ranks as with many.
      if (w.world <= 4) {
        sum_lines<4, 2>(epoch);
      } else {
        sum_lines<8, 1>(epoch);
      }
    }
    publish(kCredit, epoch);
  }
  template <int kRanks, int kLines>
  TPK_DEVICE void sum_lines(std::int32_t epoch) const {
    constexpr int kAcross = Config::kN * 2 / kLineBytes, kThreads = Config::kTeamThreads;
    const Workspace& w = of_.workspace;
    const std::int64_t rows = smaller(of_.division.rows(w.rank) - down_, Config::kM);
    const auto columns = static_cast<std::int32_t>(of_.width);
    const auto count = static_cast<std::int32_t>(larger(rows, 0) * kAcross);
    const std::byte* mine = buffer(w, w.rank, channel_.index, epoch, w.rank);
    TPK_NO_UNROLL
    for (std::int32_t first = thread_index(); first < count; first += kLines * kThreads) {
      Line own[kLines];
      TPK_UNROLL
      for (int k = 0; k < kLines; ++k) {
        const std::int32_t line = first + k * kThreads;
        own[k] = line < count ? load<Line>(mine + line * kLineBytes) : Line{};
      }
      auto totals = sum_of_ranks<Number, kRanks, kLines>(channel_, epoch, first, kThreads, count, own);
      TPK_UNROLL
      for (int k = 0; k < kLines; ++k) {
        const std::int32_t line = first + k * kThreads;
        const std::int32_t column = right_ + line % kAcross * 8;
        if (line >= count || column >= columns) continue;
        if (of_.bias != nullptr) {
          TPK_UNROLL
          for (int i = 0; i < 8; ++i) {
            const Target row{nullptr, 0, 1, columns};
            totals.values[k][i] += Added{of_.bias, 0}.template at<Number>(0, column + i, row);
          }
        }
        std::uint16_t* to = of_.out + (down_ + line / kAcross) * of_.width + column;
        const auto left = static_cast<std::int32_t>(smaller(columns - column, 8));
        put_line(reinterpret_cast<std::byte*>(to), left * 2, narrow<Number>(totals.values[k]));
      }
    }
  }

  const Arguments& of_;
  Channel channel_;
  std::int32_t observed_ = 0;
  std::int32_t place_ = block_index(), step_ = 0;         // of the thread that loads
  std::int32_t down_ = -1, right_ = 0;                    // of the turn before
};

}  // namespace tpk::device
