// Activations of so many columns that no warp can hold its part of them: fetched anew for every tile, a page's columns at
// a time, while its weights are on their way. They come from the L2.
#pragma once

#include "norm.h"

template <int K>
struct Streamed {
  static constexpr int OF_PAGE = Columns<K>::PER_PAGE * isa::K_BLOCK;
  static_assert(Columns<OF_PAGE>::PAGES == 1);
  static constexpr bool IN_REGISTERS = false;
  static constexpr int HELD = Columns<OF_PAGE>::HELD;

  const uint8_t* from;  // in a tile-major buffer
  mutable Activations<OF_PAGE> own;  // of the page at hand

  // As they lie in memory.
  __device__ __forceinline__ void load_page(const Consumer& c, int page) const {
    load_activations<OF_PAGE>(c, from + static_cast<size_t>(page) * (OF_PAGE / isa::TILE_ROWS * ROWS * 16), own);
  }

  __device__ __forceinline__ void fetch_page(Consumer& c, int page) const {
    load_page(c, page);
    arrange<OF_PAGE>(own, own);
  }

  __device__ __forceinline__ const uint4& at(const Consumer& c, int, int i, int product = 0) const { return own.at(c, 0, i, product); }
};

// The same through a norm, when the rows' means and scales are found.
template <int K>
struct StreamedNormed : Streamed<K> {
  const float* weights;

  __device__ __forceinline__ void fetch_page(Consumer& c, int page) const {
    constexpr int OF_PAGE = Streamed<K>::OF_PAGE;
    this->load_page(c, page);
    normalize_own<OF_PAGE>(c, NormWeights<OF_PAGE>(weights + page * OF_PAGE), this->own);
  }
};

// Registers that norm(X) may take beside what becomes of a tile's results: with 96 the assembler spills.
template <int K>
constexpr bool HOLDS_NORMED = Columns<K>::REGISTERS <= 64;

// How a task has norm(X) of so many columns: in registers, else in shared memory where there is room, else page by page.
template <int K, bool HOLDS = HOLDS_NORMED<K>, bool STAYS = INPUT_STAYS>
struct NormedInput {
  using Type = StreamedNormed<K>;
};
template <int K, bool STAYS>
struct NormedInput<K, true, STAYS> {
  using Type = Activations<K>;
};
template <int K>
struct NormedInput<K, false, true> {
  using Type = Staged<K>;
};

template <int K>
__device__ __forceinline__ void load_normalized(Consumer& c, int norm, const NormWeights<K>& weights, Staged<K>& a) {
  const bool known = c.s.input_norm == norm && c.s.input_epoch == c.s.epoch;
  if (!known) normalize_together<K>(c, weights);
  if (!known && c.thread == 0) c.s.input_norm = norm, c.s.input_epoch = c.s.epoch;
  a.from = c.s.input;
}

template <int K>
__device__ __forceinline__ void load_normalized(Consumer& c, int norm, const NormWeights<K>& weights, StreamedNormed<K>& a) {
  a.from = buffer_at(c.p, static_cast<int32_t>(isa::Buffer::X));
  a.weights = weights.from;
  if (c.s.input_norm == norm && c.s.input_epoch == c.s.epoch) return;
  Activations<K> x;
  load_activations<K>(c, a.from, x);
  find_scales<K>(c, x);
  if (c.thread == 0) c.s.input_norm = norm, c.s.input_epoch = c.s.epoch;
}
