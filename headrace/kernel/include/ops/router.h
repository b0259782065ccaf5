// ROUTER: a logit for every expert, float32.
#pragma once

#include "gemm.h"

// The choice of experts hangs on these, and the loader on that: they go the way of what others wait for most (consumer.h).
__device__ __forceinline__ void router_tile(Consumer& c, const isa::Descriptor& task, int index, const Results& results) {
  uint32_t* tile = reinterpret_cast<uint32_t*>(buffer_at(c.p, task.output)) + static_cast<size_t>(task.first_tile + index) * ROWS * 8;
  settle_tile(c, task);
  each_own_row(c, [&](int row, int which) {
    const float2 v = results.value[which];
    c.came_back[which] = ptx::exchange(tile + row * 8 + (c.lane() & 3) * 2, __float_as_uint(v.x), __float_as_uint(v.y));
  });
  c.owes = true;
}
