// LM_HEAD: logits of an SM's own part of the vocabulary, into memory that only this SM reads.
#pragma once

#include "norm.h"

__device__ __forceinline__ void lm_head(Consumer& c, const isa::Descriptor& task) {
  fetch_norm(c, task.norm);
  if (!begin_task(c, task)) return;
  Activations<sizes::HIDDEN> a;
  load_normalized(c, task.norm, a);
  float2* logits = reinterpret_cast<float2*>(buffer_at(c.p, task.output));
  each_tile<sizes::HIDDEN, 1>(c, task.tile_count, a, [&](int index, const Results<1>& results) {
    each_own_row(c, [&](int row, int which) {
      const float2 v = results.value[0][which];
      logits[(static_cast<size_t>(task.first_tile + index) * ROWS + row) * 4 + (c.lane() & 3)] =
          make_float2(v.x * sizes::LOGIT_SCALE, v.y * sizes::LOGIT_SCALE);
    });
  });
}
