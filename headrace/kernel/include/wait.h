// Waiting, always for a bounded time.
//
// A wait that takes longer than the launch allows notes what it waited for and raises Shared::aborted. The publisher,
// which is never long away from its loop, tells the host and raises the flag that the publishers of all SMs look at.
// An aborted wait returns as if it had passed: whoever waited goes on with garbage to the next place where all its
// peers look at Shared::aborted together, and leaves there.
#pragma once

#include "trace.h"

enum class Agent : int32_t { LOADER = 0, CONSUMER = 1, ROUTER = 2, MERGER = 3 };
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

__device__ constexpr trace::Lane lane_of(Agent agent) { return agent == Agent::LOADER ? trace::LOADER : trace::CONSUMERS; }

// What a wait counts as in a trace. For tasks lines have the times before and after.
__device__ constexpr trace::Sum sum_of(Waited what, Agent agent) {
  if (what == Waited::TASK || what == Waited::TASK_FREE) return trace::Sum::NONE;
  if (what == Waited::COUNTER) return trace::Sum::INPUTS;
  return what == (agent == Agent::LOADER ? Waited::PAGE_FREE : Waited::PAGE_LANDED) ? trace::Sum::PAGES : trace::Sum::OTHER;
}

// Values of Shared::aborted. NOTING: somebody is writing Shared::trouble. OWN: it is there to be told.
enum Aborted : int32_t { NO = 0, NOTING = 1, OWN = 2, ELSEWHERE = 3 };

struct Site {
  Agent agent;
  int32_t task;  // its number in the SM's list; consumer: the tasks begun in this launch
};

__device__ __forceinline__ bool is_set(const int32_t& flag) { return *static_cast<const volatile int32_t*>(&flag) != 0; }

// Whether to go on waiting. `start` is 0 before the first call.
__device__ __forceinline__ bool keep_waiting(Shared& s, const Params& p, uint64_t& start, Site site, Waited what,
                                             int32_t index, uint32_t want, uint32_t have) {
  if (is_set(s.aborted)) return false;
  const uint64_t now = ptx::nanoseconds();
  if (start == 0) start = now;
  // Who waits for a counter knows best what is missing: all others give it time to say so.
  if (now - start < (what == Waited::COUNTER ? p.timeout : 2ull * p.timeout)) return true;
  if (atomicCAS(&s.aborted, NO, NOTING) == NO) {
    const int32_t task = site.agent == Agent::CONSUMER ? s.tasks[site.task % isa::TASK_SLOTS].number : site.task;
    s.trouble = {static_cast<int32_t>(site.agent), task, static_cast<int32_t>(what), index,
                 static_cast<int32_t>(want), static_cast<int32_t>(have)};
    __threadfence_block();
    *static_cast<volatile int32_t*>(&s.aborted) = OWN;
  }
  return false;
}

__device__ __forceinline__ void wait_barrier(Shared& s, const Params& p, uint64_t* barrier, uint32_t parity, Site site,
                                             Waited what, int32_t index) {
  const trace::Waiting waiting(s, lane_of(site.agent), sum_of(what, site.agent));
  if (ptx::barrier_passed(barrier, parity)) return;  // which may itself take as long as the phase does
  uint64_t start = 0;
  for (uint32_t tries = 1; !ptx::barrier_passed(barrier, parity); tries++)
    if ((tries & 15) == 0 && !keep_waiting(s, p, start, site, what, index, parity, parity ^ 1)) return;
}

// The loader's waits also end with the launch. Gives whether the phase is over.
__device__ __forceinline__ bool wait_barrier_or_end(Shared& s, const Params& p, uint64_t* barrier, uint32_t parity,
                                                    Site site, Waited what, int32_t index) {
  const trace::Waiting waiting(s, lane_of(site.agent), sum_of(what, site.agent));
  uint64_t start = 0;
  for (uint32_t tries = 1; !ptx::barrier_passed(barrier, parity); tries++) {
    if (is_set(s.ended)) return false;
    if ((tries & 15) == 0 && !keep_waiting(s, p, start, site, what, index, parity, parity ^ 1)) return false;
  }
  return true;
}

// For one thread; what it tells its peers through a barrier they may rely on.
__device__ __forceinline__ void wait_counter(Shared& s, const Params& p, int32_t counter, uint32_t want, Site site) {
  const uint32_t* word = counter_at(p, counter);
  const trace::Waiting waiting(s, lane_of(site.agent), trace::Sum::INPUTS);
  uint64_t start = 0;
  for (uint32_t tries = 1;; tries++) {
    const uint32_t have = variant::STRICT ? ptx::load_acquire(word) : ptx::load_relaxed(word);
    if (static_cast<int32_t>(have - want) >= 0) return;
    if ((tries & 255) == 0 && !keep_waiting(s, p, start, site, Waited::COUNTER, counter, want, have)) return;
  }
}

// For all lanes of a warp beside the consumers. False if the launch is over.
__device__ __forceinline__ bool wait_counter_or_end(Shared& s, const Params& p, int32_t counter, uint32_t want, Site site,
                                                    int lane) {
  bool going = true;
  if (lane == 0) {
    const uint32_t* word = counter_at(p, counter);
    uint64_t start = 0;
    for (uint32_t tries = 1; going; tries++) {
      const uint32_t have = variant::STRICT ? ptx::load_acquire(word) : ptx::load_relaxed(word);
      if (static_cast<int32_t>(have - want) >= 0) break;
      if ((tries & 15) == 0)
        going = !is_set(s.ended) && keep_waiting(s, p, start, site, Waited::COUNTER, counter, want, have);
    }
    going = going && !is_set(s.aborted);
  }
  return __shfl_sync(~0u, going, 0);
}

// The life of a warp that works beside the consumers, on all tasks of one operation: wait for the counter in word
// `counter` of the descriptor, call `work(words)`. For all lanes.
template <typename Work>
__device__ __forceinline__ void each_beside(Shared& s, const Params& p, Agent agent, isa::Opcode opcode, isa::Field counter,
                                            int lane, Work work) {
  const int32_t* list = p.descriptors + static_cast<size_t>(blockIdx.x) * sizes::TASKS * isa::WORDS;
#pragma unroll 1
  for (uint32_t step = 1; step <= static_cast<uint32_t>(p.steps); step++) {
#pragma unroll 1
    for (int first = 0; first < sizes::TASKS; first += isa::WARP) {
      const int own = first + lane;
      uint32_t found = __ballot_sync(~0u, own < sizes::TASKS && __ldg(list + own * isa::WORDS) == static_cast<int32_t>(opcode));
#pragma unroll 1
      for (; found; found &= found - 1) {
        const int number = first + __ffs(found) - 1;
        const int32_t* words = list + number * isa::WORDS;
        const int32_t* waited = words + static_cast<int>(counter);
        const uint32_t want = (p.epoch + step) * static_cast<uint32_t>(__ldg(waited + 1));
        if (!wait_counter_or_end(s, p, __ldg(waited), want, {agent, number}, lane)) return;
        work(words);
      }
    }
  }
}
