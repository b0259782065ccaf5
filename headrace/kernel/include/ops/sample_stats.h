// SAMPLE_STATS: what all SMs must know of each other's logits before they sample.
#pragma once

#include "adjust.h"

// This thread's largest raw logit.
__device__ __forceinline__ Best largest_raw(const Consumer& c, Own own, int row) {
  Best best = nothing();
  for (int token = own.first + c.thread; token < own.end; token += CONSUMERS)
    best = better(best, {finite_or_infinite(raw_logit(c, token, row)), token});
  return best;
}

// For log-probabilities: the largest raw logit and the sum of exponentials, in thread 0. For all consumers.
__device__ __forceinline__ void weigh_raw(Consumer& c, Own own, int row, isa::Stat* stat) {
  const Best largest = best_of_all(c, largest_raw(c, own, row));
  if (c.thread == 0) c.s.best_score[row] = largest.value;
  c.meet_all();
  const float base = c.s.best_score[row];
  double sum = 0;
#pragma unroll 1
  for (int token = own.first + c.thread; token < own.end; token += CONSUMERS)
    sum += exponential(static_cast<double>(raw_logit(c, token, row)) - static_cast<double>(base));
  sum = sum_of_all(c, sum);
  if (c.thread == 0) {
    stat->largest = largest.value;
    stat->sum = sum;
  }
}

__device__ __forceinline__ void sample_stats(Consumer& c, const isa::Descriptor& task) {
  if (!begin_task(c, task)) return;
  if (c.warp() == 0) claim_message(c.s, c.sequence);
  c.meet_all();
  auto* stats = reinterpret_cast<isa::Stat*>(c.s.payload[c.sequence % MESSAGES]);
  const Own own = own_tokens(task);
#pragma unroll 1
  for (int row = 0; row < ROWS; row++) {
    if (!c.s.rows.active[row]) continue;
    const int32_t flags = c.s.rows.flags[row];
    const Best best =
        best_of_all(c, flags & variant::row_flag::CHANGED ? adjust(c, own, row) : largest_raw(c, own, row));
    if (c.thread == 0) {
      stats[row] = isa::Stat{};
      stats[row].largest = stats[row].best = best.value;
      stats[row].token = best.token;
    }
    if (flags & variant::row_flag::LOGPROBS) weigh_raw(c, own, row, &stats[row]);
  }
  send_records(c, task, stats, sizeof(isa::Stat));
}
