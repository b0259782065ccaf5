// How attention is divided among SMs: headrace/step/division.py says why; these are the same integer rules.
#pragma once

#include "state.h"

struct Chunks {
  int first, last, size, count;
};

__device__ __forceinline__ Chunks chunks_of(int position, int window) {
  const int low = window && position >= window ? position - window + 1 : 0;
  const int first = low / isa::BLOCK_TOKENS, last = position / isa::BLOCK_TOKENS, visible = last - first + 1;
  const int least = (visible + isa::MAX_CHUNKS - 1) / isa::MAX_CHUNKS;
  const int size = least > isa::CHUNK_BLOCKS ? least : isa::CHUNK_BLOCKS;
  return {first, last, size, (visible + size - 1) / size};
}

// Where a share of `total` items begins. No product here comes near 2^32: 16 rows of 2^20 tokens make 2^21 items.
__device__ __forceinline__ int share_begin(int total, int share, int shares) {
  return static_cast<int>(static_cast<uint32_t>(total) * static_cast<uint32_t>(share) / static_cast<uint32_t>(shares));
}

// Call `visit(row, head, chunks, low, high)` for every run of chunks [low, high) that belongs to a share, in order.
template <typename Visit>
__device__ __forceinline__ void each_run(const RowState& rows, int window, int share, int shares, Visit visit) {
  int total = 0;
#pragma unroll 1
  for (int row = 0; row < ROWS; row++) {
    if (!rows.active[row]) continue;
    const Chunks chunks = chunks_of(rows.position[row], window);
    total += sizes::KV_HEADS * chunks.count * chunks.size;
  }
  const int start = share_begin(total, share, shares);
  const int stop = share_begin(total, share + 1, shares);
  int begin = 0;
#pragma unroll 1
  for (int row = 0; row < ROWS; row++) {
    if (!rows.active[row]) continue;
    const Chunks chunks = chunks_of(rows.position[row], window);
#pragma unroll 1
    for (int head = 0; head < sizes::KV_HEADS; head++) {
      const int low = start > begin ? (start - begin + chunks.size - 1) / chunks.size : 0;
      const int end = stop > begin ? (stop - begin + chunks.size - 1) / chunks.size : 0;
      const int high = end < chunks.count ? end : chunks.count;
      if (low < high) visit(row, head, chunks, low, high);
      begin += chunks.count * chunks.size;
    }
  }
}
