// EMBED: the residual begins as the embedding of each row's token, which lies 8 tokens a tile, like any matrix.
#pragma once

#include "consumer.h"

__device__ __forceinline__ void embed(Consumer& c, const isa::Descriptor& task) {
  if (!begin_task(c, task)) return;
  const uint8_t* weights = c.p.weights + static_cast<size_t>(task.weights) * isa::UNIT;
  for (int index = c.warp(); index < task.tile_count; index += CONSUMER_WARPS) {
    uint4* payload = tile_payload<uint4>(c, index);
    if (c.lane() < ROWS) {
      const int token = c.s.rows.token[c.lane()], tile = task.first_tile + index;
      uint4 word = make_uint4(0, 0, 0, 0);
      if (c.s.rows.active[c.lane()]) {
        const size_t of_token = static_cast<size_t>(token / 8) * (8 * sizes::HIDDEN * 2) + token % 8 * 64;
        word = __ldg(reinterpret_cast<const uint4*>(weights + of_token + tile / 4 * isa::UNIT + tile % 4 * 16));
      }
      float4* residual = reinterpret_cast<float4*>(c.s.residual[index][c.lane()]);
      residual[0] = make_float4(ptx::low_half(word.x), ptx::high_half(word.x), ptx::low_half(word.y), ptx::high_half(word.y));
      residual[1] = make_float4(ptx::low_half(word.z), ptx::high_half(word.z), ptx::low_half(word.w), ptx::high_half(word.w));
      payload[c.lane()] = word;
    }
    send_tile(c, task, task.output, task.first_tile + index, index, task.tile_count, ROWS * 16);
  }
  c.sequence += task.tile_count;
}
