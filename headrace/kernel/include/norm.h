// norm(X): activations through a layer's norm on their way into registers, float32 inside, rounded once.
#pragma once

#include "gemm.h"

// The mean of some elements and the sum of squares around it, by Chan's rule for putting two such sets together: one
// pass, and no difference of large numbers.
struct Spread {
  float mean, squares;
};

// Of a set of `count` and one of `other_count` elements; a norm that does not subtract the mean keeps it at 0.
__device__ __forceinline__ Spread joined(Spread a, float count, Spread b, float other_count) {
  if (!sizes::NORM_SUBTRACTS_MEAN) return {0, a.squares + b.squares};
  const float away = b.mean - a.mean, share = other_count / fmaxf(count + other_count, 1);
  return {a.mean + away * share, a.squares + b.squares + away * away * count * share};
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

// Elements of a row in the warp's even (0) or odd (1) blocks; where there are eight warps, in all of them (0).
template <int K>
__device__ __forceinline__ int elements_of(int warp_part, int odd) {
  using C = Columns<K>;
  if (WIDE && odd) return 0;
  int blocks = 0;
#pragma unroll
  for (int i = 0; i < C::OWN; i++)
    if ((WIDE || (i & 1) == odd) && (C::EVEN || i * TILE_WARPS + warp_part < C::PER_PAGE)) blocks++;
  return blocks * C::PAGES * isa::K_BLOCK;
}

// Call `visit` for every element of a row that this lane holds in one kind of blocks.
template <int K, typename Visit>
__device__ __forceinline__ void each_of(const Consumer& c, const uint4 (&words)[Columns<K>::PAGES * Columns<K>::OWN], int odd,
                                        Visit visit) {
  using C = Columns<K>;
#pragma unroll
  for (int j = 0; j < C::PAGES * C::OWN; j++)
    if ((WIDE || (j % C::OWN & 1) == odd) && has_block<K>(c, j % C::OWN)) each_element(words[j], visit);
}

// Of one kind of blocks: the lane's own elements, then those of its three neighbours too.
template <int K>
__device__ __forceinline__ Spread spread_of_warp(const Consumer& c, const uint4 (&words)[Columns<K>::PAGES * Columns<K>::OWN], int odd) {
  const float count = elements_of<K>(c.part(), odd) / 4.0f;
  Spread own{0, 0};
  if (sizes::NORM_SUBTRACTS_MEAN) {
    each_of<K>(c, words, odd, [&](int, float x) { own.mean += x; });
    own.mean /= fmaxf(count, 1);
  }
  each_of<K>(c, words, odd, [&](int, float x) { own.squares += (x - own.mean) * (x - own.mean); });
#pragma unroll
  for (int mask = 1; mask <= 2; mask <<= 1)
    own = joined(own, count * mask, {__shfl_xor_sync(~0u, own.mean, mask), __shfl_xor_sync(~0u, own.squares, mask)}, count * mask);
  return own;
}

// Leave what this warp knows of its rows for the others.
template <int K>
__device__ __forceinline__ void tell_spread(Consumer& c, const uint4 (&words)[Columns<K>::PAGES * Columns<K>::OWN], int row_half) {
  const int row = (c.lane() >> 2) + 8 * row_half;
#pragma unroll
  for (int odd = 0; odd < (WIDE ? 1 : 2); odd++) {
    const Spread own = spread_of_warp<K>(c, words, odd);
    if ((c.lane() & 3) == 0) c.s.norm_parts[c.warp()][odd][row] = make_float2(own.mean, own.squares);
  }
}

// The whole row's, in the order of gemm.h.
template <int K>
__device__ __forceinline__ Spread spread_of_row(const Consumer& c, int row_half) {
  const int row = (c.lane() >> 2) + 8 * row_half, first = c.warp() - c.part();
  Spread q[4];
  float count[4];
#pragma unroll
  for (int w = 0; w < 4; w++) {
    const float2 a = c.s.norm_parts[first + w][0][row];
    const float2 b = WIDE ? c.s.norm_parts[(w + 4) % CONSUMER_WARPS][0][row] : c.s.norm_parts[first + w][WIDE ? 0 : 1][row];
    const float more = elements_of<K>(WIDE ? w + 4 : w, WIDE ? 0 : 1);
    count[w] = elements_of<K>(w, 0);
    q[w] = joined({a.x, a.y}, count[w], {b.x, b.y}, more);
    count[w] += more;
  }
  const Spread low = joined(q[0], count[0], q[1], count[1]), high = joined(q[2], count[2], q[3], count[3]);
  return joined(low, count[0] + count[1], high, count[2] + count[3]);
}

// Normalise the rows of one half that a lane holds, and arrange them for multiplication.
template <int K>
__device__ __forceinline__ void normalize_rows(Consumer& c, uint4 (&words)[Columns<K>::PAGES * Columns<K>::OWN],
                                               const float* weights, int row_half) {
  using C = Columns<K>;
  const Spread spread = spread_of_row<K>(c, row_half);
  const float mean = spread.mean, scale = rsqrtf(spread.squares * (1.0f / K) + sizes::NORM_EPS);
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

__device__ __forceinline__ const float* norm_weights(const Consumer& c, int norm) {
  return c.p.norms + static_cast<size_t>(norm) * sizes::HIDDEN;
}

// Bring a norm's weights into the L1, before the wait for what they are applied to: a line a thread.
__device__ __forceinline__ void fetch_norm(const Consumer& c, int norm) {
  for (int n = c.thread * 32; n < sizes::HIDDEN; n += CONSUMERS * 32) ptx::fetch(norm_weights(c, norm) + n);
}

// norm(X) of all rows. The array of parts is used again only after the start of another task, where all meet.
template <int K>
__device__ __forceinline__ void load_normalized(Consumer& c, int norm, Activations<K>& a) {
  load_activations<K>(c, buffer_at(c.p, static_cast<int32_t>(isa::Buffer::X)), a);
  tell_spread<K>(c, a.low, 0);
  if constexpr (WIDE) tell_spread<K>(c, a.high, 1);
  c.meet_tile();
  normalize_rows<K>(c, a.low, norm_weights(c, norm), 0);
  if constexpr (WIDE) normalize_rows<K>(c, a.high, norm_weights(c, norm), 1);
}
