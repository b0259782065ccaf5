// The borders of top_k and top_p over all SMs: a search digit by digit, in histograms to which every SM adds.
// The searches are headrace/step/oracle/twins/sample_select.py.
#pragma once

#include "sampling.h"

enum Kind : int { TOP_K = 0, TOP_P = 1 };  // the first index of TIES

constexpr int ALL_EQUALS = 0x7fffffff, NO_EQUALS = -1;  // of Border::last_equal

__device__ __forceinline__ int32_t flag_of(int kind) { return kind == TOP_K ? variant::row_flag::TOP_K : variant::row_flag::TOP_P; }

__device__ __forceinline__ uint64_t* histogram_at(const Consumer& c, int kind, int digit, int row) {
  auto* histogram = reinterpret_cast<uint64_t*>(begin_of(c, isa::Buffer::HISTOGRAM));
  return histogram + (static_cast<size_t>(kind * isa::DIGITS + digit) * ROWS + row) * isa::DIGIT_BINS;
}

__device__ __forceinline__ uint32_t* ties_at(const Consumer& c, int kind, int share, int row) {
  auto* ties = reinterpret_cast<uint32_t*>(begin_of(c, isa::Buffer::TIES));
  return ties + (static_cast<size_t>(kind) * sizes::SMS + share) * ROWS + row;
}

// How a row's tokens are scored, and which of them top_k and top_p leave.
struct Scorer {
  float best, temperature;
  uint32_t key[2];
  int last_equal[2];

  // Step 3 of headrace/model/sampling.py.
  __device__ __forceinline__ float score(float logit) const {
    return __fdiv_rn(__fsub_rn(logit, best), temperature);
  }

  __device__ __forceinline__ bool leaves(Kind kind, uint32_t its_key, int token) const {
    return its_key > key[kind] || (its_key == key[kind] && token <= last_equal[kind]);
  }
};

// With those borders that are asked for, of `top_k` and of `top_p`, where the row has them.
__device__ __forceinline__ Scorer scorer_of(const Consumer& c, int row, bool top_k, bool top_p) {
  const bool has_k = top_k && c.s.rows.flags[row] & variant::row_flag::TOP_K;
  const bool has_p = top_p && c.s.rows.flags[row] & variant::row_flag::TOP_P;
  const Border &k = c.s.borders[TOP_K][row], &p = c.s.borders[TOP_P][row];
  return {c.s.best_score[row],
          c.p.rows[row].temperature,
          {has_k ? k.key : 0, has_p ? p.key : 0},
          {has_k ? k.last_equal : ALL_EQUALS, has_p ? p.last_equal : ALL_EQUALS}};
}

// ---- for one warp ----

// The largest adjusted logit of the whole vocabulary.
__device__ __forceinline__ void find_best_score(Consumer& c, int row) {
  Best best = nothing();
  for (int share = c.lane(); share < sizes::SMS; share += isa::WARP) {
    const uint4 words = ptx::load_shared_data(stat_at(c, share, row));
    best = better(best, {__uint_as_float(words.y), static_cast<int>(words.z)});
  }
  best = best_of_warp(best);
  if (c.lane() == 0) c.s.best_score[row] = best.value;
  __syncwarp();
}

// Find a digit: the one where the sum from the top reaches what is needed.
__device__ __forceinline__ void settle(Consumer& c, int kind, int digit, int row) {
  constexpr int EACH = isa::DIGIT_BINS / isa::WARP;
  Border& border = c.s.borders[kind][row];
  const uint64_t* bins = histogram_at(c, kind, digit, row);
  const int top = isa::DIGIT_BINS - 1 - c.lane() * EACH;
  uint64_t amount[EACH], sum = 0;
#pragma unroll
  for (int n = 0; n < EACH; n++) sum += amount[n] = ptx::load_shared_word(bins + top - n);
  uint64_t upto = sum;  // of this lane's bins and all above
#pragma unroll
  for (int step = 1; step < isa::WARP; step *= 2) {
    const uint64_t other = __shfl_up_sync(~0u, upto, step);
    if (c.lane() >= step) upto += other;
  }
  uint64_t needed = border.needed;
  if (kind == TOP_P && digit == 0) {
    const variant::RowInput& input = c.p.rows[row];
    needed = part_of(__shfl_sync(~0u, upto, isa::WARP - 1), input.top_p_numerator, input.top_p_shift);
  }
  uint64_t above = border.above + upto - sum;
  const uint32_t key = border.key;
  __syncwarp();
#pragma unroll
  for (int n = 0; n < EACH; n++) {
    if (above < needed && needed - above <= amount[n])
      border = {needed, above, key << isa::DIGIT_BITS | static_cast<uint32_t>(top - n), ALL_EQUALS};
    above += amount[n];
  }
  __syncwarp();
}

// The token that is the `count`-th own one at a border. Top_p's equals are those that top_k has left.
__device__ __forceinline__ int find_equal(Consumer& c, Own own, int kind, int row, int count) {
  const Scorer scorer = scorer_of(c, row, kind == TOP_P, false);
  const float* logits = logits_of(c, row);
  const uint32_t border = c.s.borders[kind][row].key;
#pragma unroll 1
  for (int start = own.first; start < own.end; start += isa::WARP) {
    const int token = start + c.lane();
    const uint32_t key = token < own.end ? key_of(scorer.score(logits[place_of(token, row)])) : 0;
    const bool equal = token < own.end && key == border && scorer.leaves(TOP_K, key, token);
    const uint32_t equals = __ballot_sync(~0u, equal);
    const bool last = equal && __popc(equals & ((2u << c.lane()) - 1)) == count;
    if (const uint32_t found = __ballot_sync(~0u, last)) return start + __ffs(found) - 1;
    count -= __popc(equals);
  }
  return ALL_EQUALS;
}

// End a search: which of the tokens at the border stay, the lowest first.
__device__ __forceinline__ void finish(Consumer& c, const isa::Descriptor& task, int kind, int row) {
  Border& border = c.s.borders[kind][row];
  uint32_t before = 0;
  for (int share = c.lane(); share < task.share; share += isa::WARP)
    before += ptx::load_relaxed(ties_at(c, kind, share, row));
  before = __reduce_add_sync(~0u, before);
  const int own_equals = static_cast<int>(ptx::load_relaxed(ties_at(c, kind, task.share, row)));
  uint64_t missing = border.needed - border.above;
  if (kind == TOP_P) missing = equals_that_stay(missing, weight_of(score_of(border.key)));
  const int64_t stay = static_cast<int64_t>(missing) - before;
  int last = ALL_EQUALS;
  if (stay <= 0)
    last = NO_EQUALS;
  else if (stay < own_equals)
    last = find_equal(c, own_tokens(task), kind, row, static_cast<int>(stay));
  __syncwarp();
  if (c.lane() == 0) border.last_equal = last;
  __syncwarp();
}
