// The ring of pages. The loader fills it in the order of the tasks and runs ahead across tasks, layers and steps. At
// most IN_FLIGHT pages are issued and not landed: more would only queue in memory, and every signal behind them.
#pragma once

#include "wait.h"

// Where the consumers are in the ring. Each warp keeps its own, all alike at the start of a task.
struct RingPlace {
  int32_t slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int pages) {
    slot += pages;
    if (slot < RING) return;
    const int laps = slot / RING;
    slot -= laps * RING;
    parity ^= laps & 1;
  }
};

// A page has been read by this warp, which is one of `sharers` that read it; for all lanes.
__device__ __forceinline__ void release_page(Shared& s, int lane, int slot, int sharers) {
  __syncwarp();
  if (lane == 0) ptx::barrier_arrive(&s.page_empty[slot], PAGE_ARRIVALS / sharers);
}

// The loader's side; one thread. What it keeps is in Shared::filler: the loader's registers are few.
struct RingFiller {
  Shared& s;
  const Params& p;

  // Bring the next page in. False if the launch ended first.
  __device__ __forceinline__ bool issue(const uint8_t* from, uint32_t bytes, Site site) {
    Filler& f = s.filler;
    const int slot = f.slot;
    if (!wait_barrier_or_end(s, p, &s.page_empty[slot], f.parity, site, Waited::PAGE_FREE, slot)) return false;
    if (f.in_flight == sizes::IN_FLIGHT) {
      const int oldest = f.landed_slot;
      wait_barrier(s, p, &s.page_full[oldest], f.landed_parity, site, Waited::PAGE_LANDED, oldest);
      landed();
    }
    ptx::barrier_expect(&s.page_full[slot], bytes);
    ptx::bulk_load(s.ring[slot], from, bytes, &s.page_full[slot], ptx::read_once_policy());
    f.in_flight++;
    f.slot = slot + 1 == RING ? 0 : slot + 1;
    if (f.slot == 0) f.parity ^= 1;
    return true;
  }

  __device__ __forceinline__ void landed() {
    Filler& f = s.filler;
    f.landed_slot = f.landed_slot + 1 == RING ? 0 : f.landed_slot + 1;
    if (f.landed_slot == 0) f.landed_parity ^= 1;
    f.in_flight--;
  }

  // Nothing may land in shared memory after the block has ended.
  __device__ __forceinline__ void drain() {
    while (s.filler.in_flight > 0) {
      while (!ptx::barrier_passed(&s.page_full[s.filler.landed_slot], s.filler.landed_parity)) {
      }
      landed();
    }
  }
};
