// ROUTER: a logit for every expert, float32.
#pragma once

#include "gemm.h"

__device__ __forceinline__ void router_tile(Consumer& c, int index, const Results& results) {
  float2* payload = tile_payload<float2>(c, index);
  each_own_row(c, [&](int row, int which) { payload[row * 4 + (c.lane() & 3)] = results.value[which]; });
}
