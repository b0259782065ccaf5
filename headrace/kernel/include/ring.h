// The ring of pages. The loader fills it in the order of the tasks and runs ahead across tasks, layers and steps. At
// most the bytes of IN_FLIGHT whole pages are issued and not landed: more would only queue in memory, and every signal
// behind them; fewer, where pages are short, would leave memory idle.
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

// Loads of so many bytes that may be under way. A barrier's parity tells two laps apart, no more: who waits for a page
// must know that the slot's page before has landed. Of the pages before one that has, all but the last few under way
// have, too; so with these and the SKIPPED pages of another group of warps, a lap is not full.
constexpr int SKIPPED = 4;
__device__ __forceinline__ constexpr int most_in_flight(int bytes) {
  const int whole = sizes::IN_FLIGHT * isa::PAGE_BYTES_MAX / bytes, most = RING - 1 - SKIPPED;
  return whole < most ? whole : most;
}
static_assert(RING > 1 + SKIPPED);

// Before a warp waits for its next page of `bytes`, when `skipped` pages since the last one that it knows to have landed
// were for others: where a lap may be full, let the loader first come to the page itself.
__device__ __forceinline__ void let_loader_come(Shared& s, const RingPlace& ring, int skipped, int bytes) {
  if (skipped + 1 + most_in_flight(bytes) <= RING) return;
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

// The loader's side, for one thread. What a page needs is kept in registers: to work out an address in shared memory anew
// costs more than all else that is done for a page.
struct RingFiller {
  uint32_t shared;   // address of Shared
  int32_t slot = 0, in_flight = 0;
  int32_t most = 1;     // in flight, of the pages that come
  uint32_t issued = 0;  // pages
  uint32_t parity = 1;  // an empty ring passes for one that has been freed

  __device__ __forceinline__ explicit RingFiller(const Shared& s) : shared(ptx::kept_address(&s)) {}

  // The next pages are of so many bytes. Once a task, not once a page: it divides.
  __device__ __forceinline__ void prepare(int bytes) { most = most_in_flight(bytes); }

  // Bring the next page in. False if the launch ended first. What comes after the wait for others to land is on memory's
  // way, so it is little.
  __device__ __forceinline__ bool issue(Shared& s, const uint8_t* from, uint32_t bytes) {
    if (!wait_barrier_or_end(s, shared + offsetof(Shared, page_empty) + slot * 8, parity, Waited::PAGE_FREE, slot)) return false;
    ptx::barrier_expect(full(slot), bytes);
    while (in_flight >= most) wait_landed();
    ptx::bulk_load(shared + offsetof(Shared, ring) + slot * isa::PAGE_BYTES_MAX, from, bytes, full(slot), ptx::read_once_policy());
    in_flight++;
    if (++slot == RING) slot = 0, parity ^= 1;
    ptx::store_shared(shared + offsetof(Shared, issued), ++issued);
    return true;
  }

  // Nothing may land in shared memory after the block has ended.
  __device__ __forceinline__ void drain() {
    while (in_flight > 0) wait_landed();
  }

 private:
  __device__ __forceinline__ uint32_t full(int32_t slot) const { return shared + offsetof(Shared, page_full) + slot * 8; }

  // For the oldest page under way. It lands in any case: this wait needs no watchdog.
  __device__ __forceinline__ void wait_landed() {
    const bool lap_before = slot < in_flight;
    const uint32_t barrier = full(slot - in_flight + (lap_before ? RING : 0)), of_lap = parity ^ (lap_before ? 0 : 1);
    while (!ptx::barrier_passed(barrier, of_lap)) {
    }
    in_flight--;
  }
};
