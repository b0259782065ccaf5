// How SMs keep pace with each other in EXPERT_DOWN. All read as many pages, but memory serves some sooner, now these and
// now those, and all wait for the last. So at a few places of its list of experts an SM asks how many have been there
// before it, and those that are behind get more pages under way from there on. This changes when pages come, and nothing else.
#pragma once

#include "orders.h"

namespace pace {

constexpr int PLACES = isa::PACE_PLACES;
// The loader comes to a place when the copier has so few orders left before it: it could be ORDERS ahead, which with few
// rows is before the SMs part; with fewer left, a counter far away could keep the copier waiting.
constexpr int ORDERS_LEFT = 3;
// SMs with such a task: as many come to each place in every layer, and all before any comes there in the next.
constexpr uint32_t RUNNERS = sizes::SMS < sizes::HIDDEN / isa::TILE_ROWS ? sizes::SMS : sizes::HIDDEN / isa::TILE_ROWS;

// How many of `count` orders come before a place: half, then half of what is left.
__device__ __forceinline__ int orders_before(int place, int count) { return count - (count >> (place + 1)); }

// How many pages more than others this SM may have under way from the place on. For all lanes of the loader.
__device__ __forceinline__ int pages_more(const Params& p, int place, int lane) {
  uint32_t ahead = 0;
  if (lane == 0) ahead = ptx::count_around(counter_at(p, sizes::COUNTERS + place), RUNNERS - 1);
  ahead = __shfl_sync(~0u, ahead, 0);
  return ahead >= RUNNERS * 5 / 6 ? 2 : ahead >= RUNNERS / 2 ? 1 : 0;
}

}  // namespace pace
