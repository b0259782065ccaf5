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

// A lane's two neighbouring elements of a row, `dim` the first, out to where attention reads them and into their page.
__device__ __forceinline__ void put_out(Consumer& c, const isa::Descriptor& task, int row, int which, int head, int dim,
                                        uint32_t* to, uint32_t word) {
  c.came_back[which] = ptx::exchange(to, word);
  if (head >= GROUP) store_in_page(c, task, row, head - GROUP, dim, word);
}

// A tile of pairs half a head apart. A lane's two results are elements i and i + HEAD_DIM / 2, and its neighbour's are the
// next of each: lanes with an even i take the two lower ones and the others the two upper ones, so that every lane has a
// word. Together they fill halves of two tiles. Who waits for the head waits for all its tiles, whichever are signalled
// first.
__device__ __forceinline__ void half_split_tile(Consumer& c, const isa::Descriptor& task, int head, int tile,
                                                const Results& results) {
  const int pair = tile * 4 + (c.lane() & 3), upper = pair & 1, dim = pair - upper + upper * (HEAD_DIM / 2);
  float2 v[Sums::EIGHTS];
#pragma unroll
  for (int which = 0; which < Sums::EIGHTS; which++) {
    const int row = ((c.lane() >> 2) + 8 * which) % ROWS;  // lanes that have none take part: a shuffle is for all
    const float2 turned = rope::turned(results.value[which], static_cast<float>(c.s.rows.position[row]), c.s.frequencies[pair]);
    const float other = __shfl_xor_sync(~0u, upper ? turned.x : turned.y, 1);
    v[which] = upper ? make_float2(other, turned.y) : make_float2(turned.x, other);
  }
  settle_tile(c, task);
  const int to = task.kv_head * QKV_TILES + head * HEAD_TILES + dim / 8;
  each_own_row(c, [&](int row, int which) {
    const uint32_t word = ptx::pack(v[which].x, v[which].y);
    put_out(c, task, row, which, head, dim, word_of_tile(c, task, to, row, dim % 8 / 2), word);
  });
  c.owes = true;
}

__device__ __forceinline__ void qkv_tile(Consumer& c, const isa::Descriptor& task, int index, const Results& results) {
  const int in_head = task.first_tile + index - task.kv_head * QKV_TILES;
  const int head = in_head / HEAD_TILES, dim = in_head % HEAD_TILES * 8 + (c.lane() & 3) * 2;
  const bool turns = task.rope != static_cast<int32_t>(isa::Pairing::NONE) && head <= GROUP;
  if (variant::HALF_SPLIT && turns) return half_split_tile(c, task, head, in_head % HEAD_TILES, results);
  const float frequency = turns ? c.s.frequencies[dim / 2] : 0.0f;
  settle_tile(c, task);
  each_own_row(c, [&](int row, int which) {
    float2 v = results.value[which];
    if (turns) v = rope::turned(v, static_cast<float>(c.s.rows.position[row]), frequency);
    const uint32_t word = ptx::pack(v.x, v.y);
    put_out(c, task, row, which, head, dim, word_of_tile(c, task, task.first_tile + index, row), word);
  });
  c.owes = true;
}
