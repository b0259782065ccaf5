// SAMPLE_COMMIT: every SM finds the same token of every row, and moves its own copy of the rows on.
#pragma once

#include "border.h"
#include "items.h"
#include "logprobs.h"

struct Winner {
  double value;
  int token;
  float raw;
  int stop;
};

__device__ __forceinline__ Winner stronger(Winner a, Winner b) {
  const bool second = b.token != NO_TOKEN &&
                      (a.token == NO_TOKEN || b.value > a.value || (b.value == a.value && b.token < a.token));
  return {second ? b.value : a.value, second ? b.token : a.token, second ? b.raw : a.raw, a.stop | b.stop};
}

// The winner among all shares' candidates of a row, in every lane.
__device__ __forceinline__ Winner winner_of(Consumer& c, const uint8_t* candidates, int row) {
  constexpr int EACH = (sizes::SMS + isa::WARP - 1) / isa::WARP;
  uint4 words[EACH], stops[EACH];
  // All are asked for before the first is looked at.
#pragma unroll
  for (int n = 0; n < EACH; n++) {
    const int share = min(c.lane() + n * isa::WARP, sizes::SMS - 1);  // one twice is as good as once
    const uint8_t* at = candidates + (static_cast<size_t>(share) * ROWS + row) * sizeof(isa::Candidate);
    words[n] = ptx::load_shared_data(at);
    stops[n] = ptx::load_shared_data(at + 16);
  }
  Winner best{0, NO_TOKEN, 0, 0};
#pragma unroll
  for (int n = 0; n < EACH; n++) {
    const double value = __hiloint2double(words[n].y, words[n].x);
    best = stronger(best, {value, static_cast<int>(words[n].z), __uint_as_float(words[n].w), static_cast<int>(stops[n].x)});
  }
#pragma unroll
  for (int mask = 16; mask; mask >>= 1)
    best = stronger(best, {__shfl_xor_sync(~0u, best.value, mask), __shfl_xor_sync(~0u, best.token, mask),
                           __shfl_xor_sync(~0u, best.raw, mask), __shfl_xor_sync(~0u, best.stop, mask)});
  return best;
}

// Feed the row its token next, or end it. One thread.
__device__ __forceinline__ void move_on(Consumer& c, int row, int token) {
  RowState& rows = c.s.rows;
  const variant::RowInput& input = c.p.rows[row];
  rows.token[row] = token;
  rows.position[row]++;
  rows.made[row]++;
  bool over = token < 0 || rows.made[row] >= input.max_tokens;
  for (int n = 0; !over && n < input.stop_count; n++) over = __ldg(c.p.stop_tokens + input.stop_first + n) == token;
  if (over) rows.active[row] = 0;
}

// The lowest position that a step writes in a row's slot.
__device__ __forceinline__ int first_new_of(const RowState& rows, int row) {
  int lowest = rows.position[row];
#pragma unroll 1
  for (int other = 0; other < ROWS; other++)
    if (rows.active[other] && rows.slot[other] == rows.slot[row]) lowest = min(lowest, rows.position[other]);
  return lowest;
}

__device__ __forceinline__ void tell_host(Consumer& c, uint32_t step) {
#pragma unroll 1
  for (int row = 0; row < ROWS; row++) c.p.tokens[step * ROWS + row] = c.s.next_token[row];
  c.p.host->experts = c.s.experts_read;
  ptx::store_to_host(&c.p.host->steps, static_cast<int32_t>(step + 1));
}

// Make this SM's share of the histograms ready for the next step. For all consumers.
__device__ __forceinline__ void clear_histograms(Consumer& c, const isa::Descriptor& task) {
  constexpr int TOTAL = 2 * isa::DIGITS * ROWS;
  uint64_t* first = histogram_at(c, 0, 0, 0);
  for (int n = TOTAL * task.share / task.shares; n < TOTAL * (task.share + 1) / task.shares; n++)
    first[n * isa::DIGIT_BINS + c.thread] = 0;
}

// Tell the host of a row's log-probabilities. For one warp.
__device__ __forceinline__ void tell_logprobs(Consumer& c, const uint8_t* candidates, int row, uint32_t step, float raw) {
  variant::LogprobRecord& record = c.p.logprobs[step * ROWS + row];
  const double base = log_sum(c, row);
  if (c.lane() == 0) {
    record.base = base;
    record.raw = raw;
  }
  merge_tops(c, candidates, row, c.p.rows[row].logprobs, record);
  ptx::fence_system();
}

constexpr int ABSENT = -2;  // in the token ring: the row had ended

__device__ __forceinline__ void sample_commit(Consumer& c, const isa::Descriptor& task) {
  if (!begin_task(c, task)) return;
  RowState& rows = c.s.rows;
  const uint8_t* candidates = buffer_at(c.p, task.input);
  const uint32_t step = c.s.epoch - c.p.epoch - 1;
  const bool writer = task.flags & static_cast<int32_t>(isa::Flag::WRITER);
  if (rows_with(c, variant::row_flag::TOP_K | variant::row_flag::TOP_P)) clear_histograms(c, task);
  if (c.thread == 0) c.s.stop_seen = 0;
  c.meet_all();
#pragma unroll 1
  for (int row = c.warp(); row < ROWS; row += CONSUMER_WARPS) {
    if (!rows.active[row]) {
      if (c.lane() == 0) c.s.next_token[row] = ABSENT;
      continue;
    }
    const Winner winner = winner_of(c, candidates, row);
    if (writer && rows.flags[row] & variant::row_flag::LOGPROBS) tell_logprobs(c, candidates, row, step, winner.raw);
    if (c.lane() != 0) continue;
    c.s.next_token[row] = is_finite(winner.value) ? winner.token : NO_TOKEN;
    if (winner.stop) c.s.stop_seen = 1;
  }
  c.meet_all();
  if (c.thread < ROWS && c.s.next_token[c.thread] != ABSENT) move_on(c, c.thread, c.s.next_token[c.thread]);
  c.meet_all();
  bool any = false;
  if (c.warp() == 0) {
    any = active_rows(c) != 0;
    if (c.lane() < ROWS) rows.first_new[c.lane()] = first_new_of(rows, c.lane());
    cut_rows(c.s, c.lane());
    __syncwarp();  // thread 0 signals for all lanes
  }
  if (c.thread == 0) {
    if (writer) tell_host(c, step);
    // All that this SM's consumers stored in KV pages, for the copy engines of all SMs.
    ptx::fence_device();
    ptx::global_before_bulk();
    claim_message(c.s, c.sequence);
    submit_message(c.s, c.p, c.sequence, nullptr, c.s.payload[0], 0, task.signal_counter, task.signal_amount);
    if (!any || c.s.stop_seen || static_cast<int32_t>(step + 1) == c.p.steps) {
      __threadfence_block();  // after the message: see next_message
      *static_cast<volatile int32_t*>(&c.s.ended) = 1;
    }
    c.s.epoch++;
    c.s.searches++;
    ptx::barrier_arrive(&c.s.rows_moved, 1);
  }
  c.sequence++;
  c.meet_all();
}
