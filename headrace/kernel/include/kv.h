// Where a token's key and value lie in their pages (headrace/model/kv.py), in elements.
#pragma once

#include "state.h"

namespace kv {

constexpr int PAGE_BYTES = isa::BLOCK_TOKENS * HEAD_DIM * 2;

__device__ __forceinline__ int key_at(int token, int dim) {
  const int within = token % 32, c = within / 8, j = within / 2 % 4, e = within % 2;
  return ((token / 32 * 4 + j) * (HEAD_DIM / 32) + dim / 32) * 256 + (2 * c + e) * 32 + dim % 32;
}

__device__ __forceinline__ int value_at(int token, int dim) {
  return (dim / 8 * 2 + token / 32) * 256 + dim % 8 * 32 + token % 32;
}

__device__ __forceinline__ int block_of(const Params& p, int row, int window, int index) {
  return __ldg(p.tables + (row * 2 + (window ? 1 : 0)) * static_cast<size_t>(p.table_blocks) + index);
}

// The number of the page of K (part 0) or V (part 1) of a block among those of its layer.
__device__ __forceinline__ int page_of(int block, int head, int part) { return (block * sizes::KV_HEADS + head) * 2 + part; }

__device__ __forceinline__ uint8_t* page(const Shared& s, int layer, int number) {
  return reinterpret_cast<uint8_t*>(s.kv_pages[layer]) + static_cast<size_t>(number) * PAGE_BYTES;
}

}  // namespace kv
