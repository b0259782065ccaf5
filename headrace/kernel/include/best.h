// The best of many tokens, and what LM_HEAD leaves of its logits for sampling: the best of every warp's tiles.
#pragma once

#include "consumer.h"

// What is not a number wins like infinity, so that it is seen: SAMPLE_COMMIT then ends the row without a token.
__device__ __forceinline__ float finite_or_infinite(float value) { return value == value ? value : ptx::infinity(); }

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

// ---- of a warp's tiles, row by row ----

__device__ __forceinline__ Best& tile_best(Consumer& c, int warp, int row) { return reinterpret_cast<Best*>(c.s.record)[warp * ROWS + row]; }
static_assert(sizeof(Best) * CONSUMER_WARPS * ROWS == BEST_BYTES);

// Before a warp's first tile. For the whole warp, as what follows.
__device__ __forceinline__ void begin_bests(Consumer& c) {
  if (c.lane() < ROWS) tile_best(c, c.warp(), c.lane()) = nothing();
  __syncwarp();
}

// Take the logits of two tokens of a row into account. Lanes 4g to 4g + 3 have the same row; `counts` is false where there is none.
__device__ __forceinline__ void note_logits(Consumer& c, int row, int token, float2 logits, bool counts) {
  const bool second = token + 1 < sizes::VOCABULARY;
  Best best = token < sizes::VOCABULARY ? Best{finite_or_infinite(logits.x), token} : nothing();
  best = better(best, {finite_or_infinite(logits.y), second ? token + 1 : NO_TOKEN});
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2)
    best = better(best, {__shfl_xor_sync(~0u, best.value, mask), __shfl_xor_sync(~0u, best.token, mask)});
  if ((c.lane() & 3) || !counts) return;
  Best& so_far = tile_best(c, c.warp(), row);
  so_far = better(so_far, best);
}

// Of all warps' tiles, when all consumers have met. One thread.
__device__ __forceinline__ Best best_of_tiles(Consumer& c, int row) {
  Best best = nothing();
  for (int warp = 0; warp < CONSUMER_WARPS; warp++) best = better(best, tile_best(c, warp, row));
  return best;
}
