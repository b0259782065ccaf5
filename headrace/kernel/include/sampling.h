// What the sampling operations share: an SM's own tokens, what is known of a row, and the best of many.
#pragma once

#include "consumer.h"
#include "exponential.h"
#include "philox.h"
#include "selection.h"

// The tokens whose logits this SM has: [first, end). `first` is a multiple of 8.
struct Own {
  int first, end;

  __device__ __forceinline__ bool has(int token) const { return token >= first && token < end; }
};

__device__ __forceinline__ Own own_tokens(const isa::Descriptor& task) {
  const int end = (task.first_tile + task.tile_count) * isa::TILE_ROWS;
  return {task.first_tile * isa::TILE_ROWS, end < sizes::VOCABULARY ? end : sizes::VOCABULARY};
}

// ---- rows ----

// The active rows, one bit each. For whole warps, as what follows.
__device__ __forceinline__ uint32_t active_rows(const Consumer& c) {
  return __ballot_sync(~0u, c.lane() < ROWS && c.s.rows.active[c.lane()]);
}

// The active rows with a flag, one bit each. For whole warps; every SM finds the same.
__device__ __forceinline__ uint32_t rows_with(const Consumer& c, int32_t flag) {
  const int row = c.lane();
  return __ballot_sync(~0u, row < ROWS && c.s.rows.active[row] && (c.s.rows.flags[row] & flag));
}

// Call `visit(row)` for the rows whose bits are set.
template <typename Visit>
__device__ __forceinline__ void each_row(uint32_t rows, Visit visit) {
#pragma unroll 1
  for (; rows; rows &= rows - 1) visit(__ffs(rows) - 1);
}

// The same, each row for one warp.
template <typename Visit>
__device__ __forceinline__ void each_row_by_warp(const Consumer& c, uint32_t rows, Visit visit) {
  int turn = 0;
  each_row(rows, [&](int row) {
    if (turn++ % CONSUMER_WARPS == c.warp()) visit(row);
  });
}

// ---- buffers ----

// Where a buffer begins, worked out where it is needed: kept from task to task it would take registers of all operations.
__device__ __forceinline__ uint8_t* begin_of(const Consumer& c, isa::Buffer buffer) {
  uint32_t number = static_cast<uint32_t>(buffer);
  ptx::forget(number);
  return buffer_at(c.p, number);
}

// ---- logits ----

__device__ __forceinline__ size_t place_of(int token, int row) {
  return (static_cast<size_t>(token / 8) * ROWS + row) * 8 + token % 8;
}

__device__ __forceinline__ float* raw_logits(const Consumer& c) {
  return reinterpret_cast<float*>(begin_of(c, isa::Buffer::LOGITS));
}

__device__ __forceinline__ float raw_logit(const Consumer& c, int token, int row) {
  return raw_logits(c)[place_of(token, row)];
}

// Those that a row is sampled from.
__device__ __forceinline__ const float* logits_of(const Consumer& c, int row) {
  return c.s.rows.flags[row] & variant::row_flag::CHANGED ? c.p.adjusted : raw_logits(c);
}

// Call `visit(token, value, own)` for all own tokens of a row, four at a time and `own` false past the end: every
// consumer makes the same number of calls. For all consumers.
template <typename Visit>
__device__ __forceinline__ void each_token(const Consumer& c, Own own, int row, const float* logits, Visit visit) {
#pragma unroll 1
  for (int start = own.first; start < own.end; start += 4 * CONSUMERS) {
    const int token = start + 4 * c.thread;
    float4 v = make_float4(0, 0, 0, 0);
    if (token < own.end) v = *reinterpret_cast<const float4*>(logits + place_of(token, row));
    // One after the other in one piece of code, which is long.
#pragma unroll 1
    for (int n = 0; n < 4; n++) {
      visit(token + n, v.x, token + n < own.end);
      v = make_float4(v.y, v.z, v.w, v.w);
    }
  }
}

// What is not a number wins like infinity, so that it is seen: SAMPLE_COMMIT then ends the row without a token.
__device__ __forceinline__ float finite_or_infinite(float value) { return value == value ? value : ptx::infinity(); }

template <typename Value>
__device__ __forceinline__ bool is_finite(Value value) {
  return value - value == 0;
}

// ---- the best of many ----

constexpr int NO_TOKEN = -1;

template <typename Value>
struct Choice {
  Value value;
  int token;
};
using Best = Choice<float>;

__device__ __forceinline__ Best nothing() { return {-ptx::infinity(), NO_TOKEN}; }

// The larger value; of equal ones the lower token. NO_TOKEN loses against any token.
template <typename Value>
__device__ __forceinline__ Choice<Value> better(Choice<Value> a, Choice<Value> b) {
  const bool second = b.token != NO_TOKEN && (a.token == NO_TOKEN || b.value > a.value ||
                                              (b.value == a.value && b.token < a.token));
  return second ? b : a;
}

// The best of a warp, in every lane.
template <typename Value>
__device__ __forceinline__ Choice<Value> best_of_warp(Choice<Value> best) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1)
    best = better(best, {__shfl_xor_sync(~0u, best.value, mask), __shfl_xor_sync(~0u, best.token, mask)});
  return best;
}

__device__ __forceinline__ float* scratch(Consumer& c, float) { return c.s.pick_score; }
__device__ __forceinline__ double* scratch(Consumer& c, double) { return c.s.pick_value; }

// The best over all consumers, in thread 0. For all of them.
template <typename Value>
__device__ __forceinline__ Choice<Value> best_of_all(Consumer& c, Choice<Value> best) {
  best = best_of_warp(best);
  Value* values = scratch(c, best.value);
  if (c.lane() == 0) {
    values[c.warp()] = best.value;
    c.s.pick_token[c.warp()] = best.token;
  }
  c.meet_all();
  if (c.thread == 0)
    for (int w = 1; w < CONSUMER_WARPS; w++) best = better(best, {values[w], c.s.pick_token[w]});
  c.meet_all();
  return best;
}

// A sum over all consumers in an order of its own, in thread 0. For all of them.
__device__ __forceinline__ double sum_of_all(Consumer& c, double sum) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) sum += __shfl_xor_sync(~0u, sum, mask);
  if (c.lane() == 0) c.s.pick_value[c.warp()] = sum;
  c.meet_all();
  if (c.thread == 0)
    for (int w = 1; w < CONSUMER_WARPS; w++) sum += c.s.pick_value[w];
  c.meet_all();
  return sum;
}

// ---- exchange ----

__device__ __forceinline__ const uint8_t* stat_at(const Consumer& c, int share, int row) {
  return begin_of(c, isa::Buffer::STATS) + (static_cast<size_t>(share) * ROWS + row) * sizeof(isa::Stat);
}

// Publish this share's records of all rows, written by thread 0, as one message. For all consumers.
__device__ __forceinline__ void send_records(Consumer& c, const isa::Descriptor& task, const void* records, uint32_t bytes) {
  if (c.thread == 0) {
    ptx::shared_before_bulk();
    submit_message(c.s, c.p, c.sequence, buffer_at(c.p, task.output) + static_cast<size_t>(task.share) * ROWS * bytes,
                   records, ROWS * bytes, task.signal_counter, task.signal_amount);
  }
  c.sequence++;
}
