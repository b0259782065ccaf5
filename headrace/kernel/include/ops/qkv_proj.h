// QKV_PROJ: queries, keys and values of one KV head's group, turned by position; keys and values also go to their pages.
#pragma once

#include "kv.h"
#include "norm.h"
#include "rope.h"

// A lane's two elements of a key or value, rounded, into the page of its row's token: for later steps only.
__device__ __forceinline__ void store_in_page(Consumer& c, const isa::Descriptor& task, int row, int part, int dim,
                                              uint32_t word) {
  if (!c.s.rows.active[row]) return;
  const int position = c.s.rows.position[row], token = position % isa::BLOCK_TOKENS;
  const int block = kv::block_of(c.p, row, task.window, position / isa::BLOCK_TOKENS);
  uint16_t* page = reinterpret_cast<uint16_t*>(kv::page(c.p, task.layer, block, task.kv_head, part));
  if (part == 0) {
    *reinterpret_cast<uint32_t*>(page + kv::key_at(token, dim)) = word;
  } else {
    page[kv::value_at(token, dim)] = static_cast<uint16_t>(word);
    page[kv::value_at(token, dim + 1)] = static_cast<uint16_t>(word >> 16);
  }
}

__device__ __forceinline__ void qkv_proj(Consumer& c, const isa::Descriptor& task) {
  fetch_norm(c, task.norm);
  if (!begin_task(c, task)) return;
  Activations<sizes::HIDDEN> a;
  load_normalized(c, task.norm, a);
  each_tile<sizes::HIDDEN, 1>(c, task.tile_count, a, [&](int index, const Results<1>& results) {
    const int tile = task.first_tile + index, in_head = tile - task.kv_head * QKV_TILES;
    const int head = in_head / HEAD_TILES, dim = in_head % HEAD_TILES * 8 + (c.lane() & 3) * 2;
    const bool turns = task.rope != static_cast<int32_t>(isa::Pairing::NONE) && head <= GROUP;
    const float frequency = turns ? __ldg(c.p.frequencies + dim / 2) : 0.0f;
    uint32_t* payload = tile_payload<uint32_t>(c, index);
    each_own_row(c, [&](int row, int which) {
      float2 v = results.value[0][which];
      if (turns) v = rope::turned(v, static_cast<float>(c.s.rows.position[row]), frequency);
      const uint32_t word = ptx::pack(v.x, v.y);
      payload[row * 4 + (c.lane() & 3)] = word;
      if (head >= GROUP) store_in_page(c, task, row, head - GROUP, dim, word);
    });
    send_tile(c, task, task.output, tile, index, task.tile_count, ROWS * 16);
  });
  c.sequence += task.tile_count;
}
