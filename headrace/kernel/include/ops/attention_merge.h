// ATTENTION_MERGE: the partial results of a row's chunks become its attention output.
//
// A warp takes a tile of one row at a time: eight lanes for its elements by four that share the chunks. Each of the
// four adds its chunks in order, and then the four are added in order, so a row's sum depends on its chunks alone.
#pragma once

#include "consumer.h"
#include "items.h"

__device__ __forceinline__ float merged_element(Consumer& c, const uint8_t* partials, int row, int tile, int chunks) {
  const int head = tile / HEAD_TILES, kv_head = head / GROUP, member = head % GROUP;
  const int element = c.lane() & 7, share = c.lane() >> 3;
  const float* records = reinterpret_cast<const float*>(partials) +
                         (static_cast<size_t>(row) * sizes::KV_HEADS + kv_head) * isa::MAX_CHUNKS * sizes::PARTIAL_FLOATS;
  const float* maxima = records + GROUP * HEAD_DIM + member;
  float maximum = -ptx::infinity();
  for (int chunk = c.lane(); chunk < chunks; chunk += isa::WARP)
    maximum = fmaxf(maximum, ptx::load_shared_float(maxima + chunk * sizes::PARTIAL_FLOATS));
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, mask));
  float output = 0, total = 0;
  for (int chunk = share; chunk < chunks; chunk += 4) {
    const float* record = records + chunk * sizes::PARTIAL_FLOATS;
    const float scale = expf(ptx::load_shared_float(record + GROUP * HEAD_DIM + member) - maximum);
    output += scale * ptx::load_shared_float(record + member * HEAD_DIM + tile % HEAD_TILES * 8 + element);
    total += scale * ptx::load_shared_float(record + GROUP * (HEAD_DIM + 1) + member);
  }
  float outputs = 0, totals = 0;
#pragma unroll
  for (int n = 0; n < 4; n++) {
    outputs += __shfl_sync(~0u, output, n * 8 + element);
    totals += __shfl_sync(~0u, total, n * 8 + element);
  }
  return __fdividef(outputs, totals);
}

__device__ __forceinline__ void attention_merge(Consumer& c, const isa::Descriptor& task) {
  if (!begin_task(c, task)) return;
  const uint8_t* partials = buffer_at(c.p, task.input);
  for (int index = c.warp(); index < task.tile_count; index += CONSUMER_WARPS) {
    uint32_t* payload = tile_payload<uint32_t>(c, index);
#pragma unroll 1
    for (int row = 0; row < ROWS; row++) {
      float value = 0;
      if (c.s.rows.active[row]) {
        const int chunks = chunks_of(c.s.rows.position[row], task.window).count;
        value = merged_element(c, partials, row, task.first_tile + index, chunks);
      }
      const float next = __shfl_down_sync(~0u, value, 1);
      if (c.lane() < 8 && c.lane() % 2 == 0) payload[row * 4 + c.lane() / 2] = ptx::pack(value, next);
    }
    send_tile(c, task, task.output, task.first_tile + index, index, task.tile_count, ROWS * 16);
  }
  c.sequence += task.tile_count;
}
