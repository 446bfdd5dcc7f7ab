// Policy: rows in groups that are sent one after the other; each tile counts for its group. The order of
// tiles and their places are those of RowGroups.
#pragma once

#include "gemm_sm90/epilogue.h"
#include "gemm_sm90/mainloop.h"

namespace tpk::device {

template <class Config>
class Signal {
 public:
  using Arguments = SignalArguments;
  static constexpr int kRegistersToLoad = 56;
  TPK_DEVICE explicit Signal(const Arguments& arguments) : of_(arguments) {}

  TPK_DEVICE static bool intact(const Arguments&) { return true; }
  TPK_DEVICE bool next(Tile& tile) {
    if (index_ >= of_.tiles) return false;
    const GroupedTile place = of_.groups.tile(index_, Config::kM, Config::kN, of_.columns);
    index_ += grid_blocks();
    tile.row = static_cast<std::int32_t>(place.source);
    tile.column = static_cast<std::int32_t>(place.column);
    tile.rows = static_cast<std::int32_t>(place.rows);
    tile.pair = 0;
    tile.stop = of_.pairs;
    tile.to = static_cast<std::int32_t>(place.target);
    tile.mark = place.group;
    return true;
  }
  TPK_DEVICE bool arrive(const Tile&) const { return true; }
  TPK_DEVICE std::int32_t block(std::int32_t index, bool&) const { return index; }
  TPK_DEVICE void leave_loads(bool) const {}

  TPK_DEVICE void finish(const Tile& tile, const Sums<Config>& sums, bool,
                         Shared<Config>& shared) const {
    const Target target{of_.out + tile.to * of_.width + tile.column, of_.width, tile.rows,
                        columns_left<Config>(of_.width, tile)};
    store_tile<Config>(sums, shared, target, Added{}, Activation::none);
    const int team = thread_index() / Config::kTeamThreads;
    sync_threads(1 + team, Config::kTeamThreads);  // one thread releases for the whole team
    if (thread_index() % Config::kTeamThreads == 0) add_release(of_.counters + tile.mark, 1);
  }
  TPK_DEVICE void leave(Shared<Config>&) const {}

 private:
  const Arguments& of_;
  std::int64_t index_ = block_index();
};

}  // namespace tpk::device
