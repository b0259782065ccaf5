// LM_HEAD: logits of an SM's own part of the vocabulary, into memory that only this SM reads.
#pragma once

#include "gemm.h"

__device__ __forceinline__ void lm_head_tile(Consumer& c, const isa::Descriptor& task, int index, const Results& results) {
  float2* logits = reinterpret_cast<float2*>(buffer_at(c.p, task.output)) + static_cast<size_t>(task.first_tile + index) * ROWS * 4;
  each_own_row(c, [&](int row, int which) {
    const float2 v = results.value[which];
    logits[row * 4 + (c.lane() & 3)] = make_float2(v.x * sizes::LOGIT_SCALE, v.y * sizes::LOGIT_SCALE);
  });
}
