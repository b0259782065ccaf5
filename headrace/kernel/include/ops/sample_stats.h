// SAMPLE_STATS: what all SMs must know of each other's logits before they sample.
#pragma once

#include "sampling.h"

__device__ __forceinline__ void sample_stats(Consumer& c, const isa::Descriptor& task) {
  if (!begin_task(c, task)) return;
  if (c.warp() == 0) claim_message(c.s, c.p, c.sequence, c.site());
  c.meet_all();
  auto* stats = reinterpret_cast<isa::Stat*>(c.s.payload[c.sequence % MESSAGES]);
  const Own own = own_tokens(task);
#pragma unroll 1
  for (int row = 0; row < ROWS; row++) {
    if (!c.s.rows.active[row]) continue;
    Best best = nothing();
    for (int token = own.first + c.thread; token < own.end; token += CONSUMERS)
      best = better(best, {finite_or_infinite(raw_logit(c, token, row)), token});
    best = best_of_all(c, best);
    if (c.thread == 0) {
      stats[row] = isa::Stat{};
      stats[row].largest = stats[row].best = best.value;
      stats[row].token = best.token;
    }
  }
  send_records(c, task, stats, sizeof(isa::Stat));
}
