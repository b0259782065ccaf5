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

// A row's largest raw logit among this SM's, in every lane. For one warp.
__device__ __forceinline__ Best largest_of_row(const Consumer& c, Own own, int row) {
  Best best = nothing();
#pragma unroll 4
  for (int token = own.first + c.lane() * 4; token < own.end; token += isa::WARP * 4) {
    const float4 four = *reinterpret_cast<const float4*>(raw_logits(c) + place_of(token, row));
    const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int n = 0; n < 4; n++)
      if (token + n < own.end) best = better(best, {finite_or_infinite(values[n]), token + n});
  }
  return best_of_warp(best);
}

__device__ __forceinline__ void tell_best(isa::Stat& stat, const Best& best) {
  stat = isa::Stat{};
  stat.largest = stat.best = best.value;
  stat.token = best.token;
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
  const Own own = own_tokens(task);
  isa::Stat* stats = c.s.stats;
  // Most rows are a warp's each; those of which more is to be found are all warps', one after the other.
  const uint32_t all = active_rows(c), more = rows_with(c, variant::row_flag::CHANGED | variant::row_flag::LOGPROBS);
  each_row_by_warp(c, all & ~more, [&](int row) {
    const Best best = largest_of_row(c, own, row);
    if (c.lane() == 0) tell_best(stats[row], best);
  });
  each_row(more, [&](int row) {
    const int32_t flags = c.s.rows.flags[row];
    const Best best = best_of_all(c, flags & variant::row_flag::CHANGED ? adjust(c, own, row) : largest_raw(c, own, row));
    if (c.thread == 0) tell_best(stats[row], best);
    if (flags & variant::row_flag::LOGPROBS) weigh_raw(c, own, row, &stats[row]);
  });
  if (c.thread == 0) claim_message(c.s, c.sequence);
  ptx::shared_before_bulk();
  c.meet_all();
  send_records(c, task, stats, sizeof(isa::Stat));
}
