// What the sampling operations share: an SM's own tokens, and the best of them.
#pragma once

#include "consumer.h"

// The tokens whose logits this SM has: [first, end).
struct Own {
  int first, end;
};

__device__ __forceinline__ Own own_tokens(const isa::Descriptor& task) {
  const int end = (task.first_tile + task.tile_count) * isa::TILE_ROWS;
  return {task.first_tile * isa::TILE_ROWS, end < sizes::VOCABULARY ? end : sizes::VOCABULARY};
}

__device__ __forceinline__ float raw_logit(const Consumer& c, int token, int row) {
  const float* logits = reinterpret_cast<const float*>(buffer_at(c.p, static_cast<int32_t>(isa::Buffer::LOGITS)));
  return logits[(static_cast<size_t>(token / 8) * ROWS + row) * 8 + token % 8];
}

// What is not a number wins like infinity, so that it is seen: SAMPLE_COMMIT then ends the row without a token.
__device__ __forceinline__ float finite_or_infinite(float value) { return value == value ? value : ptx::infinity(); }

constexpr int NO_TOKEN = -1;

struct Best {
  float value;
  int token;
};

__device__ __forceinline__ Best nothing() { return {-ptx::infinity(), NO_TOKEN}; }

// The larger value; of equal ones the lower token. NO_TOKEN loses against any token.
__device__ __forceinline__ Best better(Best a, Best b) {
  const bool second = b.token != NO_TOKEN && (a.token == NO_TOKEN || b.value > a.value ||
                                              (b.value == a.value && b.token < a.token));
  return second ? b : a;
}

// The best over all consumers, in thread 0. For all of them.
__device__ __forceinline__ Best best_of_all(Consumer& c, Best best) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1)
    best = better(best, {__shfl_xor_sync(~0u, best.value, mask), __shfl_xor_sync(~0u, best.token, mask)});
  if (c.lane() == 0) {
    c.s.pick_score[c.warp()] = best.value;
    c.s.pick_token[c.warp()] = best.token;
  }
  c.meet_all();
  if (c.thread == 0)
    for (int w = 1; w < CONSUMER_WARPS; w++) best = better(best, {c.s.pick_score[w], c.s.pick_token[w]});
  c.meet_all();
  return best;
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
