// norm(X): every SM puts the activations of all rows through a layer's norm, float32 inside, rounded once, and each warp
// has its columns of the result in registers.
//
// Where rows are few the consumers share the work: lanes lie along the rows first, as X does in memory, and the result
// stays in shared memory for the layer's other tasks that read the same. Where they are many there is no room for that:
// each warp takes what it multiplies, and only the rows' means and scales stay. Where columns are many: streamed.h.
#pragma once

#include "spread.h"

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

// ---- few rows ----

// A consumer's own groups of X, all of one row: those of an eighth are its warp's. Lane l has row l % ROWS and the groups
// l / ROWS + n * 32 / ROWS of each round.
template <int K>
struct OwnGroups {
  using E = Eighths<K>;
  uint4 word[E::ROUNDS][ROWS];

  static __device__ __forceinline__ int row(const Consumer& c) { return c.lane() % ROWS; }
  // The n-th group in a round, or -1.
  static __device__ __forceinline__ int group(const Consumer& c, int round, int n) {
    const int within = c.lane() / ROWS + n * (isa::WARP / ROWS), block = E::block(c.warp(), round * 8 + within / 4);
    return block < 0 ? -1 : block * 4 + within % 4;
  }

  __device__ __forceinline__ void load(const Consumer& c, const uint8_t* x) {
#pragma unroll
    for (int round = 0; round < E::ROUNDS; round++)
#pragma unroll
      for (int n = 0; n < ROWS; n++) {
        const int at = group(c, round, n);
        word[round][n] = at < 0 ? make_uint4(0, 0, 0, 0) : ptx::load_shared_data(x + (at * ROWS + row(c)) * 16);
      }
  }

  // Of this warp's eighth of the lane's row; in the first ROWS lanes.
  __device__ __forceinline__ Spread spread(const Consumer& c) const {
    Spread all{0, 0, 0};
#pragma unroll
    for (int round = 0; round < E::ROUNDS; round++) {
      Spread part[ROWS];
#pragma unroll
      for (int n = 0; n < ROWS; n++) part[n] = E::FULL || group(c, round, n) >= 0 ? Eight(word[round][n]).spread() : Spread{0, 0, 0};
#pragma unroll
      for (int step = ROWS / 2; step > 0; step /= 2)
#pragma unroll
        for (int n = 0; n < step; n++) part[n] = joined(part[n], part[n + step]);
#pragma unroll
      for (int distance = isa::WARP / 2; distance >= ROWS; distance /= 2) part[0] = joined(part[0], from_lane<E::FULL>(part[0], distance));
      all = round ? joined(all, part[0]) : part[0];
    }
    return all;
  }
};

// ---- a norm's weights ----

// Fetched before the wait for what they are applied to: into registers where rows are few, else into the L1, a line a
// thread.
template <int K>
struct NormWeights {
  using Own = OwnGroups<K>;
  static constexpr bool HELD = INPUT_STAYS;
  const float* from;
  EightWeights held[HELD ? Eighths<K>::ROUNDS : 1][HELD ? ROWS : 1];

  // Not fetched before.
  __device__ __forceinline__ explicit NormWeights(const float* from) : from(from) {}

  __device__ __forceinline__ NormWeights(const Consumer& c, int norm) : from(norm_weights(c, norm)) {
    if constexpr (HELD) {
#pragma unroll
      for (int n = 0; n < Eighths<K>::ROUNDS * ROWS; n++)
        held[n / ROWS][n % ROWS] = EightWeights(from + max(Own::group(c, n / ROWS, n % ROWS), 0) * 8);
    } else {
      for (int n = c.thread * 32; n < K; n += CONSUMERS * 32) ptx::fetch(from + n);
    }
  }
};

// norm(X) of all rows into Shared::input, as staged_at says.
template <int K>
__device__ __forceinline__ void normalize_together(Consumer& c, const NormWeights<K>& weights) {
  OwnGroups<K> own;
  own.load(c, buffer_at(c.p, static_cast<int32_t>(isa::Buffer::X)));
  const Spread part = own.spread(c);
  if (c.lane() < ROWS) c.s.spreads[c.warp()][c.lane()] = make_float2(part.mean, part.squares);
  c.meet_all();
  const float2 row = mean_and_scale<K>(c.s, own.row(c));
#pragma unroll
  for (int round = 0; round < Eighths<K>::ROUNDS; round++)
#pragma unroll
    for (int n = 0; n < ROWS; n++) {
      const int group = own.group(c, round, n);
      if (group >= 0)
        *reinterpret_cast<uint4*>(c.s.input + staged_at(group, own.row(c))) =
            arranged(normalized(own.word[round][n], weights.held[round][n], row));
    }
  c.meet_all();
}

// ---- many rows ----

// A warp's part of X as it multiplies it, in one or two eighths.
template <int K>
struct OwnColumns {
  using E = Eighths<K>;
  static constexpr int EIGHTHS = 8 / TILE_WARPS, OWN = Columns<K>::OWN;

  // Where among the warp's blocks the n-th of its eighth `which` is.
  static __device__ constexpr int place(int which, int n) { return n / E::IN_PAGE * OWN + n % E::IN_PAGE * EIGHTHS + which; }
  static __device__ __forceinline__ int eighth(const Consumer& c, int which) { return c.part() + which * TILE_WARPS; }

  // Of an eighth of the lane's row; in the first of its four lanes.
  static __device__ __forceinline__ Spread spread(const Consumer& c, const uint4 (&words)[Columns<K>::PAGES * OWN], int which) {
    Spread all{0, 0, 0};
#pragma unroll
    for (int round = 0; round < E::ROUNDS; round++) {
      Spread part[8];
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const bool known = E::FULL || (round * 8 + n < E::BLOCKS && E::block(eighth(c, which), round * 8 + n) >= 0);
        part[n] = known ? Eight(words[round * 8 + n < E::BLOCKS ? place(which, round * 8 + n) : 0]).spread() : Spread{0, 0, 0};
      }
#pragma unroll
      for (int step = 4; step > 0; step /= 2)
#pragma unroll
        for (int n = 0; n < step; n++) part[n] = joined(part[n], part[n + step]);
#pragma unroll
      for (int distance = 2; distance > 0; distance /= 2) part[0] = joined(part[0], from_lane<E::FULL>(part[0], distance));
      all = round ? joined(all, part[0]) : part[0];
    }
    return all;
  }
};

// The rows' means and scales, for this task and those after it that go through the same norm.
template <int K>
__device__ __forceinline__ void find_scales(Consumer& c, const Activations<K>& x) {
  using Own = OwnColumns<K>;
  auto tell = [&](const uint4(&words)[Columns<K>::PAGES * Columns<K>::OWN], int row) {
#pragma unroll
    for (int which = 0; which < Own::EIGHTHS; which++) {
      const Spread part = Own::spread(c, words, which);
      if ((c.lane() & 3) == 0 && row < ROWS) c.s.spreads[Own::eighth(c, which)][row] = make_float2(part.mean, part.squares);
    }
  };
  tell(x.low, c.lane() >> 2);
  if constexpr (WIDE) tell(x.high, (c.lane() >> 2) + 8);
  c.meet_all();
  if (c.thread < ROWS) c.s.scales[c.thread] = mean_and_scale<K>(c.s, c.thread);
  c.meet_all();
}

// Put this warp's columns of X through the norm where they are, in the order in which they are multiplied.
template <int K>
__device__ __forceinline__ void normalize_own(Consumer& c, const NormWeights<K>& weights, Activations<K>& a) {
  using C = Columns<K>;
  const int row = c.lane() >> 2;
  const float2 low = c.s.scales[row % ROWS], high = c.s.scales[(row + 8) % ROWS];
#pragma unroll
  for (int j = 0; j < C::PAGES * C::OWN; j++) {
    if (!has_block<K>(c, j % C::OWN)) continue;
    const int block = j / C::OWN * C::PER_PAGE + j % C::OWN * TILE_WARPS + c.part();
    const EightWeights of_block(weights.from + (block * 4 + (c.lane() & 3)) * 8);
    a.low[j] = normalized(a.low[j], of_block, low);
    if constexpr (WIDE) a.high[j] = normalized(a.high[j], of_block, high);
  }
  arrange<K>(a, a);
}

// norm(X) of all rows. For all consumers; they met at the task's start, after their last use of what is overwritten here.
template <int K>
__device__ __forceinline__ void load_normalized(Consumer& c, int norm, const NormWeights<K>& weights, Activations<K>& a) {
  const bool known = c.s.input_norm == norm && c.s.input_epoch == c.s.epoch;  // from a task before
  if constexpr (INPUT_STAYS) {
    if (!known) normalize_together<K>(c, weights);
    take_activations<K>(c, c.s.input, a);
  } else {
    load_activations<K>(c, buffer_at(c.p, static_cast<int32_t>(isa::Buffer::X)), a);
    if (!known) find_scales<K>(c, a);
    normalize_own<K>(c, weights, a);
  }
  if (!known && c.thread == 0) c.s.input_norm = norm, c.s.input_epoch = c.s.epoch;
}
