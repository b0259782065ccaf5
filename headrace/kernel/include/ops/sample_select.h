// SAMPLE_SELECT: one round of the search for the borders of top_k and top_p. Other rows take no part.
#pragma once

#include "border.h"

static_assert(CONSUMERS == isa::DIGIT_BINS, "a consumer looks after one bin");

// Begin a search, or find the digit of the round before. For one warp.
__device__ __forceinline__ void prepare(Consumer& c, const isa::Descriptor& task, int kind, int round, int row) {
  if (round > 0) return settle(c, kind, round - 1, row);
  const bool has_top_k = c.s.rows.flags[row] & variant::row_flag::TOP_K;
  if (kind == TOP_P && has_top_k)
    finish(c, task, TOP_K, row);
  else
    find_best_score(c, row);
  if (c.lane() == 0)
    c.s.borders[kind][row] = {kind == TOP_K ? static_cast<uint64_t>(c.p.rows[row].top_k) : 0, 0, 0, ALL_EQUALS};
}

// Add every lane's amount, up to 2^44, to the bin of its digit; 0 adds nothing. The digits of a warp are often few:
// what has the same is added up first. For whole warps.
__device__ __forceinline__ void add_to_bins(unsigned long long* bins, int lane, int digit, uint64_t amount) {
  constexpr int PART_BITS = 24, TURNS = 4;
  uint32_t pending = __ballot_sync(~0u, amount != 0);
#pragma unroll 1
  for (int turn = 0; pending && turn < TURNS; turn++) {
    const int leader = __ffs(pending) - 1, its_digit = __shfl_sync(~0u, digit, leader);
    const bool same = amount != 0 && digit == its_digit;
    const uint32_t low = same ? static_cast<uint32_t>(amount) & ((1u << PART_BITS) - 1) : 0;
    const uint32_t high = same ? static_cast<uint32_t>(amount >> PART_BITS) : 0;
    const uint64_t sum =
        (static_cast<uint64_t>(__reduce_add_sync(~0u, high)) << PART_BITS) + __reduce_add_sync(~0u, low);
    if (lane == leader) atomicAdd(&bins[digit], static_cast<unsigned long long>(sum));
    if (same) amount = 0;
    pending = __ballot_sync(~0u, amount != 0);
  }
  if (amount) atomicAdd(&bins[digit], static_cast<unsigned long long>(amount));
}

// Add own tokens whose key begins with the digits found so far to the histogram of the next. For all consumers.
__device__ __forceinline__ void count(Consumer& c, Own own, int kind, int digit, int row) {
  auto* bins = reinterpret_cast<unsigned long long*>(c.s.record);
  bins[c.thread] = 0;
  c.meet_all();
  const Scorer scorer = scorer_of(c, row, kind == TOP_P, false);
  const uint32_t prefix = c.s.borders[kind][row].key;
  const int rest = 32 - isa::DIGIT_BITS * digit;  // bits of a key that are not yet found
  each_token(c, own, row, logits_of(c, row), [&](int token, float logit, bool valid) {
    const float score = scorer.score(logit);
    const uint32_t key = key_of(score);
    const bool inside = valid && (digit == 0 || key >> rest == prefix) && scorer.leaves(TOP_K, key, token);
    const uint64_t amount = !inside ? 0 : kind == TOP_K ? 1 : weight_of(score);
    add_to_bins(bins, c.lane(), key >> (rest - isa::DIGIT_BITS) & (isa::DIGIT_BINS - 1), amount);
  });
  c.meet_all();
  // What was there before is of no interest; but once it is here the addition is made, and what waits for it may be
  // signalled. It is never all ones.
  const uint64_t amount = bins[c.thread];
  uint64_t before = 0;
  if (amount) before = ptx::add_wide(histogram_at(c, kind, digit, row) + c.thread, amount);
  if (before == ~0ull) bins[c.thread] = before;
  c.meet_all();
}

// How many own tokens are at the border. For all consumers.
__device__ __forceinline__ void count_equals(Consumer& c, const isa::Descriptor& task, int kind, int row) {
  const Scorer scorer = scorer_of(c, row, kind == TOP_P, false);
  const uint32_t border = c.s.borders[kind][row].key;
  int equals = 0;
  each_token(c, own_tokens(task), row, logits_of(c, row), [&](int token, float logit, bool valid) {
    const uint32_t key = key_of(scorer.score(logit));
    equals += valid && key == border && scorer.leaves(TOP_K, key, token);
  });
  equals = __reduce_add_sync(~0u, equals);
  if (c.lane() == 0) c.s.pick_token[c.warp()] = equals;
  c.meet_all();
  if (c.thread == 0) {
    uint32_t sum = 0;
    for (int w = 0; w < CONSUMER_WARPS; w++) sum += c.s.pick_token[w];
    // As in `count`: it is there once the old value is here.
    if (ptx::exchange(ties_at(c, kind, task.share, row), sum) == ~0u) c.s.pick_token[0] = 0;
  }
  c.meet_all();
}

__device__ __forceinline__ void sample_select(Consumer& c, const isa::Descriptor& task) {
  const int kind = task.round / (isa::DIGITS + 1), round = task.round % (isa::DIGITS + 1);
  const uint32_t takers = rows_with(c, flag_of(kind));
  // A round that nobody needs waits for nothing.
  const auto waits = [&] {
    if (takers) wait_for(c, task.wait_counter, task.wait_arrivals, task.round ? c.s.searches : c.s.epoch);
  };
  if (!begin_after(c, waits)) return;
  if (takers) {
    each_row_by_warp(c, takers, [&](int row) { prepare(c, task, kind, round, row); });
    c.meet_all();
    each_row(takers, [&](int row) {
      if (round < isa::DIGITS)
        count(c, own_tokens(task), kind, round, row);
      else
        count_equals(c, task, kind, row);
    });
    if (variant::STRICT) ptx::fence_device();
    c.meet_all();
  }
  signal_only(c, task);
}
