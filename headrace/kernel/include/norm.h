// norm(X): every SM puts the activations of all rows through a layer's norm, float32 inside, rounded once, and has each
// warp take its columns of the result into registers.
//
// The consumers share the work. A row is cut into eight segments, one a warp, and a segment into groups of eight columns.
// Lanes lie along the rows first, as X does in memory: lane l has row l % ROWS and the groups l / ROWS + n * 32 / ROWS. Groups
// of a segment are put together in pairs at distance 16, then 8, 4, 2, 1, in whichever lanes they are, and segments in
// order: so a row's mean and squares have the same bits at every row capacity.
//
// The result passes through shared memory. Where few rows leave room it stays there for the layer's other tasks that read
// the same; else it passes in parts.
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

// A consumer's own groups of X, all of one row.
template <int K>
struct OwnGroups {
  static constexpr int GROUPS = K / 8, SPAN = (GROUPS + CONSUMER_WARPS - 1) / CONSUMER_WARPS;  // of a row, of a segment
  static constexpr int ROUNDS = (SPAN + isa::WARP - 1) / isa::WARP;                            // of 32 groups
  static constexpr bool FULL = GROUPS == CONSUMER_WARPS * ROUNDS * isa::WARP;                  // no group is missing
  uint4 word[ROUNDS][ROWS];

  static __device__ __forceinline__ int row(const Consumer& c) { return c.lane() % ROWS; }
  // The n-th group in a round, or -1.
  static __device__ __forceinline__ int group(const Consumer& c, int round, int n) {
    const int within = round * isa::WARP + c.lane() / ROWS + n * (isa::WARP / ROWS), group = c.warp() * SPAN + within;
    return FULL || (within < SPAN && group < GROUPS) ? group : -1;
  }

  static __device__ __forceinline__ float elements(int segment) {
    return 8.0f * max(0, min(SPAN, GROUPS - segment * SPAN));
  }

  __device__ __forceinline__ void load(const Consumer& c, const uint8_t* x) {
#pragma unroll
    for (int round = 0; round < ROUNDS; round++)
#pragma unroll
      for (int n = 0; n < ROWS; n++) {
        const int at = group(c, round, n);
        word[round][n] = at < 0 ? make_uint4(0, 0, 0, 0) : ptx::load_shared_data(x + (at * ROWS + row(c)) * 16);
      }
  }

  // Of the lane's row in this warp's segment.
  __device__ __forceinline__ Spread spread(const Consumer& c) const {
    Spread all{0, 0, 0};
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
      Spread part[ROWS];
#pragma unroll
      for (int n = 0; n < ROWS; n++) part[n] = group(c, round, n) < 0 ? Spread{0, 0, 0} : Eight(word[round][n]).spread();
#pragma unroll
      for (int step = 1; step < ROWS; step *= 2)
#pragma unroll
        for (int n = 0; n < ROWS / 2; n++)
          if (n < ROWS / 2 / step) part[n] = joined(part[n], part[n + ROWS / 2 / step]);
#pragma unroll
      for (int distance = isa::WARP / 2; distance >= ROWS; distance /= 2) part[0] = joined(part[0], from_lane(part[0], distance));
      all = round ? joined(all, part[0]) : part[0];
    }
    return all;
  }

 private:
  static __device__ __forceinline__ Spread from_lane(const Spread& a, int distance) {
    return {FULL ? a.count : __shfl_xor_sync(~0u, a.count, distance), __shfl_xor_sync(~0u, a.mean, distance),
            __shfl_xor_sync(~0u, a.squares, distance)};
  }
};

// The mean and the scale of this lane's row. For all consumers.
template <int K>
__device__ __forceinline__ float2 mean_and_scale(Consumer& c, const OwnGroups<K>& own) {
  const Spread part = own.spread(c);
  if (c.lane() < ROWS) c.s.spreads[c.warp()][c.lane()] = make_float2(part.mean, part.squares);
  c.meet_all();
  Spread all{0, 0, 0};
#pragma unroll
  for (int segment = 0; segment < CONSUMER_WARPS; segment++) {
    const float2 told = c.s.spreads[segment][own.row(c)];
    const Spread part = {OwnGroups<K>::elements(segment), told.x, told.y};
    all = segment ? joined(all, part) : part;
  }
  return make_float2(all.mean, rsqrtf(all.squares * (1.0f / K) + sizes::NORM_EPS));
}

struct EightWeights {
  float4 first, second;

  EightWeights() = default;
  __device__ __forceinline__ explicit EightWeights(const float* from)
      : first(__ldg(reinterpret_cast<const float4*>(from))), second(__ldg(reinterpret_cast<const float4*>(from) + 1)) {}
};

__device__ __forceinline__ uint4 normalized(const uint4& word, const EightWeights& weights, float2 row) {
  const float4 &first = weights.first, &second = weights.second;
  const float w[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  Eight e(word);
#pragma unroll
  for (int j = 0; j < 8; j++) e.x[j] = (e.x[j] - row.x) * row.y * w[j];
  return make_uint4(ptx::pack(e.x[0], e.x[1]), ptx::pack(e.x[2], e.x[3]), ptx::pack(e.x[4], e.x[5]), ptx::pack(e.x[6], e.x[7]));
}

__device__ __forceinline__ const float* norm_weights(const Consumer& c, int norm) {
  return c.p.norms + static_cast<size_t>(norm) * sizes::HIDDEN;
}

// A norm's weights, fetched before the wait for what they are applied to: into registers where rows are few, else into the
// L1, a line a thread.
template <int K>
struct NormWeights {
  using Own = OwnGroups<K>;
  static constexpr bool HELD = INPUT_STAYS;
  const float* from;
  EightWeights held[HELD ? Own::ROUNDS : 1][HELD ? ROWS : 1];

  __device__ __forceinline__ NormWeights(const Consumer& c, int norm) : from(norm_weights(c, norm)) {
    if constexpr (HELD) {
#pragma unroll
      for (int n = 0; n < Own::ROUNDS * ROWS; n++)
        held[n / ROWS][n % ROWS] = EightWeights(from + max(Own::group(c, n / ROWS, n % ROWS), 0) * 8);
    } else {
      for (int n = c.thread * 32; n < K; n += CONSUMERS * 32) ptx::fetch(from + n);
    }
  }

  // Those of the n-th group in a round.
  __device__ __forceinline__ EightWeights of(int round, int n, int group) const {
    if constexpr (HELD) return held[round][n];
    return EightWeights(from + group * 8);
  }
};

// Put what this lane has of blocks [first, first + count) where take_activations finds it.
template <int K>
__device__ __forceinline__ void lay_out(Consumer& c, const OwnGroups<K>& own, uint8_t* staging, int first, int count) {
#pragma unroll
  for (int round = 0; round < OwnGroups<K>::ROUNDS; round++)
#pragma unroll
    for (int n = 0; n < ROWS; n++) {
      const int group = own.group(c, round, n), block = group / 4 - first;
      if (group >= 0 && block >= 0 && block < count)
        *reinterpret_cast<uint4*>(staging + staged_at(block * 4 + group % 4, own.row(c))) = arranged(own.word[round][n]);
    }
}

// norm(X) of all rows into Shared::input, or in parts through Shared::sums, and each warp's columns of it into registers.
template <int K>
__device__ __forceinline__ void normalize(Consumer& c, const NormWeights<K>& weights, Activations<K>& a) {
  constexpr int BLOCKS = Columns<K>::BLOCKS, ROOM = static_cast<int>(sizeof(Shared::sums)) / (isa::K_BLOCK * ROWS * 2);
  constexpr int COUNT = INPUT_STAYS || BLOCKS < ROOM ? BLOCKS : ROOM;
  OwnGroups<K> own;
  own.load(c, buffer_at(c.p, static_cast<int32_t>(isa::Buffer::X)));
  const float2 row = mean_and_scale<K>(c, own);
#pragma unroll
  for (int round = 0; round < OwnGroups<K>::ROUNDS; round++)
#pragma unroll
    for (int n = 0; n < ROWS; n++) {
      const int group = own.group(c, round, n);
      if (group >= 0) own.word[round][n] = normalized(own.word[round][n], weights.of(round, n, group), row);
    }
  uint8_t* staging = INPUT_STAYS ? c.s.input : reinterpret_cast<uint8_t*>(&c.s.sums[0][0][0][0]);
#pragma unroll 1
  for (int first = 0; first < BLOCKS; first += COUNT) {
    lay_out<K>(c, own, staging, first, COUNT);
    c.meet_all();
#pragma unroll
    for (int part = 0; part < BLOCKS; part += COUNT)
      if (part == first) take_activations<K>(c, staging, part, COUNT, a);
    if (!INPUT_STAYS) c.meet_all();  // before the next part, or sums, take its place
  }
}

// norm(X) of all rows. For all consumers; they met at the task's start, after their last use of what is overwritten here.
template <int K>
__device__ __forceinline__ void load_normalized(Consumer& c, int norm, const NormWeights<K>& weights, Activations<K>& a) {
  if (INPUT_STAYS && c.s.input_norm == norm && c.s.input_epoch == c.s.epoch) {
    take_activations<K>(c, c.s.input, 0, Columns<K>::BLOCKS, a);
  } else {
    normalize<K>(c, weights, a);
    if (INPUT_STAYS && c.thread == 0) c.s.input_norm = norm, c.s.input_epoch = c.s.epoch;  // for tasks after this one
  }
}
