// EXPERT_UP and FFN_UP: gate and up, rows of each in turn, so a lane's two results are a gate and its up.
#pragma once

#include "norm.h"

__device__ __forceinline__ float gated(float2 v) { return __fdividef(v.x, 1.0f + expf(-v.x)) * v.y; }

// silu(gate) * up of `count` tiles of 16 weight rows, into tiles of a buffer from `first` on.
__device__ __forceinline__ void gated_tiles(Consumer& c, const isa::Descriptor& task, int first, int count) {
  Activations<sizes::HIDDEN> a;
  load_normalized(c, task.norm, a);
  each_tile<sizes::HIDDEN, 2>(c, count, a, [&](int index, const Results<2>& results) {
    // Halves are stored one after the other: elements 0 to 3 of the tile, then 4 to 7.
    uint16_t* payload = tile_payload<uint16_t>(c, index);
    each_own_row(c, [&](int row, int which) {
#pragma unroll
      for (int half = 0; half < 2; half++)
        payload[row * 8 + half * 4 + (c.lane() & 3)] =
            static_cast<uint16_t>(ptx::pack(gated(results.value[half][which]), 0.0f));
    });
    send_tile(c, task, task.output, first + index, index, count, ROWS * 16);
  });
  c.sequence += count;
}
