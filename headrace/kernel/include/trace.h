// What an SM did when, in a variant that records it; in all others nothing of this is left.
//
// Five threads of an SM write a line for each of their tasks: the copier, the first consumer, the publisher (a line for
// each signal), and the first of the loader's and of the helper's. Times are cycles of the SM's own clock; two anchors, at
// the launch's beginning and end, tell the host how they go with nanoseconds that all SMs share.
// headrace/kernel/records.py describes lines and anchors, headrace/kernel/trace.py reads them.
#pragma once

#include "state.h"

namespace trace {

enum Lane : int { COPIER = 0, CONSUMERS = 1, PUBLISHER = 2, LOADER = 3, HELPER = 4, LANES = 5 };
static_assert(LANES == variant::TRACE_LANES);

__device__ constexpr int warp_of(Lane lane) {
  constexpr int WARPS[LANES] = {COPIER_WARP, 0, PUBLISHER_WARP, LOADER_WARP, HELPER_WARP};
  return WARPS[lane];
}

// Whether this thread writes the lane's lines. Callers know their lane when they are compiled, so that a line's address
// is a constant and takes no register.
__device__ __forceinline__ bool writes(Lane lane) { return threadIdx.x == warp_of(lane) * isa::WARP; }

// For one thread, before any of the five begins.
template <typename S>
__device__ __forceinline__ void prepare(S& s) {
  if constexpr (variant::TRACE) {
    s.trace.signals = 0;
    for (auto& line : s.trace.line) line.ready = ptx::cycles();
  }
}

// This thread is done with what came before.
template <typename S>
__device__ __forceinline__ void ready(S& s, Lane lane) {
  if constexpr (variant::TRACE) {
    if (writes(lane)) s.trace.line[lane].ready = ptx::cycles();
  }
}

// It has a task: its number in the list, or the publisher's counter.
template <typename S>
__device__ __forceinline__ void begin(S& s, Lane lane, uint32_t step, uint32_t task) {
  if constexpr (variant::TRACE) {
    if (!writes(lane)) return;
    variant::TraceLine& line = s.trace.line[lane];
    line.taken = line.seen = ptx::cycles();
    line.inputs = 0;
    line.step = step;
    line.task = task;
  }
}

// What the task waits for is there.
template <typename S>
__device__ __forceinline__ void seen(S& s, Lane lane) {
  if constexpr (variant::TRACE) {
    if (!writes(lane)) return;
    variant::TraceLine& line = s.trace.line[lane];
    line.seen = ptx::cycles();
    line.inputs = line.seen - line.taken;
  }
}

// It is done with the task.
template <typename S>
__device__ __forceinline__ void end(S& s, const Params& p, Lane lane) {
  if constexpr (variant::TRACE) {
    if (!writes(lane)) return;
    variant::TraceLine& line = s.trace.line[lane];
    line.end = ptx::cycles();
    const uint32_t index = lane == PUBLISHER ? s.trace.signals++ : line.step * sizes::TASKS + line.task;
    auto* lines = reinterpret_cast<variant::TraceLine*>(p.trace + sizes::SMS * 2 * sizeof(variant::TraceAnchor));
    uint32_t block = blockIdx.x;
    ptx::forget(block);  // or the address is worked out once, and kept in registers all the time
    lines[(block * LANES + lane) * p.steps * sizes::TASKS + index] = line;
  }
}

// For thread 0, at the beginning (0) and at the end (1) of its life.
template <typename P>
__device__ __forceinline__ void anchor(const P& p, int which) {
  if constexpr (variant::TRACE) {
    if (threadIdx.x != 0) return;
    const uint64_t before = ptx::nanoseconds();
    uint64_t now;
    do {  // the timer moves in jumps: only right after one it tells the time
      now = ptx::nanoseconds();
    } while (now == before);
    reinterpret_cast<variant::TraceAnchor*>(p.trace)[blockIdx.x * 2 + which] = {now, ptx::cycles(), 0};
  }
}

// A wait of the consumers for a counter, as long as this lives: the time is taken off the sum at the beginning and added
// at the end, so no register is kept. Other waits are not noted: pages come every half microsecond, and a clock read for
// each would slow them down.
template <typename S>
struct Waiting {
  S& s;

  __device__ __forceinline__ explicit Waiting(S& s) : s(s) { note(false); }
  __device__ __forceinline__ ~Waiting() { note(true); }

  __device__ __forceinline__ void note(bool over) const {
    if constexpr (variant::TRACE) {
      if (!writes(CONSUMERS)) return;
      variant::TraceLine& line = s.trace.line[CONSUMERS];
      const uint32_t now = ptx::cycles();
      line.inputs += over ? now : -now;
      if (over) line.seen = now;
    }
  }
};

}  // namespace trace
