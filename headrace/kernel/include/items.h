// How attention is divided among SMs: headrace/step/division.py says why; these are the same integer rules.
#pragma once

#include "state.h"

__device__ __forceinline__ int divided_up(int number, int by) {
  return static_cast<int>((static_cast<uint32_t>(number) + by - 1) / static_cast<uint32_t>(by));
}

__device__ __forceinline__ RowChunks chunks_of(int position, int window) {
  const int low = window && position >= window ? position - window + 1 : 0;
  const int first = low / isa::BLOCK_TOKENS, last = position / isa::BLOCK_TOKENS, visible = last - first + 1;
  const int least = divided_up(visible, isa::MAX_CHUNKS);
  const int size = least > isa::CHUNK_BLOCKS ? least : isa::CHUNK_BLOCKS;
  return {first, last, size, divided_up(visible, size), 0};
}

// Cut every row's attention for a step; one warp.
__device__ __forceinline__ void cut_rows(Shared& s, int lane) {
  const int row = lane % 16, kind = lane / 16;
  RowChunks chunks{};
  if (row < ROWS && s.rows.active[row]) chunks = chunks_of(s.rows.position[row], kind ? variant::WINDOW : 0);
  const int length = sizes::KV_HEADS * chunks.count * chunks.size;
  int end = length;
#pragma unroll
  for (int step = 1; step < 16; step *= 2) {
    const int before = __shfl_up_sync(~0u, end, step, 16);
    if (row >= step) end += before;
  }
  chunks.begin = end - length;
  if (row < ROWS) s.chunks[kind].rows[row] = chunks;
  if (row == 15) s.chunks[kind].total = end;
}
static_assert(isa::MAX_ROWS == 16 && ROWS <= 16);

__device__ __forceinline__ const ChunkTable& table_for(const Shared& s, int window) { return s.chunks[window ? 1 : 0]; }

// Where a share of `total` items begins. No product here comes near 2^32: 16 rows of 2^20 tokens make 2^21 items.
// Every SM has one share (headrace/kernel/variant.py sees to it).
__device__ __forceinline__ int share_begin(int total, int share) {
  return static_cast<int>(static_cast<uint32_t>(total) * static_cast<uint32_t>(share) / sizes::SMS);
}

// The runs of chunks [low, high) of row and KV head n, n + 32, ... that belong to a share, as lane n finds them.
struct Runs {
  static constexpr int PAIRS = ROWS * sizes::KV_HEADS, ROUNDS = (PAIRS + isa::WARP - 1) / isa::WARP;
  int32_t low[ROUNDS], high[ROUNDS];
  static_assert(ROUNDS <= 4, "registers are short: headrace/kernel/variant.py");

  // For all lanes of a warp, as all that follows.
  __device__ __forceinline__ Runs(const ChunkTable& table, int share, int lane) {
    const int start = share_begin(table.total, share), stop = share_begin(table.total, share + 1);
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
      const int pair = round * isa::WARP + lane;
      low[round] = high[round] = 0;
      if (pair >= PAIRS) continue;
      const RowChunks& chunks = table.rows[pair / sizes::KV_HEADS];
      if (chunks.count == 0) continue;
      const int begin = chunks.begin + pair % sizes::KV_HEADS * chunks.count * chunks.size;
      low[round] = start > begin ? divided_up(start - begin, chunks.size) : 0;
      high[round] = min(chunks.count, stop > begin ? divided_up(stop - begin, chunks.size) : 0);
      high[round] = max(high[round], low[round]);
    }
  }

  // How many chunks there are.
  __device__ __forceinline__ int items() const {
    int own = 0;
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) own += high[round] - low[round];
    return __reduce_add_sync(~0u, own);
  }

  // Bit h: KV head h is among them.
  __device__ __forceinline__ uint32_t heads(int lane) const {
    uint32_t own = 0;
#pragma unroll
    for (int round = 0; round < ROUNDS; round++)
      if (low[round] < high[round]) own |= 1u << (round * isa::WARP + lane) % sizes::KV_HEADS;
    return __reduce_or_sync(~0u, own);
  }

  // Without an index that the assembler does not know: it would take local memory.
  static __device__ __forceinline__ int of_round(const int32_t (&values)[ROUNDS], int round) {
    int value = values[ROUNDS - 1];
#pragma unroll
    for (int n = ROUNDS - 2; n >= 0; n--) value = round == n ? values[n] : value;
    return value;
  }

  // Call `visit(row, head, low, high)` for every run, in order.
  template <typename Visit>
  __device__ __forceinline__ void each(Visit visit) const {
    // Not unrolled: what `visit` does must be there but once.
#pragma unroll 1
    for (int round = 0; round < ROUNDS; round++) {
      const int own_low = of_round(low, round), own_high = of_round(high, round);
      uint32_t lanes = __ballot_sync(~0u, own_low < own_high);
#pragma unroll 1
      while (lanes) {
        const int lane = __ffs(lanes) - 1, pair = round * isa::WARP + lane;
        lanes &= lanes - 1;
        visit(pair / sizes::KV_HEADS, pair % sizes::KV_HEADS, __shfl_sync(~0u, own_low, lane), __shfl_sync(~0u, own_high, lane));
      }
    }
  }
};
