// ROUTER: a logit for every expert, float32.
#pragma once

#include "norm.h"

__device__ __forceinline__ void router(Consumer& c, const isa::Descriptor& task) {
  fetch_norm(c, task.norm);
  if (!begin_task(c, task)) return;
  Activations<sizes::HIDDEN> a;
  load_normalized(c, task.norm, a);
  each_tile<sizes::HIDDEN, 1>(c, task.tile_count, a, [&](int index, const Results<1>& results) {
    float2* payload = tile_payload<float2>(c, index);
    each_own_row(c, [&](int row, int which) { payload[row * 4 + (c.lane() & 3)] = results.value[0][which]; });
    send_tile(c, task, task.output, task.first_tile + index, index, task.tile_count, ROWS * 32);
  });
  c.sequence += task.tile_count;
}
