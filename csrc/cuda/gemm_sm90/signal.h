// Policy: rows in groups that are sent one after the other; each tile counts for its group. The order of
// tiles and their places are those of RowGroups.
#pragma once

#include "gemm_sm90/epilogue.h"
#include "gemm_sm90/mainloop.h"

namespace tpk::device {

struct SignalArguments {
  RowGroups groups;
  std::uint16_t* out;      // [rows, width], contiguous, in the order of the groups
  std::int32_t* counters;  // of finished tiles, of each group
  std::int64_t width;
  std::int64_t columns;  // tiles across
  std::int64_t tiles;
  std::int32_t pairs;
};

template <class Config>
class Signal {
 public:
  using Arguments = SignalArguments;
  TPK_DEVICE explicit Signal(const Arguments& arguments) : of_(arguments) {}

  TPK_DEVICE bool intact() const { return true; }
  TPK_DEVICE std::int64_t count() const {
    return ceil_div(of_.tiles - block_index(), grid_blocks());
  }
  TPK_DEVICE Tile tile(std::int64_t index) const {
    const GroupedTile place = grouped(index);
    return {place.source, place.column, place.rows, 0, of_.pairs};
  }
  TPK_DEVICE bool arrive(const Tile&) const { return true; }
  TPK_DEVICE std::int64_t block(std::int64_t index, bool&) const { return index; }
  TPK_DEVICE void leave_loads(bool) const {}

  TPK_DEVICE void finish(std::int64_t index, const Tile&, const Sums<Config>& sums, bool,
                         Shared<Config>& shared) const {
    const GroupedTile place = grouped(index);
    const Target target{of_.out + place.target * of_.width + place.column, of_.width, place.rows,
                        smaller(of_.width - place.column, Config::kN)};
    store_tile<Config>(sums, shared, target, Added{}, Activation::none);
    const int team = thread_index() / Config::kTeamThreads;
    sync_threads(1 + team, Config::kTeamThreads);  // one thread releases for the whole team
    if (thread_index() % Config::kTeamThreads == 0) add_release(of_.counters + place.group, 1);
  }
  TPK_DEVICE void leave(Shared<Config>&) const {}

 private:
  TPK_DEVICE GroupedTile grouped(std::int64_t index) const {
    return of_.groups.tile(block_index() + index * grid_blocks(), Config::kM, Config::kN,
                           of_.columns);
  }

  const Arguments& of_;
};

}  // namespace tpk::device
