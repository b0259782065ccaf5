// ATTENTION: softmax partials over chunks of the past, one item (row, KV head, chunk) for each group of four warps.
//
// A round takes a block. First each warp has a quarter of it, 16 tokens, and finds their scores; the warps agree on the
// largest, so that the weights exp(score - largest) of all 64 tokens are on one scale, and show each other the weights.
// Then each warp has a quarter of the dimensions and multiplies all weights with its part of the values: nothing is
// left to be added up between warps. Scores need no exchange between lanes to become weights of the values: pages lie
// so that the columns of a score tile that a lane gets are those that it needs (headrace/model/kv.py).
#pragma once

#include "gemm.h"
#include "items.h"
#include "kv.h"

struct Attention {
  static constexpr int K_BLOCKS = HEAD_DIM / 32, DIM_TILES = HEAD_DIM / 8, OWN_TILES = DIM_TILES / 4;
  uint4 query[K_BLOCKS];          // as split_product takes them
  float output[OWN_TILES][2][4];  // of the warp's dimensions
  float maximum, total;           // of row g, alike in all warps
};

// A lane's 16 bytes of a row, eight columns x, y, z, w, as the tensor core's wide operand: arranged, it takes x, y for row g
// and z, w for row g + 8. So with X, Y the product is right in its upper half, and with Z, W in its lower half, and no register
// has to be moved; the other halves are thrown away.
__device__ __forceinline__ void split_product(float (&sums)[2][4], const uint4& rows, const uint4& other) {
  ptx::multiply_add(sums[0], rows, other.x, other.y);
  ptx::multiply_add(sums[1], rows, other.z, other.w);
}

// The group that is at an item, and this warp's place in it: quarter `part` of a block's tokens, and of the dimensions.
struct GroupPlace {
  int group, part;

  // Which half of the block its tokens are in, and whether of each eight tokens there, which one lane has, they are the first
  // four or the last.
  __device__ __forceinline__ int half() const { return part >> 1; }
  __device__ __forceinline__ int four() const { return part & 1; }
};
constexpr int FOUR = 4;  // tokens of a lane

__device__ __forceinline__ void meet_group(const GroupPlace& place) { ptx::meet(FIRST_GROUP + place.group, isa::GROUP_THREADS); }

__device__ __forceinline__ void wait_for_page(Consumer& c, const RingPlace& ring) {
  wait_barrier(c.s, &c.s.page_full[ring.slot], ring.parity(), Waited::PAGE_LANDED, ring.slot);
}

// Tokens that this step writes are stale in the pages, which were fetched before: take them from QKV. A warp does its
// own tokens, so nobody else is disturbed. `ring` is at the block's K page.
__device__ __forceinline__ void put_new_tokens(Consumer& c, RingPlace ring, int row, int head, int block, const GroupPlace& place) {
  const RowState& rows = c.s.rows;
  const int begin = block * isa::BLOCK_TOKENS + place.half() * 32;
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
    if (token / FOUR % 2 != place.four()) continue;
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

// The lane's tokens: bits of pairs, for values, where they may be seen.
struct Seen {
  uint32_t pair[FOUR / 2];

  // `first` is the first of them.
  __device__ __forceinline__ Seen(int first, int position, int window) {
#pragma unroll
    for (int j = 0; j < FOUR / 2; j++) {
      pair[j] = 0;
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int token = first + 2 * j + e;
        pair[j] |= token <= position && (window == 0 || token > position - window) ? 0xffffu << (16 * e) : 0u;
      }
    }
  }
};

// Where the lanes' tokens are not all seen: no score of a token that is not, and no value either, for it may be
// anything, and 0 times infinity is not 0. `ring` is at the block's V page.
__device__ __forceinline__ void hide(Consumer& c, const RingPlace& ring, const GroupPlace& place, const Seen& seen, float (&score)[FOUR]) {
#pragma unroll
  for (int n = 0; n < FOUR; n++)
    if (!(seen.pair[n / 2] >> (n & 1) * 16 & 1)) score[n] = -ptx::infinity();
  wait_for_page(c, ring);
  // The other half of the 16 bytes is another warp's.
  uint2* values = reinterpret_cast<uint2*>(c.s.ring[ring.slot]) + (place.half() * 32 + c.lane()) * 2 + place.four();
#pragma unroll 1
  for (int t = 0; t < Attention::DIM_TILES; t++) {
    uint2& words = values[t * 128];
    words = make_uint2(words.x & seen.pair[0], words.y & seen.pair[1]);
  }
  ptx::shared_before_bulk();  // the slot's next page comes by bulk copy
}

// Scaled scores of the warp's tokens, whose K page `ring` is at: of row g, the lane's.
__device__ __forceinline__ void find_scores(Consumer& c, const Attention& a, const RingPlace& ring, const GroupPlace& place,
                                            float (&score)[FOUR]) {
  constexpr int TILES = 2;  // of eight tokens
  wait_for_page(c, ring);
  const uint4* keys = reinterpret_cast<const uint4*>(c.s.ring[ring.slot]) + place.part * (TILES * Attention::K_BLOCKS * 32) + c.lane();
  float sums[TILES][2][4];
#pragma unroll
  for (int n = 0; n < TILES * 8; n++) (&sums[0][0][0])[n] = 0;
  // Four sums side by side, and the next keys under way, so that few products wait for the one before.
  uint4 b[2][TILES];
#pragma unroll
  for (int j = 0; j < TILES; j++) b[0][j] = keys[j * Attention::K_BLOCKS * 32];
#pragma unroll
  for (int k = 0; k < Attention::K_BLOCKS; k++) {
    const auto& now = b[k & 1];
    if (k + 1 < Attention::K_BLOCKS)
#pragma unroll
      for (int j = 0; j < TILES; j++) b[(k + 1) & 1][j] = keys[(j * Attention::K_BLOCKS + k + 1) * 32];
#pragma unroll
    for (int j = 0; j < TILES; j++) split_product(sums[j], a.query[k], now[j]);
  }
  release_page(c.s, c.lane(), ring.slot, 4);
  const float scale = rsqrtf(static_cast<float>(HEAD_DIM));
#pragma unroll
  for (int n = 0; n < FOUR; n++) score[n] = (sums[n / 2][0][n % 2] + sums[n / 2][1][2 + n % 2]) * scale;
}

// Of the lanes that have the same row.
__device__ __forceinline__ float sum_of_row(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}
__device__ __forceinline__ float largest_of_row(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

// Turn scores into weights for the whole group to see, with the row's largest score so far and its sum. For all warps of
// the group; gives by how much what came before shrinks.
__device__ __forceinline__ float weigh(Consumer& c, Attention& a, const GroupPlace& place, const float (&score)[FOUR]) {
  const int query = c.lane() >> 2, quarter = c.lane() & 3;
  float(&maxima)[8][4] = c.s.attention_max[place.group];
  float(&sums)[8][4] = c.s.attention_sum[place.group];
  const float largest = largest_of_row(fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3])));
  if (quarter == 0) maxima[query][place.part] = largest;
  meet_group(place);
  const float4 four = *reinterpret_cast<const float4*>(maxima[query]);
  const float grown = fmaxf(a.maximum, fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w)));
  const float base = grown == -ptx::infinity() ? 0.0f : grown;  // nothing seen yet: all weights are 0
  const float shrink = ptx::exp(a.maximum, base);
  a.maximum = grown;
  float weight[FOUR];
#pragma unroll
  for (int n = 0; n < FOUR; n++) weight[n] = ptx::exp(score[n], base);
  // Of the four words of eight tokens, as `arranged` has them.
  uint32_t* words = reinterpret_cast<uint32_t*>(&c.s.attention_weights[place.group][place.half()][c.lane()]);
  words[place.four()] = ptx::pack(weight[0], weight[1]);
  words[place.four() + 2] = ptx::pack(weight[2], weight[3]);
  const float sum = sum_of_row((weight[0] + weight[1]) + (weight[2] + weight[3]));
  if (quarter == 0) sums[query][place.part] = sum;
  meet_group(place);
  const float4 all = *reinterpret_cast<const float4*>(sums[query]);
  a.total = a.total * shrink + ((all.x + all.y) + (all.z + all.w));
  return shrink;
}

// Add this warp's dimensions of the values of a block, whose V page `ring` is at.
__device__ __forceinline__ void add_values(Consumer& c, Attention& a, const GroupPlace& place, const RingPlace& ring) {
  wait_for_page(c, ring);
  const uint4* values = reinterpret_cast<const uint4*>(c.s.ring[ring.slot]) + place.part * (Attention::OWN_TILES * 64) + c.lane();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint4 w = c.s.attention_weights[place.group][half][c.lane()];
    uint4 v[Attention::OWN_TILES];
#pragma unroll
    for (int t = 0; t < Attention::OWN_TILES; t++) v[t] = values[t * 64 + half * 32];
#pragma unroll
    for (int t = 0; t < Attention::OWN_TILES; t++) split_product(a.output[t], w, v[t]);
  }
  release_page(c.s, c.lane(), ring.slot, 4);
}

// A block of a row, whose pages begin at `ring`.
__device__ __forceinline__ void attend(Consumer& c, Attention& a, const GroupPlace& place, RingPlace ring, int row, int head,
                                       int block, int window) {
  float score[FOUR];
  put_new_tokens(c, ring, row, head, block, place);
  find_scores(c, a, ring, place, score);
  ring.advance(1);
  const int begin = block * isa::BLOCK_TOKENS + place.half() * 32, position = c.s.rows.position[row];
  if (begin + 31 > position || (window && begin <= position - window))
    hide(c, ring, place, Seen(begin + (c.lane() & 3) * 8 + place.four() * FOUR, position, window), score);
  const float shrink = weigh(c, a, place, score);
#pragma unroll
  for (int n = 0; n < Attention::OWN_TILES * 2; n++) a.output[n / 2][0][n % 2] *= shrink, a.output[n / 2][1][2 + n % 2] *= shrink;
  add_values(c, a, place, ring);
}

// An item's record, straight to where the helpers of all SMs read it.
__device__ __forceinline__ void store_partials(const Consumer& c, const isa::Descriptor& task, const Attention& a,
                                               const GroupPlace& place, int row, int head, int chunk) {
  const int query = c.lane() >> 2, quarter = c.lane() & 3;
  const size_t index = (static_cast<size_t>(row) * sizes::KV_HEADS + head) * isa::MAX_CHUNKS + chunk;
  float* record = reinterpret_cast<float*>(buffer_at(c.p, task.output) + index * PARTIAL_BYTES);
  if (query >= GROUP) return;
#pragma unroll
  for (int t = 0; t < Attention::OWN_TILES; t++)
    *reinterpret_cast<float2*>(record + query * HEAD_DIM + (place.part * Attention::OWN_TILES + t) * 8 + quarter * 2) =
        make_float2(a.output[t][0][0] + a.output[t][1][2], a.output[t][0][1] + a.output[t][1][3]);
  if (place.part == 0 && quarter == 0) {
    record[GROUP * HEAD_DIM + query] = a.maximum;
    record[GROUP * (HEAD_DIM + 1) + query] = a.total;
  }
}

// A row's queries of a KV head, as the wide operand: eight of its sixteen rows.
__device__ __forceinline__ void load_queries(Consumer& c, const isa::Descriptor& task, Attention& a, int row, int head) {
  const int query = c.lane() >> 2;
  const uint8_t* qkv = buffer_at(c.p, task.input);
#pragma unroll
  for (int k = 0; k < Attention::K_BLOCKS; k++) {
    const int tile = head * QKV_TILES + query * HEAD_TILES + 4 * k + (c.lane() & 3);
    const uint4 columns = query < GROUP ? ptx::load_shared_data(qkv + (static_cast<size_t>(tile) * ROWS + row) * 16)
                                        : make_uint4(0, 0, 0, 0);
    a.query[k] = arranged(columns);
  }
}

// An item's chunk: `blocks` blocks from `first` on, whose pages are the ring's next.
__device__ __forceinline__ void attend_chunk(Consumer& c, const isa::Descriptor& task, Attention& a, const GroupPlace& place, int row,
                                             int head, int first, int blocks, int skipped) {
  a.maximum = -ptx::infinity();
  a.total = 0;
#pragma unroll
  for (int n = 0; n < Attention::OWN_TILES * 8; n++) (&a.output[0][0][0])[n] = 0;
  RingPlace ring = c.ring;
  let_copier_come(c.s, ring, skipped);
#pragma unroll 1
  for (int block = 0; block < blocks; block++, ring.advance(2)) attend(c, a, place, ring, row, head, first + block, task.window);
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
  const GroupPlace place{c.warp() >> 2, c.warp() & 3};
  int item = 0, most = 0;  // the most blocks of an item before
  runs.each([&](int row, int head, int low, int high) {
    const RowChunks& chunks = table.rows[row];
    Attention a;
    load_queries(c, task, a, row, head);
#pragma unroll 1
    for (int chunk = low; chunk < high; chunk++, item++) {
      const int begin = chunks.first + chunk * chunks.size, blocks = min(chunks.last + 1 - begin, chunks.size);
      if ((item & 1) == place.group) {
        attend_chunk(c, task, a, place, row, head, begin, blocks, 2 * most);
        store_partials(c, task, a, place, row, head, chunk);
      }
      c.ring.advance(2 * blocks);
      most = max(most, blocks);
    }
  });
  // Thread 0 signals for all, when all have stored; the publisher's release is behind that. The other warps go on.
  if (items && c.warp())
    ptx::meet_no_wait(STORED, CONSUMERS);
  else if (items)
    ptx::meet(STORED, CONSUMERS);
  signal_only(c, task);
}
