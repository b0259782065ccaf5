// The helper: one warp that works beside the consumers, off everyone's way. It chooses the experts as soon as the router's
// logits are there, so that they are known when the loader comes to their pages, and merges attention's partial results
// while the consumers are at the experts. It takes these in the order of the list, as any SM could.
#pragma once

#include "ops/attention_merge.h"
#include "route.h"

// The words of a task of this SM. Worked out anew at each use: the warp has few registers to keep a list in.
__device__ __forceinline__ const int32_t* words_of(const Params& p, int number) {
  uint32_t sm = blockIdx.x;
  ptx::forget(sm);
  return p.descriptors + (sm * sizes::TASKS + number) * isa::WORDS;
}

// Forgotten from task to task, as a consumer's thread is: or addresses of both operations would fill registers.
__device__ __forceinline__ int helper_lane() {
  uint32_t thread = threadIdx.x;
  ptx::forget(thread);
  return static_cast<int>(thread & 31);
}

// For all lanes. False if the launch is over.
__device__ __forceinline__ bool help_with(Shared& s, const Params& p, int number, uint32_t epoch) {
  const int lane = helper_lane();
  const int32_t* words = words_of(p, number);
  auto word = [&](isa::Field field) { return __ldg(words + static_cast<int>(field)); };
  const bool routes = sizes::EXPERTS > 0 && word(isa::Field::OPCODE) == static_cast<int32_t>(isa::Opcode::EXPERT_UP);
  const int32_t* waited = words + static_cast<int>(routes ? isa::Field::LOADER_COUNTER : isa::Field::WAIT_COUNTER);
  s.doing[static_cast<int>(Agent::HELPER)] = number;
  trace::begin(s, trace::HELPER, epoch - p.epoch - 1, number);
  if (!wait_counter_or_end(s, p, __ldg(waited), epoch * static_cast<uint32_t>(__ldg(waited + 1)), lane)) return false;
  trace::seen(s, trace::HELPER);
  if (!routes) {
    attention_merge(s, p, words, lane);
  } else if constexpr (sizes::EXPERTS > 0) {
    choose_experts(s, p, lane);
    if (lane == 0) ptx::barrier_arrive(&s.route_full, 1);
  }
  trace::end(s, p, trace::HELPER);
  trace::ready(s, trace::HELPER);
  return true;
}

// The helper's whole life. `number` is the last task that is done with; which of the 32 after it are the helper's is asked
// anew each time: the warp has no register to spare.
__device__ __forceinline__ void help(Shared& s, const Params& p) {
#pragma unroll 1
  for (uint32_t epoch = p.epoch + 1; epoch - p.epoch <= static_cast<uint32_t>(p.steps); epoch++) {
    // Logits of a first layer that routes may be there before an SM that had no part in them has moved its rows on.
    if (!wait_for_rows(s, epoch - p.epoch - 1, helper_lane())) return;
    int number = -1;
#pragma unroll 1
    while (number < sizes::TASKS) {
      const int own = number + 1 + helper_lane();
      const auto opcode = static_cast<isa::Opcode>(own < sizes::TASKS ? __ldg(words_of(p, own)) : 0);
      const uint32_t found = __ballot_sync(~0u, opcode == isa::Opcode::EXPERT_UP || opcode == isa::Opcode::ATTENTION_MERGE);
      number += found ? __ffs(found) : isa::WARP;
      if (found && !help_with(s, p, number, epoch)) return;
    }
  }
}
