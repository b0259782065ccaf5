// ATTENTION: softmax partials over chunks of the past, one item (row, KV head, chunk) for each group of four warps.
//
// A warp takes half a page, 32 tokens: of blocks 0, 2, 4 .. of the chunk or of blocks 1, 3, 5 .., the lower or the
// upper half. It keeps a maximum, a sum and outputs of its own; the four are put together at the end of the item, in
// pairs. Scores need no exchange between lanes to become weights of the values: pages lie so that
// the columns of a score tile that a lane gets are those that it needs (headrace/model/kv.py).
#pragma once

#include "consumer.h"
#include "items.h"
#include "kv.h"

struct Attention {
  static constexpr int K_BLOCKS = HEAD_DIM / 32, DIM_TILES = HEAD_DIM / 8;
  uint4 query[K_BLOCKS];
  float output[DIM_TILES][4];
  float maximum, sum;  // of row g; sum: of this lane's own tokens
};

// Tokens that this step writes are stale in the page, which was fetched before: take them from QKV. A warp does its
// own half, so nobody else is disturbed.
__device__ __forceinline__ void put_new_tokens(Consumer& c, uint8_t* page, int part, int row, int head, int block, int half) {
  const RowState& rows = c.s.rows;
  const int begin = block * isa::BLOCK_TOKENS + half * 32;
  if (rows.position[row] < begin || rows.first_new[row] >= begin + 32) return;
  uint16_t* elements = reinterpret_cast<uint16_t*>(page);
  const uint8_t* qkv = buffer_at(c.p, static_cast<int32_t>(isa::Buffer::QKV));
#pragma unroll 1
  for (int other = 0; other < ROWS; other++) {
    const int position = rows.position[other], token = position - block * isa::BLOCK_TOKENS;
    if (!rows.active[other] || rows.slot[other] != rows.slot[row]) continue;
    if (position < begin || position >= begin + 32 || position > rows.position[row]) continue;
    if (c.lane() < HEAD_TILES) {
      const int tile = head * QKV_TILES + (GROUP + part) * HEAD_TILES + c.lane();
      const uint4 word = ptx::load_shared_data(qkv + (static_cast<size_t>(tile) * ROWS + other) * 16);
      if (part == 0) {
        *reinterpret_cast<uint4*>(elements + kv::key_at(token, c.lane() * 8)) = word;
      } else {
        const uint32_t words[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          elements[kv::value_at(token, c.lane() * 8 + 2 * j)] = static_cast<uint16_t>(words[j]);
          elements[kv::value_at(token, c.lane() * 8 + 2 * j + 1)] = static_cast<uint16_t>(words[j] >> 16);
        }
      }
    }
  }
  ptx::shared_before_bulk();  // the slot's next page comes by bulk copy
  __syncwarp();
}

// Half a block: scores, then values. `ring` is at the block's K page.
__device__ __forceinline__ void attend_half(Consumer& c, Attention& a, RingPlace ring, int row, int head, int block,
                                            int half, int window) {
  wait_barrier(c.s, Agent::CONSUMER, &c.s.page_full[ring.slot], ring.parity(), Waited::PAGE_LANDED, ring.slot);
  uint8_t* keys = c.s.ring[ring.slot];
  put_new_tokens(c, keys, 0, row, head, block, half);
  float score[4][4];
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int n = 0; n < 4; n++) score[j][n] = 0;
  // Four sums side by side, and the next block's keys under way, so that no product waits for the one before.
  auto key = [&](int j, int k) {
    return reinterpret_cast<const uint4*>(keys)[((half * 4 + j) * Attention::K_BLOCKS + k) * 32 + c.lane()];
  };
  uint4 b[2][4];
#pragma unroll
  for (int j = 0; j < 4; j++) b[0][j] = key(j, 0);
#pragma unroll
  for (int k = 0; k < Attention::K_BLOCKS; k++) {
    const auto& now = b[k & 1];
    if (k + 1 < Attention::K_BLOCKS)
#pragma unroll
      for (int j = 0; j < 4; j++) b[(k + 1) & 1][j] = key(j, k + 1);
#pragma unroll
    for (int j = 0; j < 4; j++) ptx::multiply_add(score[j], a.query[k].x, 0, a.query[k].y, 0, now[j].x, now[j].y);
#pragma unroll
    for (int j = 0; j < 4; j++) ptx::multiply_add(score[j], a.query[k].z, 0, a.query[k].w, 0, now[j].z, now[j].w);
  }
  release_page(c.s, c.lane(), ring.slot, 2);
  ring.advance(1);

  const int position = c.s.rows.position[row];
  const int first = block * isa::BLOCK_TOKENS + half * 32 + (c.lane() & 3) * 8;
  const float scale = rsqrtf(static_cast<float>(HEAD_DIM));
  uint32_t seen[4];  // masks of the bfloat16 pairs of this lane's tokens
  float grown = a.maximum;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    seen[j] = 0;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int token = first + 2 * j + e;
      const bool visible = token <= position && (window == 0 || token > position - window);
      seen[j] |= visible ? 0xffffu << (16 * e) : 0u;
      score[j][e] = visible ? score[j][e] * scale : -ptx::infinity();
      grown = fmaxf(grown, score[j][e]);
    }
  }
  grown = fmaxf(grown, __shfl_xor_sync(~0u, grown, 1));
  grown = fmaxf(grown, __shfl_xor_sync(~0u, grown, 2));
  const float base = grown == -ptx::infinity() ? 0.0f : grown;  // nothing seen yet: all weights are 0
  const float shrink = expf(a.maximum - base);
  a.maximum = grown;
  a.sum *= shrink;
  uint32_t weights[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float low = expf(score[j][0] - base), high = expf(score[j][1] - base);
    a.sum += low + high;
    weights[j] = ptx::pack(low, high);
  }

  wait_barrier(c.s, Agent::CONSUMER, &c.s.page_full[ring.slot], ring.parity(), Waited::PAGE_LANDED, ring.slot);
  uint8_t* values = c.s.ring[ring.slot];
  put_new_tokens(c, values, 1, row, head, block, half);
  auto value = [&](int t) { return reinterpret_cast<const uint4*>(values)[(t * 2 + half) * 32 + c.lane()]; };
#pragma unroll
  for (int j = 0; j < 4; j++) b[0][j] = value(j);
#pragma unroll
  for (int first = 0; first < Attention::DIM_TILES; first += 4) {
    const auto& now = b[first / 4 & 1];
    if (first + 4 < Attention::DIM_TILES)
#pragma unroll
      for (int j = 0; j < 4; j++) b[(first / 4 + 1) & 1][j] = value(first + 4 + j);
    // What is masked may be anything, and 0 times infinity is not 0.
#pragma unroll
    for (int j = 0; j < 4; j++) {
      a.output[first + j][0] *= shrink;
      a.output[first + j][1] *= shrink;
      ptx::multiply_add(a.output[first + j], weights[0], 0, weights[1], 0, now[j].x & seen[0], now[j].y & seen[1]);
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
      ptx::multiply_add(a.output[first + j], weights[2], 0, weights[3], 0, now[j].z & seen[2], now[j].w & seen[3]);
  }
  release_page(c.s, c.lane(), ring.slot, 2);
}

// A tile of a warp's outputs, on the way to another warp of the group: in a lane's own order, without bank conflicts.
__device__ __forceinline__ float2& staged(float* staging, int tile, int lane) {
  return *reinterpret_cast<float2*>(staging + (tile * GROUP * 4 + lane) * 2);
}

// Product and sum rounded apart: which of two warps adds to the other's must not show.
__device__ __forceinline__ float2 plus_scaled(float2 to, const Attention& a, int tile, float scale) {
  return make_float2(__fadd_rn(to.x, __fmul_rn(a.output[tile][0], scale)), __fadd_rn(to.y, __fmul_rn(a.output[tile][1], scale)));
}

// Put the four warps of a group together, (0 + 1) + (2 + 3), and send the record. For all warps of the group; which of
// them does the last sum takes turns, and the others go on.
__device__ __forceinline__ void send_partials(Consumer& c, const isa::Descriptor& task, const Attention& a, int row,
                                              int head, int chunk, uint32_t sequence, bool last, int group, int part) {
  const int query = c.lane() >> 2, quarter = c.lane() & 3, turn = static_cast<int>(sequence / RECORDS % 4);
  auto& maxima = c.s.attention_max[group][turn & 1];
  auto& sums = c.s.attention_sum[group][turn & 1];
  float sum = a.sum;
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (quarter == 0) {
    maxima[part][query] = a.maximum;
    sums[part][query] = sum;
  }
  ptx::meet(FIRST_GROUP + group, isa::GROUP_THREADS);
  float maximum = -ptx::infinity(), total = 0;
#pragma unroll
  for (int w = 0; w < 4; w++) maximum = fmaxf(maximum, maxima[w][query]);
#pragma unroll
  for (int w = 0; w < 4; w++) total += sums[w][query] * expf(maxima[w][query] - maximum);
  const float scale = expf(a.maximum - maximum);
  const int distance = part ^ turn;  // from the warp whose turn it is
  float* record = reinterpret_cast<float*>(c.s.record + (sequence % RECORDS) * PARTIAL_BYTES);
  float* second = &c.s.sums[0][0][0][0] + group * GROUP * HEAD_DIM;
  static_assert(2 * GROUP * HEAD_DIM * sizeof(float) <= sizeof(c.s.sums), "no room to add up attention's outputs");
  const bool used = query < GROUP;
  if (distance == 1) {
    claim_message(c.s, sequence);
    if (sequence >= RECORDS) wait_sent(c.s, sequence - RECORDS);
  }
  if (distance & 1) {
#pragma unroll
    for (int t = 0; t < Attention::DIM_TILES; t++)
      if (used) staged(distance == 1 ? record : second, t, c.lane()) = plus_scaled(make_float2(0, 0), a, t, scale);
    return ptx::meet_no_wait(SECOND_GROUP + group, isa::GROUP_THREADS);
  }
  ptx::meet(SECOND_GROUP + group, isa::GROUP_THREADS);
  if (distance == 2) {
#pragma unroll
    for (int t = 0; t < Attention::DIM_TILES; t++)
      if (used) staged(second, t, c.lane()) = plus_scaled(staged(second, t, c.lane()), a, t, scale);
    return ptx::meet_no_wait(THIRD_GROUP + group, 2 * isa::WARP);
  }
  float2 near[Attention::DIM_TILES];  // read whole before the record takes its place
#pragma unroll
  for (int t = 0; t < Attention::DIM_TILES; t++)
    near[t] = used ? plus_scaled(staged(record, t, c.lane()), a, t, scale) : make_float2(0, 0);
  claim_message(c.s, sequence);
  ptx::meet(THIRD_GROUP + group, 2 * isa::WARP);
  if (used) {
#pragma unroll
    for (int t = 0; t < Attention::DIM_TILES; t++) {
      const float2 far = staged(second, t, c.lane());
      *reinterpret_cast<float2*>(record + query * HEAD_DIM + t * 8 + quarter * 2) = make_float2(near[t].x + far.x, near[t].y + far.y);
    }
    if (quarter == 0) {
      record[GROUP * HEAD_DIM + query] = maximum;
      record[GROUP * (HEAD_DIM + 1) + query] = total;
    }
  }
  ptx::shared_before_bulk();
  __syncwarp();
  if (c.lane()) return;
  const size_t index = (static_cast<size_t>(row) * sizes::KV_HEADS + head) * isa::MAX_CHUNKS + chunk;
  submit_message(c.s, c.p, sequence, buffer_at(c.p, task.output) + index * PARTIAL_BYTES, record, PARTIAL_BYTES,
                 last ? task.signal_counter : 0, task.signal_amount);
}

// A row's queries of a KV head, as the wide operand: eight of its sixteen rows.
__device__ __forceinline__ void load_queries(Consumer& c, const isa::Descriptor& task, Attention& a, int row, int head) {
  const int query = c.lane() >> 2;
  const uint8_t* qkv = buffer_at(c.p, task.input);
#pragma unroll
  for (int k = 0; k < Attention::K_BLOCKS; k++) {
    const int tile = head * QKV_TILES + query * HEAD_TILES + 4 * k + (c.lane() & 3);
    a.query[k] = query < GROUP ? ptx::load_shared_data(qkv + (static_cast<size_t>(tile) * ROWS + row) * 16)
                               : make_uint4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ void attend_chunk(Consumer& c, const isa::Descriptor& task, Attention& a, int row, int head,
                                             int begin, int blocks, int part, int skipped) {
  a.maximum = -ptx::infinity();
  a.sum = 0;
#pragma unroll
  for (int t = 0; t < Attention::DIM_TILES; t++)
#pragma unroll
    for (int n = 0; n < 4; n++) a.output[t][n] = 0;
  RingPlace ring = c.ring;
  ring.advance(2 * (part >> 1));
  let_loader_come(c.s, ring, skipped + 2 * (part >> 1), kv::PAGE_BYTES);
#pragma unroll 1
  for (int block = part >> 1; block < blocks; block += 2) {
    attend_half(c, a, ring, row, head, begin + block, part & 1, task.window);
    ring.advance(4);
  }
}

__device__ __forceinline__ void attention(Consumer& c, const isa::Descriptor& task) {
  const ChunkTable& table = table_for(c.s, task.window);
  const Runs runs(table, task.share, task.shares, c.lane());
  const int items = runs.items();
  const uint32_t heads = runs.heads(c.lane());
  const bool going = begin_after(c, [&] {
    for (int head = 0; head < sizes::KV_HEADS; head++)
      if (heads >> head & 1) wait_for(c, task.wait_counter + head, task.wait_arrivals);
  });
  if (!going) return;
  if (items == 0) return signal_only(c, task);
  const int group = c.warp() >> 2, part = c.warp() & 3;
  int item = 0, most = 0;  // blocks of an item before
  runs.each([&](int row, int head, int low, int high) {
    const RowChunks& chunks = table.rows[row];
    Attention a;
    load_queries(c, task, a, row, head);
#pragma unroll 1
    for (int chunk = low; chunk < high; chunk++, item++) {
      const int begin = chunks.first + chunk * chunks.size, blocks = min(chunks.last + 1 - begin, chunks.size);
      // Records alternate with the parity of messages, so groups do, too.
      const uint32_t sequence = c.sequence + item;
      if (static_cast<int>(sequence & 1) == group) {
        attend_chunk(c, task, a, row, head, begin, blocks, part, 2 * most);
        send_partials(c, task, a, row, head, chunk, sequence, item == items - 1, group, part);
      }
      c.ring.advance(2 * blocks);
      most = max(most, blocks);
    }
  });
  c.sequence += items;
}
