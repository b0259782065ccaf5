// QKV_PROJ: queries, keys and values of one KV head's group, turned by position; keys and values also go to their pages.
#pragma once

#include "gemm.h"
#include "kv.h"
#include "rope.h"

// Before the wait for the task's inputs, so that no tile has to look into the block table.
__device__ __forceinline__ void find_new_blocks(Consumer& c, const isa::Descriptor& task) {
  const RowState& rows = c.s.rows;
  if (c.thread < ROWS && rows.active[c.thread])
    c.s.new_block[c.thread] = kv::block_of(c.p, c.thread, task.window, rows.position[c.thread] / isa::BLOCK_TOKENS);
}

// A lane's two elements of a key or value, rounded, into the page of its row's token: for later steps only.
__device__ __forceinline__ void store_in_page(Consumer& c, const isa::Descriptor& task, int row, int part, int dim,
                                              uint32_t word) {
  if (!c.s.rows.active[row]) return;
  const int position = c.s.rows.position[row], token = position % isa::BLOCK_TOKENS;
  uint16_t* page = reinterpret_cast<uint16_t*>(kv::page(c.s, task.layer, kv::page_of(c.s.new_block[row], task.kv_head, part)));
  if (part == 0) {
    *reinterpret_cast<uint32_t*>(page + kv::key_at(token, dim)) = word;
  } else {
    page[kv::value_at(token, dim)] = static_cast<uint16_t>(word);
    page[kv::value_at(token, dim + 1)] = static_cast<uint16_t>(word >> 16);
  }
}

__device__ __forceinline__ void qkv_tile(Consumer& c, const isa::Descriptor& task, int index, const Results& results) {
  const int in_head = task.first_tile + index - task.kv_head * QKV_TILES;
  const int head = in_head / HEAD_TILES, dim = in_head % HEAD_TILES * 8 + (c.lane() & 3) * 2;
  const bool turns = task.rope != static_cast<int32_t>(isa::Pairing::NONE) && head <= GROUP;
  const float frequency = turns ? c.s.frequencies[dim / 2] : 0.0f;
  settle_tile(c, task);
  each_own_row(c, [&](int row, int which) {
    float2 v = results.value[which];
    if (turns) v = rope::turned(v, static_cast<float>(c.s.rows.position[row]), frequency);
    const uint32_t word = ptx::pack(v.x, v.y);
    c.came_back[which] = ptx::exchange(word_of_tile(c, task, task.first_tile + index, row), word);
    if (head >= GROUP) store_in_page(c, task, row, head - GROUP, dim, word);
  });
  c.owes = true;
}
