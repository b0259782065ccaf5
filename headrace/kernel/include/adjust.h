// Penalties, bias and mask of a row: steps 1 and 2 of headrace/model/sampling.py, on an SM's own logits.
#pragma once

#include "sampling.h"

// Of the count of one token: 2 in the output for each time, 1 for the prompt. Every operation rounds by itself.
__device__ __forceinline__ float penalised(const variant::RowInput& input, float logit, int32_t count) {
  if (count == 0) return logit;
  logit = logit > 0 ? __fdiv_rn(logit, input.repetition) : __fmul_rn(logit, input.repetition);
  const int times = count >> 1;
  if (times == 0) return logit;
  return __fsub_rn(__fsub_rn(logit, __fmul_rn(static_cast<float>(times), input.frequency)), input.presence);
}

// Count the token that the row is fed, if the SM of its logits has not. One thread.
__device__ __forceinline__ void count_fed(Consumer& c, Own own, int row, int32_t* history) {
  const RowState& rows = c.s.rows;
  const bool uncounted = rows.made[row] > 0 || rows.flags[row] & variant::row_flag::UNCOUNTED;
  if (uncounted && own.has(rows.token[row])) history[rows.token[row]] += 2;
}

__device__ __forceinline__ bool allowed(const Consumer& c, int row, int token) {
  return c.p.masks[row * variant::MASK_WORDS + token / 32] >> token % 32 & 1;
}

// Make the adjusted logits of a row's own tokens; gives this thread's best. For all consumers.
__device__ __forceinline__ Best adjust(Consumer& c, Own own, int row) {
  const variant::RowInput& input = c.p.rows[row];
  const int32_t flags = c.s.rows.flags[row];
  const bool counted = flags & variant::row_flag::COUNTED;
  int32_t* history = c.p.history + static_cast<size_t>(row) * sizes::VOCABULARY;
  if (counted && c.thread == 0) count_fed(c, own, row, history);
  c.meet_all();
#pragma unroll 1
  for (int token = own.first + c.thread; token < own.end; token += CONSUMERS) {
    const float raw = raw_logit(c, token, row);
    c.p.adjusted[place_of(token, row)] = counted ? penalised(input, raw, history[token]) : raw;
  }
  c.meet_all();
#pragma unroll 1
  for (int n = c.thread; n < input.bias_count; n += CONSUMERS) {
    const variant::Bias bias = c.p.biases[input.bias_first + n];
    if (!own.has(bias.token)) continue;
    float& logit = c.p.adjusted[place_of(bias.token, row)];
    logit = __fadd_rn(logit, bias.value);
  }
  c.meet_all();
  Best best = nothing();
#pragma unroll 1
  for (int token = own.first + c.thread; token < own.end; token += CONSUMERS) {
    float& logit = c.p.adjusted[place_of(token, row)];
    if (flags & variant::row_flag::MASKED && !allowed(c, row, token)) logit = -ptx::infinity();
    best = better(best, {finite_or_infinite(logit), token});
  }
  return best;
}
