// The mean and the squares of a row's elements, put together in an order that is the same at every row capacity.
//
// A row is cut into eighths as eight warps would multiply it (gemm.h): of each page, block b belongs to eighth b % 8. A
// block is four groups of eight columns. Groups of an eighth, in order, are put together in pairs: of 32 those at distance
// 16, then 8, 4, 2, 1, in whichever lanes and registers they are; then such sets of 32, and the eighths, in order.
#pragma once

#include "gemm.h"

// The mean of some elements and the sum of squares around it, by Chan's rule for putting two such sets together: no
// difference of large numbers. A norm that does not subtract the mean keeps it at 0.
struct Spread {
  float count, mean, squares;
};

__device__ __forceinline__ Spread joined(Spread a, Spread b) {
  const float count = a.count + b.count;
  if (!sizes::NORM_SUBTRACTS_MEAN) return {count, 0, a.squares + b.squares};
  const float away = b.mean - a.mean, share = count > 0 ? b.count / count : 0.0f;
  return {count, a.mean + away * share, a.squares + b.squares + away * away * a.count * share};
}

struct Eight {
  float x[8];

  __device__ __forceinline__ explicit Eight(const uint4& word) {
    const uint32_t words[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
    for (int j = 0; j < 4; j++) x[2 * j] = ptx::low_half(words[j]), x[2 * j + 1] = ptx::high_half(words[j]);
  }

  __device__ __forceinline__ float sum() const { return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])); }

  __device__ __forceinline__ Spread spread() const {
    const float mean = sizes::NORM_SUBTRACTS_MEAN ? sum() / 8 : 0;
    float squares = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) squares += (x[j] - mean) * (x[j] - mean);
    return {8, mean, squares};
  }
};

// Where a row's eighths lie.
template <int K>
struct Eighths {
  using C = Columns<K>;
  static constexpr int IN_PAGE = (C::PER_PAGE + 7) / 8, BLOCKS = C::PAGES * IN_PAGE;  // of an eighth, at most
  static constexpr int ROUNDS = (BLOCKS + 7) / 8;                                    // of 32 groups
  static constexpr bool FULL = C::PER_PAGE % 8 == 0 && BLOCKS % 8 == 0;              // no group is missing

  // The number in the row of an eighth's n-th block, or -1.
  static __device__ __forceinline__ int block(int eighth, int n) {
    const int within = n % IN_PAGE * 8 + eighth;
    return FULL || (n < BLOCKS && within < C::PER_PAGE) ? n / IN_PAGE * C::PER_PAGE + within : -1;
  }

  static __device__ __forceinline__ float elements(int eighth) {
    return static_cast<float>(C::PAGES * ((C::PER_PAGE - eighth + 7) / 8) * isa::K_BLOCK);
  }
};

// What the lane at `distance` has. ALIKE: of as many elements, a number that is then known when this is compiled, and no
// division is left in `joined`.
template <bool ALIKE>
__device__ __forceinline__ Spread from_lane(const Spread& a, int distance) {
  const float count = ALIKE ? a.count : __shfl_xor_sync(~0u, a.count, distance);
  return {count, __shfl_xor_sync(~0u, a.mean, distance), __shfl_xor_sync(~0u, a.squares, distance)};
}

// The mean of a row and what its elements are multiplied by, from all eighths' spreads.
template <int K>
__device__ __forceinline__ float2 mean_and_scale(const Shared& s, int row) {
  Spread all{0, 0, 0};
#pragma unroll
  for (int eighth = 0; eighth < 8; eighth++) {
    const float2 told = s.spreads[eighth][row];
    const Spread part = {Eighths<K>::elements(eighth), told.x, told.y};
    all = eighth ? joined(all, part) : part;
  }
  return make_float2(all.mean, rsqrtf(all.squares * (1.0f / K) + sizes::NORM_EPS));
}
