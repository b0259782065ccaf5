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

__device__ __forceinline__ void wait_for_page(Consumer& c, const RingPlace& ring) {
  wait_barrier(c.s, Agent::CONSUMER, &c.s.page_full[ring.slot], ring.parity(), Waited::PAGE_LANDED, ring.slot);
}

// Tokens that this step writes are stale in the pages, which were fetched before: take them from QKV. A warp does its
// own half, so nobody else is disturbed. `ring` is at the block's K page.
__device__ __forceinline__ void put_new_tokens(Consumer& c, RingPlace ring, int row, int head, int block, int half) {
  const RowState& rows = c.s.rows;
  const int begin = block * isa::BLOCK_TOKENS + half * 32;
  if (rows.position[row] < begin || rows.first_new[row] >= begin + 32) return;
  wait_for_page(c, ring);
  uint16_t* keys = reinterpret_cast<uint16_t*>(c.s.ring[ring.slot]);
  ring.advance(1);
  wait_for_page(c, ring);
  uint16_t* values = reinterpret_cast<uint16_t*>(c.s.ring[ring.slot]);
  const uint8_t* qkv = buffer_at(c.p, static_cast<int32_t>(isa::Buffer::QKV));
#pragma unroll 1
  for (int other = 0; other < ROWS; other++) {
    const int position = rows.position[other], token = position - block * isa::BLOCK_TOKENS;
    if (!rows.active[other] || rows.slot[other] != rows.slot[row]) continue;
    if (position < begin || position >= begin + 32 || position > rows.position[row]) continue;
    if (c.lane() < HEAD_TILES) {
      const int tile = head * QKV_TILES + GROUP * HEAD_TILES + c.lane(), dim = c.lane() * 8;
      const uint8_t* from = qkv + (static_cast<size_t>(tile) * ROWS + other) * 16;
      *reinterpret_cast<uint4*>(keys + kv::key_at(token, dim)) = ptx::load_shared_data(from);
      const uint4 word = ptx::load_shared_data(from + HEAD_TILES * ROWS * 16);
      const uint32_t words[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        values[kv::value_at(token, dim + 2 * j)] = static_cast<uint16_t>(words[j]);
        values[kv::value_at(token, dim + 2 * j + 1)] = static_cast<uint16_t>(words[j] >> 16);
      }
    }
  }
  ptx::shared_before_bulk();  // the slots' next pages come by bulk copy
  __syncwarp();
}

// Half a block: scores, then values. `ring` is at the block's K page.
__device__ __forceinline__ void attend_half(Consumer& c, Attention& a, RingPlace ring, int row, int head, int block,
                                            int half, int window) {
  put_new_tokens(c, ring, row, head, block, half);
  wait_for_page(c, ring);
  const uint8_t* keys = c.s.ring[ring.slot];
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

  wait_for_page(c, ring);
  const uint8_t* values = c.s.ring[ring.slot];
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

// Put the four warps of a group together, (0 + 1) + (2 + 3), and send the record. For all warps of the group; which of
// them does the last sum takes turns, and the others go on.
__device__ __forceinline__ void send_partials(Consumer& c, const isa::Descriptor& task, Attention& a, int row, int head,
                                              int chunk, uint32_t sequence, bool last, int group, int part) {
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
#pragma unroll
  for (int t = 0; t < Attention::DIM_TILES; t++) a.output[t][0] *= scale, a.output[t][1] *= scale;

  const int distance = part ^ turn;  // from the warp whose turn it is
  float* record = reinterpret_cast<float*>(c.s.record + (sequence % RECORDS) * PARTIAL_BYTES);
  float* second = &c.s.sums[0][0][0][0] + group * GROUP * HEAD_DIM;
  static_assert(2 * GROUP * HEAD_DIM * sizeof(float) <= sizeof(c.s.sums), "no room to add up attention's outputs");
  const bool used = query < GROUP;
  if (distance <= 1) {
    claim_message(c.s, sequence);
    if (sequence >= RECORDS) wait_sent(c.s, sequence - RECORDS);
  }
  // First each warp takes the outputs of its neighbour, then the first those of the third. On the way a lane's outputs
  // lie in its own order, without bank conflicts: the second warp's where the record will be, all others' elsewhere.
#pragma unroll 1
  for (int step = 1; step <= 2; step *= 2) {
    const int barrier = (step == 1 ? SECOND_GROUP : THIRD_GROUP) + group, threads = step == 1 ? isa::GROUP_THREADS : 2 * isa::WARP;
    float2* staged = reinterpret_cast<float2*>((distance | step) == 1 ? record : second) + c.lane();
    if (distance & step) {
#pragma unroll
      for (int t = 0; t < Attention::DIM_TILES; t++)
        if (used) staged[t * GROUP * 4] = make_float2(a.output[t][0], a.output[t][1]);
      return ptx::meet_no_wait(barrier, threads);
    }
    ptx::meet(barrier, threads);
#pragma unroll
    for (int t = 0; t < Attention::DIM_TILES; t++)
      if (used) a.output[t][0] += staged[t * GROUP * 4].x, a.output[t][1] += staged[t * GROUP * 4].y;
  }
  __syncwarp();  // all have read what lies where the record goes
  if (used) {
#pragma unroll
    for (int t = 0; t < Attention::DIM_TILES; t++)
      *reinterpret_cast<float2*>(record + query * HEAD_DIM + t * 8 + quarter * 2) = make_float2(a.output[t][0], a.output[t][1]);
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
  const Runs runs(table, task.share, c.lane());
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
