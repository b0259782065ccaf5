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

// The page of K (part 0) or V (part 1) of a block.
__device__ __forceinline__ uint8_t* page(const Params& p, int layer, int block, int head, int part) {
  const size_t index = (static_cast<size_t>(block) * sizes::KV_HEADS + head) * 2 + part;
  return reinterpret_cast<uint8_t*>(__ldg(reinterpret_cast<const unsigned long long*>(p.kv_pages) + layer)) +
         index * PAGE_BYTES;
}

}  // namespace kv
