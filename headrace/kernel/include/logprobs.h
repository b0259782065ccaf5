// Log-probabilities: the largest raw logits, and the sum of all exponentials.
#pragma once

#include "sampling.h"

constexpr int TOP = isa::TOP_LOGPROBS;

// Whether `a` comes after `b` in the order of the largest first, of equals the lowest token.
__device__ __forceinline__ bool comes_after(Best a, Best b) {
  return a.value < b.value || (a.value == b.value && a.token > b.token);
}

// The largest `count` raw logits of a row's own tokens, written by thread 0; NO_TOKEN where there are not as many.
// For all consumers.
__device__ __forceinline__ void find_top(Consumer& c, Own own, int row, int count, isa::TopEntry* top) {
  Best last{ptx::infinity(), NO_TOKEN};
  Best mine = nothing();
  bool stale = true;  // `mine` has been taken
#pragma unroll 1
  for (int n = 0; n < TOP; n++) {
    if (n < count && stale) {
      mine = nothing();
#pragma unroll 4
      for (int token = own.first + c.thread; token < own.end; token += CONSUMERS) {
        const Best other{finite_or_infinite(raw_logit(c, token, row)), token};
        if (comes_after(other, last)) mine = better(mine, other);
      }
    }
    Best best = n < count ? best_of_all(c, mine) : nothing();
    if (c.thread == 0) {
      top[n].raw = best.value;
      top[n].token = best.token;
    }
    if (n >= count) continue;
    c.meet_all();
    last = {top[n].raw, top[n].token};
    stale = last.token != NO_TOKEN && last.token == mine.token;
  }
}

// log(sum of exp(raw)) of the whole vocabulary, in lane 0. For one warp.
__device__ __forceinline__ double log_sum(const Consumer& c, int row) {
  float largest = -ptx::infinity();
  for (int share = c.lane(); share < sizes::SMS; share += isa::WARP)
    largest = fmaxf(largest, __uint_as_float(ptx::load_shared_data(stat_at(c, share, row)).x));
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
  double sum = 0;
  for (int share = c.lane(); share < sizes::SMS; share += isa::WARP) {
    const float own = __uint_as_float(ptx::load_shared_data(stat_at(c, share, row)).x);
    const uint4 words = ptx::load_shared_data(stat_at(c, share, row) + 16);
    sum += __hiloint2double(words.y, words.x) * exponential(static_cast<double>(own) - static_cast<double>(largest));
  }
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) sum += __shfl_xor_sync(~0u, sum, mask);
  return static_cast<double>(largest) + log(sum);
}

// Write the `count` largest of all shares' tops to the host's record. For one warp; each lane looks after some shares,
// whose lists are in order, and remembers how far it is in each.
__device__ __forceinline__ void merge_tops(const Consumer& c, const uint8_t* candidates, int row, int count,
                                           variant::LogprobRecord& record) {
  constexpr int PLACE_BITS = 5, MINE = (sizes::SMS + isa::WARP - 1) / isa::WARP;
  static_assert(TOP < 1 << PLACE_BITS && MINE * PLACE_BITS <= 64);
  uint64_t places = 0;
#pragma unroll 1
  for (int n = 0; n < count; n++) {
    Best mine = nothing();
    int from = 0;
#pragma unroll
    for (int m = 0; m < MINE; m++) {
      const int share = c.lane() + m * isa::WARP, place = places >> m * PLACE_BITS & ((1 << PLACE_BITS) - 1);
      if (share >= sizes::SMS || place >= TOP) continue;
      const uint8_t* at = candidates + (static_cast<size_t>(share) * ROWS + row) * sizeof(isa::Candidate) +
                          offsetof(isa::Candidate, top) + place * sizeof(isa::TopEntry);
      const uint64_t entry = ptx::load_shared_word(reinterpret_cast<const uint64_t*>(at));
      const Best other{__uint_as_float(static_cast<uint32_t>(entry)), static_cast<int>(entry >> 32)};
      if (better(mine, other).token != mine.token) mine = other, from = m;
    }
    const Best best = best_of_warp(mine);
    if (best.token != NO_TOKEN && best.token == mine.token) places += 1ull << from * PLACE_BITS;
    if (c.lane() == 0) {
      record.top_raw[n] = best.value;
      record.top_token[n] = best.token;
    }
  }
}
