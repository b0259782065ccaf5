// SAMPLE_PICK: each SM's best token of every row.
#pragma once

#include "border.h"
#include "logprobs.h"

// No noise makes up for a score this far below the best token's, whose score is 0: noise lies in [-2.82, 22.88].
constexpr float OUT_OF_REACH = -26.0f;
constexpr float MARGIN = 1e-4f;  // of float32 scores and noise, each right to within 1e-5

using Draw = Choice<double>;

// Let a token take part in the draw. Only what may be this thread's best is worked out exactly.
__device__ __forceinline__ void take_part(Draw& best, float score, int token, uint32_t word) {
  const float uniform = philox::uniform(word);
  if (score + philox::noise(uniform) < static_cast<float>(best.value) - MARGIN) return;
  best = better(best, {static_cast<double>(score) + philox::exact_noise(uniform), token});
}

// This thread's best own token of a row that is drawn.
__device__ __forceinline__ Draw draw(const Consumer& c, Own own, int row) {
  const variant::RowInput& input = c.p.rows[row];
  const Scorer scorer = scorer_of(c, row, true, true);
  const float* logits = logits_of(c, row);
  const float least = fmaxf(OUT_OF_REACH, input.min_score);
  const uint32_t position = c.s.rows.position[row] + 1;
  Draw best{-static_cast<double>(ptx::infinity()), NO_TOKEN};
#pragma unroll 1
  for (int first = own.first + 4 * c.thread; first < own.end; first += 4 * CONSUMERS) {
    float4 v = *reinterpret_cast<const float4*>(logits + place_of(first, row));
    v = make_float4(scorer.score(v.x), scorer.score(v.y), scorer.score(v.z), scorer.score(v.w));
    if (fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)) < least) continue;
    const philox::Words words = philox::words_of_tokens(input.seed, position, first / 4);
    // One token after the other in one piece of code, which is long.
    uint32_t next[4] = {words.x, words.y, words.z, words.w};
#pragma unroll 1
    for (int n = 0; n < 4; n++) {
      const float score = v.x;
      const uint32_t key = key_of(score);
      const int token = first + n;
      if (token < own.end && score >= least && scorer.leaves(TOP_K, key, token) && scorer.leaves(TOP_P, key, token))
        take_part(best, score, token, next[0]);
      v = make_float4(v.y, v.z, v.w, v.w);
      next[0] = next[1], next[1] = next[2], next[2] = next[3];
    }
  }
  return best;
}

// The greedy candidate of a row: what STATS found. One thread.
__device__ __forceinline__ void take_best(Consumer& c, int row, bool stop) {
  const isa::Stat& own = c.s.stats[row];
  auto& candidate = reinterpret_cast<isa::Candidate*>(c.s.record)[row];
  candidate.value = own.best;
  candidate.token = c.s.rows.active[row] ? own.token : NO_TOKEN;
  candidate.raw = own.largest;
  candidate.stop = stop;
}

// What is left of the searches. For one warp.
__device__ __forceinline__ void conclude(Consumer& c, const isa::Descriptor& task, int row) {
  const int32_t flags = c.s.rows.flags[row];
  if (flags & (variant::row_flag::TOP_K | variant::row_flag::TOP_P))
    finish(c, task, flags & variant::row_flag::TOP_P ? TOP_P : TOP_K, row);
  else
    find_best_score(c, row);
}

// For all consumers; a row without a finite logit keeps its greedy candidate, which ends it.
__device__ __forceinline__ void pick_drawn(Consumer& c, const isa::Descriptor& task, int row) {
  if (!is_finite(c.s.best_score[row])) return;
  const Draw best = best_of_all(c, draw(c, own_tokens(task), row));
  if (c.thread != 0) return;
  auto& candidate = reinterpret_cast<isa::Candidate*>(c.s.record)[row];
  candidate.value = best.value;
  candidate.token = best.token;
}

// For all consumers.
__device__ __forceinline__ void pick_logprobs(Consumer& c, const isa::Descriptor& task, int row) {
  auto& candidate = reinterpret_cast<isa::Candidate*>(c.s.record)[row];
  if (c.thread == 0 && candidate.token != NO_TOKEN) candidate.raw = raw_logit(c, candidate.token, row);
  find_top(c, own_tokens(task), row, c.p.rows[row].logprobs, candidate.top);
}

__device__ __forceinline__ void sample_pick(Consumer& c, const isa::Descriptor& task) {
  // Only who draws has to know of other SMs' logits.
  const uint32_t drawn = rows_with(c, variant::row_flag::DRAWN);
  const auto waits = [&] {
    if (drawn && c.s.searching) wait_for(c, task.wait_counter, task.wait_arrivals, c.s.searches);
    if (drawn) wait_for(c, task.second_counter, task.second_arrivals);
  };
  if (!begin_after(c, waits)) return;
  if (c.thread == 0) {
    claim_message(c.s, c.sequence);
    const bool stop = (task.flags & static_cast<int32_t>(isa::Flag::WRITER)) && ptx::load_from_host(&c.p.host->stop);
#pragma unroll 1
    for (int row = 0; row < ROWS; row++) take_best(c, row, stop);
  }
  if (drawn) {
    each_row_by_warp(c, drawn, [&](int row) { conclude(c, task, row); });
    c.meet_all();
    each_row(drawn, [&](int row) { pick_drawn(c, task, row); });
  }
  each_row(rows_with(c, variant::row_flag::LOGPROBS), [&](int row) { pick_logprobs(c, task, row); });
  send_records(c, task, c.s.record, sizeof(isa::Candidate));
}
