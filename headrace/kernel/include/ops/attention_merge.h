// ATTENTION_MERGE: the partial results of a row's chunks become its attention output.
//
// The merger's warp does it, while the consumers are at the experts: nothing here is on their way. It takes four tiles
// of a row at once: eight lanes have four elements each, and four such groups of lanes, the shares, take the row's chunks
// in turn. A share adds its chunks in order; then (0 + 1) + (2 + 3). So a row's sum depends on its chunks alone.
#pragma once

#include "items.h"
#include "wait.h"

// Sums that are scaled by exp(-maximum).
struct Merged {
  float maximum, total;
  float4 output;
};

// Both put on the larger of their maxima.
__device__ __forceinline__ Merged joined(const Merged& a, const Merged& b) {
  const float maximum = fmaxf(a.maximum, b.maximum);
  const float base = maximum == -ptx::infinity() ? 0.0f : maximum;
  const float x = expf(a.maximum - base), y = expf(b.maximum - base);
  return {maximum, a.total * x + b.total * y,
          make_float4(a.output.x * x + b.output.x * y, a.output.y * x + b.output.y * y, a.output.z * x + b.output.z * y,
                      a.output.w * x + b.output.w * y)};
}

// A share's chunks. `record` is the first one's of a row and KV head, `member` the query head among those of the KV head.
__device__ __forceinline__ Merged merged_share(const float* record, int member, int dim, int chunks) {
  constexpr int NEXT = 4 * sizes::PARTIAL_FLOATS;  // of this share
  Merged merged{-ptx::infinity(), 0, make_float4(0, 0, 0, 0)};
#pragma unroll 1
  for (; chunks > 0; chunks -= 8, record += 2 * NEXT) {
    Merged part[2];  // side by side, so that their loads overlap
#pragma unroll
    for (int n = 0; n < 2; n++) {
      part[n] = {-ptx::infinity(), 0, make_float4(0, 0, 0, 0)};
      if (chunks <= 4 * n) continue;
      const uint4 words = ptx::load_shared_data(record + n * NEXT + member * HEAD_DIM + dim);
      part[n] = {ptx::load_shared_float(record + n * NEXT + GROUP * HEAD_DIM + member),
                 ptx::load_shared_float(record + n * NEXT + GROUP * (HEAD_DIM + 1) + member),
                 make_float4(__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z), __uint_as_float(words.w))};
    }
#pragma unroll
    for (int n = 0; n < 2; n++) merged = joined(merged, part[n]);
  }
  return merged;
}

__device__ __forceinline__ Merged from_lane(const Merged& a, int distance) {
  return {__shfl_xor_sync(~0u, a.maximum, distance), __shfl_xor_sync(~0u, a.total, distance),
          make_float4(__shfl_xor_sync(~0u, a.output.x, distance), __shfl_xor_sync(~0u, a.output.y, distance),
                      __shfl_xor_sync(~0u, a.output.z, distance), __shfl_xor_sync(~0u, a.output.w, distance))};
}

// Tiles [first, first + count) of a row, into Shared::merged.
__device__ __forceinline__ void merge_row(Shared& s, const Params& p, int row, int chunks, int first, int count, int lane) {
  const int index = min((lane & 7) / 2, count - 1), tile = first + index, half = lane & 1, share = lane >> 3;
  const int head = tile / HEAD_TILES, dim = tile % HEAD_TILES * 8 + half * 4;
  uint32_t record = ((row * sizes::KV_HEADS + head / GROUP) * isa::MAX_CHUNKS + share) * PARTIAL_BYTES;
  ptx::forget(record);  // or the address is kept all the time, and registers are few
  const uint8_t* partials = buffer_at(p, static_cast<int32_t>(isa::Buffer::PARTIALS));
  Merged merged = merged_share(reinterpret_cast<const float*>(partials + record), head % GROUP, dim, chunks - share);
  // All lanes join in the same order: the lower share first.
#pragma unroll
  for (int distance = 8; distance <= 16; distance *= 2) {
    const Merged other = from_lane(merged, distance);
    merged = lane & distance ? joined(other, merged) : joined(merged, other);
  }
  if (share || (lane & 7) / 2 >= count) return;
  const float scale = 1.0f / merged.total;
  reinterpret_cast<uint2*>(s.merged[index] + row * 16)[half] =
      make_uint2(ptx::pack(merged.output.x * scale, merged.output.y * scale), ptx::pack(merged.output.z * scale, merged.output.w * scale));
}

__device__ __forceinline__ void attention_merge(Shared& s, const Params& p, const int32_t* words, int lane) {
  auto word = [&](isa::Field field) { return __ldg(words + static_cast<int>(field)); };
  const int first_tile = word(isa::Field::FIRST_TILE), tiles = word(isa::Field::TILE_COUNT);
  const ChunkTable& table = table_for(s, word(isa::Field::WINDOW));
#pragma unroll 1
  for (int done = 0; done < tiles; done += MERGED_TILES) {
    const int count = min(MERGED_TILES, tiles - done);
#pragma unroll 1
    for (int row = 0; row < ROWS; row++) {
      const int chunks = table.rows[row].count;
      if (chunks)
        merge_row(s, p, row, chunks, first_tile + done, count, lane);
      else if (lane < count)
        reinterpret_cast<uint4*>(s.merged[lane])[row] = make_uint4(0, 0, 0, 0);
    }
    ptx::shared_before_bulk();
    __syncwarp();
    if (lane == 0) {
      uint8_t* to = buffer_at(p, static_cast<int32_t>(isa::Buffer::ATTENTION_OUT));
      ptx::bulk_store(to + static_cast<size_t>(first_tile + done) * ROWS * 16, ptx::shared_address(s.merged), count * ROWS * 16);
      ptx::bulk_stores_done();
    }
    __syncwarp();
  }
  if (lane) return;
  uint32_t* counter = counter_at(p, word(isa::Field::SIGNAL_COUNTER));
  const uint32_t amount = word(isa::Field::SIGNAL_AMOUNT);
  ptx::global_before_bulk();
  ptx::add_release(counter, amount);
}

// The merger's whole life; one warp.
__device__ __forceinline__ void merge(Shared& s, const Params& p) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  each_beside(s, p, Agent::MERGER, isa::Opcode::ATTENTION_MERGE, isa::Field::WAIT_COUNTER, lane,
              [&](const int32_t* words) { attention_merge(s, p, words, lane); });
}
