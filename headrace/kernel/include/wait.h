// Waiting, always for a bounded time.
//
// Who has to wait leaves a note of what for, and looks again and again, or until Shared::aborted. The publisher, which is
// never long away from its loop, watches the notes (publish.h): one that stays for longer than a launch allows ends the
// launch. So the code at every wait is a few instructions, and the layers' code stays in the SM's instruction cache.
//
// An aborted wait returns as if it had passed: whoever waited goes on with garbage to the next place where all its
// peers look at Shared::aborted together, and leaves there.
#pragma once

#include "trace.h"

enum class Agent : int32_t { LOADER = 0, CONSUMER = 1, COPIER = 2, HELPER = 3 };
enum class Waited : int32_t {
  COUNTER = 0,
  PAGE_LANDED = 1,
  PAGE_FREE = 2,
  TASK = 3,
  TASK_FREE = 4,
  MESSAGE_FREE = 5,
  SUMS_FULL = 6,
  SUMS_EMPTY = 7,
  ROUTE = 8,
};

__device__ __forceinline__ bool is_set(const int32_t& flag) { return *static_cast<const volatile int32_t*>(&flag) != 0; }

// For whole warps or a thread that waits for its warp.
__device__ __forceinline__ void leave_note(Shared& s, Waited what, int32_t index, uint32_t want) {
  volatile Note& note = s.notes[threadIdx.x >> 5];
  note.want = want;
  note.waited = (static_cast<uint32_t>(what) + 1) << Note::INDEX_BITS | index;
}

__device__ __forceinline__ void clear_note(Shared& s) {
  *static_cast<volatile uint32_t*>(&s.notes[threadIdx.x >> 5].waited) = 0;
}

__device__ __forceinline__ void wait_barrier(Shared& s, uint64_t* barrier, uint32_t parity, Waited what, int32_t index) {
  if (ptx::barrier_passed(barrier, parity)) return;  // which may itself take as long as the phase does
  leave_note(s, what, index, parity);
  while (!ptx::barrier_passed(barrier, parity) && !is_set(s.aborted)) {
  }
  clear_note(s);
}

// The loader's and the copier's waits also end with the launch. Gives whether the phase is over. `barrier` is an address in
// shared memory.
__device__ __forceinline__ bool wait_barrier_or_end(Shared& s, uint32_t barrier, uint32_t parity, Waited what,
                                                    int32_t index) {
  if (ptx::barrier_passed(barrier, parity)) return true;
  leave_note(s, what, index, parity);
  bool passed = false;
  while (!passed && !is_set(s.aborted) && !is_set(s.ended)) passed = ptx::barrier_passed(barrier, parity);
  clear_note(s);
  return passed;
}

__device__ __forceinline__ bool has_reached(const uint32_t* counter, uint32_t want) {
  const uint32_t have = variant::STRICT ? ptx::load_acquire(counter) : ptx::load_relaxed(counter);
  return static_cast<int32_t>(have - want) >= 0;
}

// For one thread; what it tells its peers through a barrier they may rely on.
__device__ __forceinline__ void wait_counter(Shared& s, const Params& p, int32_t counter, uint32_t want) {
  const trace::Waiting waiting(s);
  const uint32_t* word = counter_at(p, counter);
  if (has_reached(word, want)) return;
  leave_note(s, Waited::COUNTER, counter, want);
  while (!has_reached(word, want) && !is_set(s.aborted)) {
  }
  clear_note(s);
}

// For all lanes of a warp beside the consumers. False if the launch is over.
__device__ __forceinline__ bool wait_counter_or_end(Shared& s, const Params& p, int32_t counter, uint32_t want, int lane) {
  bool going = true;
  if (lane == 0) {
    const uint32_t* word = counter_at(p, counter);
    leave_note(s, Waited::COUNTER, counter, want);
    while (going && !has_reached(word, want)) going = !is_set(s.ended) && !is_set(s.aborted);
    clear_note(s);
    going = going && !is_set(s.aborted);
  }
  __syncwarp();  // a shuffle orders no memory
  return __shfl_sync(~0u, going, 0);
}

// Until this SM's rows are those of step `step` of the launch, counted from 0. For all lanes of a warp beside the
// consumers. False if the launch is over. It leaves no note: consumers that do not come so far have theirs.
__device__ __forceinline__ bool wait_for_rows(Shared& s, uint32_t step, int lane) {
  bool going = true;
  if (lane == 0)
    while (going && !ptx::barrier_passed(&s.rows_moved, (step & 1) ^ 1)) going = !is_set(s.ended) && !is_set(s.aborted);
  __syncwarp();
  return __shfl_sync(~0u, going, 0);
}
