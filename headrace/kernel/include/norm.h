// norm(X): every SM puts the activations of all rows through a layer's norm, float32 inside, rounded once, and has each
// warp take its columns of the result into registers.
//
// The consumers share the work: a row is cut into eight segments, and where there are fewer rows than warps, several
// warps share a row's segments. A lane has groups of eight columns, one in each segment. A row's mean and squares are put
// together over the segments of a lane, in order, and then over the lanes, so that they do not depend on who had which.
// The result passes through shared memory, in as many parts as it takes for one to fit.
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
  const float away = b.mean - a.mean, share = __fdividef(b.count, fmaxf(count, 1));
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

// How the consumers share K columns of all rows.
template <int K>
struct NormShares {
  static constexpr int SEGMENTS = 8, GROUPS = K / 8;                // groups of eight columns, of a row
  static constexpr int SPAN = (GROUPS + SEGMENTS - 1) / SEGMENTS;   // groups in a segment
  static constexpr int EACH = (SPAN + isa::WARP - 1) / isa::WARP;   // of a lane, in a segment
  static constexpr int WARPS = ROWS < CONSUMER_WARPS ? CONSUMER_WARPS / ROWS : 1;  // that share a row
  static constexpr int OWN_ROWS = ROWS > CONSUMER_WARPS ? ROWS / CONSUMER_WARPS : 1;
  static constexpr int OWN_SEGMENTS = SEGMENTS / WARPS;
  // Parts of the result that fit into Shared::sums, each of whole blocks.
  static constexpr int BLOCKS = K / isa::K_BLOCK, BLOCK_BYTES = isa::K_BLOCK * ROWS * 2;
  static constexpr int PART_BLOCKS = static_cast<int>(sizeof(Shared::sums)) / BLOCK_BYTES < BLOCKS
                                         ? static_cast<int>(sizeof(Shared::sums)) / BLOCK_BYTES
                                         : BLOCKS;
  static constexpr int PARTS = (BLOCKS + PART_BLOCKS - 1) / PART_BLOCKS;

  // Group n of a lane in a segment, or -1.
  static __device__ __forceinline__ int group(int segment, int n, int lane) {
    const int within = n * isa::WARP + lane, group = segment * SPAN + within;
    return (SPAN % isa::WARP == 0 || within < SPAN) && (GROUPS % SPAN == 0 || group < GROUPS) ? group : -1;
  }
};

// A consumer's own elements of X.
template <int K>
struct OwnElements {
  using S = NormShares<K>;
  uint4 word[S::OWN_ROWS][S::OWN_SEGMENTS][S::EACH];

  static __device__ __forceinline__ int row(const Consumer& c, int r) { return c.warp() / S::WARPS * S::OWN_ROWS + r; }
  static __device__ __forceinline__ int segment(const Consumer& c, int n) { return c.warp() % S::WARPS * S::OWN_SEGMENTS + n; }

  // Call `visit(r, group, word)` for each word of own row r that there is. Rows come in pairs that lie side by side.
  template <typename Visit>
  __device__ __forceinline__ void each(const Consumer& c, Visit visit) {
#pragma unroll
    for (int n = 0; n < S::OWN_SEGMENTS; n++)
#pragma unroll
      for (int i = 0; i < S::EACH; i++) {
        const int group = S::group(segment(c, n), i, c.lane());
#pragma unroll
        for (int r = 0; r < S::OWN_ROWS; r++)
          if (group >= 0) visit(r, group, word[r][n][i]);
      }
  }

  // Of own row r: this lane's elements in all segments, in order.
  __device__ __forceinline__ Spread spread(Consumer& c, int r) {
    Spread all{0, 0, 0};
#pragma unroll
    for (int n = 0; n < S::OWN_SEGMENTS; n++) {
      const Spread own = of_segment(c, r, n);
      all = n ? joined(all, own) : own;
    }
    return all;
  }

  __device__ __forceinline__ Spread of_segment(Consumer& c, int r, int n) {
    Spread all{0, 0, 0};
#pragma unroll
    for (int i = 0; i < S::EACH; i++)
      if (S::group(segment(c, n), i, c.lane()) >= 0) {
        const Spread own = Eight(word[r][n][i]).spread();
        all = i ? joined(all, own) : own;
      }
    return all;
  }
};

// Where warps share a row: put this lane's segments together with those of the same lane in the other warps.
template <int K>
__device__ __forceinline__ Spread spread_of_lanes(Consumer& c, OwnElements<K>& own) {
  using S = NormShares<K>;
  static_assert(CONSUMERS * S::OWN_SEGMENTS * sizeof(float2) <= sizeof(Shared::sums), "no room for what lanes know of a row");
  float2* told = reinterpret_cast<float2*>(&c.s.sums[0][0][0][0]);
  const int row = OwnElements<K>::row(c, 0);
#pragma unroll
  for (int n = 0; n < S::OWN_SEGMENTS; n++) {
    const Spread part = own.of_segment(c, 0, n);
    told[(row * S::SEGMENTS + own.segment(c, n)) * isa::WARP + c.lane()] = make_float2(part.mean, part.squares);
  }
  c.meet_all();
  Spread all{0, 0, 0};
#pragma unroll
  for (int segment = 0; segment < S::SEGMENTS; segment++) {
    const float2 part = told[(row * S::SEGMENTS + segment) * isa::WARP + c.lane()];
    float count = 0;
#pragma unroll
    for (int i = 0; i < S::EACH; i++) count += S::group(segment, i, c.lane()) >= 0 ? 8 : 0;
    all = segment ? joined(all, {count, part.x, part.y}) : Spread{count, part.x, part.y};
  }
  c.meet_all();  // before the same memory takes the result
  return all;
}

// The mean and the scale of own row r, in every lane.
template <int K>
__device__ __forceinline__ float2 mean_and_scale(Spread all) {
#pragma unroll
  for (int mask = 1; mask < isa::WARP; mask <<= 1)
    all = joined(all, {__shfl_xor_sync(~0u, all.count, mask), __shfl_xor_sync(~0u, all.mean, mask), __shfl_xor_sync(~0u, all.squares, mask)});
  return make_float2(all.mean, rsqrtf(all.squares * (1.0f / K) + sizes::NORM_EPS));
}

__device__ __forceinline__ uint4 normalized(const uint4& word, const float* weights, float2 row) {
  const float4 first = __ldg(reinterpret_cast<const float4*>(weights)), second = __ldg(reinterpret_cast<const float4*>(weights) + 1);
  const float w[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  Eight e(word);
#pragma unroll
  for (int j = 0; j < 8; j++) e.x[j] = (e.x[j] - row.x) * row.y * w[j];
  return make_uint4(ptx::pack(e.x[0], e.x[1]), ptx::pack(e.x[2], e.x[3]), ptx::pack(e.x[4], e.x[5]), ptx::pack(e.x[6], e.x[7]));
}

__device__ __forceinline__ const float* norm_weights(const Consumer& c, int norm) {
  return c.p.norms + static_cast<size_t>(norm) * sizes::HIDDEN;
}

// Bring a norm's weights into the L1, before the wait for what they are applied to: a line a thread.
__device__ __forceinline__ void fetch_norm(const Consumer& c, int norm) {
  for (int n = c.thread * 32; n < sizes::HIDDEN; n += CONSUMERS * 32) ptx::fetch(norm_weights(c, norm) + n);
}

// norm(X) of all rows. For all consumers.
template <int K>
__device__ __forceinline__ void load_normalized(Consumer& c, int norm, Activations<K>& a) {
  using S = NormShares<K>;
  const uint8_t* x = buffer_at(c.p, static_cast<int32_t>(isa::Buffer::X));
  OwnElements<K> own;
  const int row = own.row(c, 0);
  own.each(c, [&](int r, int group, uint4& word) { word = ptx::load_shared_data(x + (group * ROWS + row + r) * 16); });
  float2 rows[S::OWN_ROWS];
  if constexpr (S::WARPS > 1) {
    rows[0] = mean_and_scale<K>(spread_of_lanes<K>(c, own));
  } else {
#pragma unroll
    for (int r = 0; r < S::OWN_ROWS; r++) rows[r] = mean_and_scale<K>(own.spread(c, r));
  }
  const float* weights = norm_weights(c, norm);
  own.each(c, [&](int r, int group, uint4& word) { word = normalized(word, weights + group * 8, rows[r]); });
  uint8_t* staging = reinterpret_cast<uint8_t*>(&c.s.sums[0][0][0][0]);
#pragma unroll
  for (int part = 0; part < S::PARTS; part++) {
    const int first = part * S::PART_BLOCKS;
    own.each(c, [&](int r, int group, uint4& word) {
      const int block = group / 4 - first;
      if (block >= 0 && block < S::PART_BLOCKS)
        *reinterpret_cast<uint4*>(staging + ((block * 4 + group % 4) * ROWS + row + r) * 16) = word;
    });
    c.meet_all();
    take_activations<K>(c, staging, first, S::PART_BLOCKS, a);
    c.meet_all();  // before the next part, or sums, take its place
  }
  arrange<K>(a, a);
}
