// ATTENTION: softmax partials over chunks of the past, one item (row, KV head, chunk) for each group of four warps.
//
// A warp takes half a page, 32 tokens: of blocks 0, 2, 4 .. of the chunk or of blocks 1, 3, 5 .., the lower or the
// upper half. It keeps a maximum, a sum and outputs of its own; the four are put together at the end of the item, in
// the order of the warps. Scores need no exchange between lanes to become weights of the values: pages lie so that
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
  wait_barrier(c.s, c.p, &c.s.page_full[ring.slot], ring.parity, c.site(), Waited::PAGE_LANDED, ring.slot);
  uint8_t* keys = c.s.ring[ring.slot];
  put_new_tokens(c, keys, 0, row, head, block, half);
  float score[4][4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
#pragma unroll
    for (int n = 0; n < 4; n++) score[j][n] = 0;
#pragma unroll
    for (int k = 0; k < Attention::K_BLOCKS; k++) {
      const uint4 b = reinterpret_cast<const uint4*>(keys)[((half * 4 + j) * Attention::K_BLOCKS + k) * 32 + c.lane()];
      ptx::multiply_add(score[j], a.query[k].x, 0, a.query[k].y, 0, b.x, b.y);
      ptx::multiply_add(score[j], a.query[k].z, 0, a.query[k].w, 0, b.z, b.w);
    }
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

  wait_barrier(c.s, c.p, &c.s.page_full[ring.slot], ring.parity, c.site(), Waited::PAGE_LANDED, ring.slot);
  uint8_t* values = c.s.ring[ring.slot];
  put_new_tokens(c, values, 1, row, head, block, half);
#pragma unroll
  for (int t = 0; t < Attention::DIM_TILES; t++) {
    // What is masked may be anything, and 0 times infinity is not 0.
    const uint4 b = reinterpret_cast<const uint4*>(values)[(t * 2 + half) * 32 + c.lane()];
    a.output[t][0] *= shrink;
    a.output[t][1] *= shrink;
    ptx::multiply_add(a.output[t], weights[0], 0, weights[1], 0, b.x & seen[0], b.y & seen[1]);
    ptx::multiply_add(a.output[t], weights[2], 0, weights[3], 0, b.z & seen[2], b.w & seen[3]);
  }
  release_page(c.s, c.lane(), ring.slot, 2);
}

// Put the four warps of a group together and send the record. For all warps of the group.
__device__ __forceinline__ void send_partials(Consumer& c, const isa::Descriptor& task, const Attention& a, int row,
                                              int head, int chunk, uint32_t sequence, bool last, int group, int part) {
  const int query = c.lane() >> 2, quarter = c.lane() & 3;
  float sum = a.sum;
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (quarter == 0) {
    c.s.attention_max[group][part][query] = a.maximum;
    c.s.attention_sum[group][part][query] = sum;
  }
  claim_message(c.s, c.p, sequence, c.site());
  if (sequence >= RECORDS) wait_sent(c.s, c.p, sequence - RECORDS, c.site());
  ptx::meet(FIRST_GROUP + group, isa::GROUP_THREADS);
  float maximum = -ptx::infinity(), total = 0;
#pragma unroll
  for (int w = 0; w < 4; w++) maximum = fmaxf(maximum, c.s.attention_max[group][w][query]);
#pragma unroll
  for (int w = 0; w < 4; w++) total += c.s.attention_sum[group][w][query] * expf(c.s.attention_max[group][w][query] - maximum);
  const float scale = expf(a.maximum - maximum);
  float* record = reinterpret_cast<float*>(c.s.record + (sequence % RECORDS) * PARTIAL_BYTES);
#pragma unroll 1
  for (int w = 0; w < 4; w++) {
    if (w == part && query < GROUP) {
#pragma unroll
      for (int t = 0; t < Attention::DIM_TILES; t++) {
        float2& held = *reinterpret_cast<float2*>(record + query * HEAD_DIM + t * 8 + quarter * 2);
        const float2 before = w ? held : make_float2(0, 0);
        held = make_float2(before.x + a.output[t][0] * scale, before.y + a.output[t][1] * scale);
      }
    }
    if (w < 3) ptx::meet(FIRST_GROUP + group, isa::GROUP_THREADS);
  }
  if (part != 3) return;
  if (quarter == 0 && query < GROUP) {
    record[GROUP * HEAD_DIM + query] = maximum;
    record[GROUP * (HEAD_DIM + 1) + query] = total;
  }
  ptx::shared_before_bulk();
  __syncwarp();
  if (c.lane()) return;
  const size_t index = (static_cast<size_t>(row) * sizes::KV_HEADS + head) * isa::MAX_CHUNKS + chunk;
  submit_message(c.s, c.p, sequence, buffer_at(c.p, task.output) + index * PARTIAL_BYTES, record, PARTIAL_BYTES,
                 last ? task.signal_counter : 0, task.signal_amount);
}

__device__ __forceinline__ void attention(Consumer& c, const isa::Descriptor& task) {
  int items = 0;
  uint32_t heads = 0;
  each_run(c.s.rows, task.window, task.share, task.shares, [&](int, int head, const Chunks&, int low, int high) {
    items += high - low;
    heads |= 1u << head;
  });
  const bool going = begin_after(c, [&] {
    for (int head = 0; head < sizes::KV_HEADS; head++)
      if (heads >> head & 1) wait_for(c, task.wait_counter + head, task.wait_arrivals);
  });
  if (!going) return;
  if (items == 0) return signal_only(c, task);
  const int group = c.warp() >> 2, part = c.warp() & 3, half = part & 1;
  int item = 0;
  each_run(c.s.rows, task.window, task.share, task.shares, [&](int row, int head, const Chunks& chunks, int low, int high) {
    for (int chunk = low; chunk < high; chunk++, item++) {
      const int begin = chunks.first + chunk * chunks.size;
      const int left = chunks.last + 1 - begin, blocks = left < chunks.size ? left : chunks.size;
      // Records alternate with the parity of messages, so groups do, too.
      if (((c.sequence + item) & 1) == group) {
        Attention a;
        a.maximum = -ptx::infinity();
        a.sum = 0;
#pragma unroll
        for (int t = 0; t < Attention::DIM_TILES; t++)
#pragma unroll
          for (int n = 0; n < 4; n++) a.output[t][n] = 0;
        const int query = c.lane() >> 2;
        const uint8_t* qkv = buffer_at(c.p, task.input);
#pragma unroll
        for (int k = 0; k < Attention::K_BLOCKS; k++) {
          const int tile = head * QKV_TILES + query * HEAD_TILES + 4 * k + (c.lane() & 3);
          a.query[k] = query < GROUP ? ptx::load_shared_data(qkv + (static_cast<size_t>(tile) * ROWS + row) * 16)
                                     : make_uint4(0, 0, 0, 0);
        }
        RingPlace ring = c.ring;
        ring.advance(2 * (part >> 1));
#pragma unroll 1
        for (int block = part >> 1; block < blocks; block += 2) {
          attend_half(c, a, ring, row, head, begin + block, half, task.window);
          ring.advance(4);
        }
        send_partials(c, task, a, row, head, chunk, c.sequence + item, item == items - 1, group, part);
      }
      c.ring.advance(2 * blocks);
    }
  });
  c.sequence += items;
}
