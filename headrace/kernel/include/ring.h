// The ring of pages. The copier fills it in the order of the tasks and runs ahead across tasks, layers and steps. At
// most the bytes of a task's IN_FLIGHT whole pages are issued and not landed (and a page or two more where pace.h says so):
// more would only queue in memory, and every signal behind them; fewer, where pages are short, would leave memory idle.
#pragma once

#include "wait.h"

// Where the consumers are in the ring. Each warp keeps its own, all alike at the start of a task.
struct RingPlace {
  int32_t slot = 0;
  uint32_t lap = 0;

  __device__ __forceinline__ uint32_t parity() const { return lap & 1; }
  // Of the page, counted over the launch.
  __device__ __forceinline__ uint32_t number() const { return lap * RING + slot; }

  __device__ __forceinline__ void advance(int pages) {
    slot += pages;
    if (slot < RING) return;
    const int laps = slot / RING;
    slot -= laps * RING;
    lap += laps;
  }
};

// A barrier's parity tells two laps apart, no more: who waits for a page must know that the slot's page before has landed.
// Of the pages before one that has, all but the last few under way have, too; so with these, at most MOST_IN_FLIGHT, and the
// SKIPPED pages of another group of warps, a lap is not full.
constexpr int SKIPPED = 4, MOST_IN_FLIGHT = RING - 1 - SKIPPED;
static_assert(MOST_IN_FLIGHT > 0, "a ring has more pages than are skipped: give Machine more, or take more SMs");

// Before a warp waits for its next page, when `skipped` pages since the last one that it knows to have landed were for
// others: where a lap may be full, let the copier first come to the page itself.
__device__ __forceinline__ void let_copier_come(Shared& s, const RingPlace& ring, int skipped) {
  if (skipped <= SKIPPED) return;
  const uint32_t number = ring.number();
  leave_note(s, Waited::PAGE_LANDED, ring.slot, number + 1);
  while (static_cast<int32_t>(*static_cast<volatile uint32_t*>(&s.issued) - number) <= 0 && !is_set(s.aborted)) ptx::pause();
  clear_note(s);
}

// A page has been read by this warp, which is one of `sharers` that read it; for all lanes.
__device__ __forceinline__ void release_page(Shared& s, int lane, int slot, int sharers) {
  __syncwarp();
  if (lane == 0) ptx::barrier_arrive(&s.page_empty[slot], PAGE_ARRIVALS / sharers);
}
