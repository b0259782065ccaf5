// norm(X): activations through a layer's norm on their way into registers, float32 inside, rounded once.
#pragma once

#include "gemm.h"

// Sum one number a lane over all columns of its rows: first its four lanes, then the warps in the order of gemm.h.
// `even` and `odd` are the sums over the warp's even and odd blocks; WIDE has eight warps and no odd ones.
__device__ __forceinline__ float sum_over_columns(Consumer& c, float even, float odd, int row_half) {
#pragma unroll
  for (int mask = 1; mask <= 2; mask <<= 1) {
    even += __shfl_xor_sync(~0u, even, mask);
    odd += __shfl_xor_sync(~0u, odd, mask);
  }
  const int row = (c.lane() >> 2) + 8 * row_half, first = WIDE ? 0 : c.group() * 4;
  auto& sums = c.s.norm_sums;
  if ((c.lane() & 3) == 0) {
    sums[first + c.part()][0][row] = even;
    sums[first + c.part()][1][row] = odd;
  }
  c.meet_tile();
  float q[4];
#pragma unroll
  for (int w = 0; w < 4; w++)
    q[w] = WIDE ? sums[w][0][row] + sums[(w + 4) % CONSUMER_WARPS][0][row] : sums[first + w][0][row] + sums[first + w][1][row];
  c.meet_tile();  // before the array is used again
  return (q[0] + q[1]) + (q[2] + q[3]);
}

template <typename Visit>
__device__ __forceinline__ void each_element(const uint4& word, Visit visit) {
  const uint32_t words[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    visit(2 * j, ptx::low_half(words[j]));
    visit(2 * j + 1, ptx::high_half(words[j]));
  }
}

// Normalise one of the two sets of rows that a lane holds, and arrange it for multiplication.
template <int K>
__device__ __forceinline__ void normalize_rows(Consumer& c, uint4 (&words)[Columns<K>::PAGES * Columns<K>::OWN],
                                               const float* weights, int row_half) {
  using C = Columns<K>;
  float mean = 0;
  if (sizes::NORM_SUBTRACTS_MEAN) {
    float sum[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < C::PAGES * C::OWN; j++)
      each_element(words[j], [&](int, float x) { sum[WIDE ? 0 : (j % C::OWN) & 1] += x; });
    mean = sum_over_columns(c, sum[0], sum[1], row_half) * (1.0f / K);
  }
  float squares[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < C::PAGES * C::OWN; j++)
    if (has_block<K>(c, j % C::OWN))
      each_element(words[j], [&](int, float x) {
        const float away = x - mean;
        squares[WIDE ? 0 : (j % C::OWN) & 1] += away * away;
      });
  const float scale = rsqrtf(sum_over_columns(c, squares[0], squares[1], row_half) * (1.0f / K) + sizes::NORM_EPS);
#pragma unroll
  for (int j = 0; j < C::PAGES * C::OWN; j++) {
    const int i = j % C::OWN, block = j / C::OWN * C::PER_PAGE + i * TILE_WARPS + c.part();
    if (!has_block<K>(c, i)) continue;
    const float4* at = reinterpret_cast<const float4*>(weights + block * isa::K_BLOCK + (c.lane() & 3) * 8);
    const float4 first = __ldg(at), second = __ldg(at + 1);
    const float w[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
    float y[8];
    each_element(words[j], [&](int n, float x) { y[n] = (x - mean) * scale * w[n]; });
    words[j] = make_uint4(ptx::pack(y[0], y[1]), ptx::pack(y[4], y[5]), ptx::pack(y[2], y[3]), ptx::pack(y[6], y[7]));
  }
}

// norm(X) of all rows.
template <int K>
__device__ __forceinline__ void load_normalized(Consumer& c, int norm, Activations<K>& a) {
  load_activations<K>(c, buffer_at(c.p, static_cast<int32_t>(isa::Buffer::X)), a);
  const float* weights = c.p.norms + static_cast<size_t>(norm) * K;
  normalize_rows<K>(c, a.low, weights, 0);
  if constexpr (WIDE) normalize_rows<K>(c, a.high, weights, 1);
}
