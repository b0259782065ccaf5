// EXPERT_UP and FFN_UP: gate and up, rows of each in turn, so a lane's two results are a gate and its up.
#pragma once

#include "gemm.h"

__device__ __forceinline__ float gated(float2 v) { return __fdividef(v.x, 1.0f + expf(-v.x)) * v.y; }

// silu(gate) * up of half a tile. Halves are stored one after the other: elements 0 to 3 of the tile, then 4 to 7.
__device__ __forceinline__ void gated_half(Consumer& c, int index, int half, const Results& results) {
  uint16_t* payload = tile_payload<uint16_t>(c, index);
  each_own_row(c, [&](int row, int which) {
    payload[row * 8 + half * 4 + (c.lane() & 3)] = static_cast<uint16_t>(ptx::pack(gated(results.value[which]), 0.0f));
  });
}
