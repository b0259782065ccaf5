// What reads norm(X): ROUTER, QKV_PROJ, EXPERT_UP, FFN_UP and LM_HEAD. They differ in what becomes of a tile and are one
// piece of code up to there: all code that a layer runs has to fit the SM's instruction cache.
#pragma once

#include "streamed.h"
#include "ops/gated.h"
#include "ops/lm_head.h"
#include "ops/qkv_proj.h"
#include "ops/router.h"

__device__ __forceinline__ void normed_tile(Consumer& c, const isa::Descriptor& task, int index, int half, const Results& results) {
  switch (static_cast<isa::Opcode>(task.opcode)) {
    case isa::Opcode::ROUTER: return router_tile(c, task, index, results);
    case isa::Opcode::QKV_PROJ: return qkv_tile(c, task, index, results);
    case isa::Opcode::LM_HEAD: return lm_head_tile(c, task, index, results);
    default: return gated_half(c, index, half, results);
  }
}

__device__ __forceinline__ void project_normed(Consumer& c, const TaskSlot& slot) {
  const isa::Descriptor& task = slot.task;
  const bool routed = task.opcode == static_cast<int32_t>(isa::Opcode::EXPERT_UP);
  const NormWeights<sizes::HIDDEN> weights(c, task.norm);
  if (task.opcode == static_cast<int32_t>(isa::Opcode::QKV_PROJ)) find_new_blocks(c, task);
  // EXPERT_UP is handed over when the experts are chosen, so what it waits for has come. STRICT asks for itself.
  const bool going = begin_after(c, [&] {
    if (!routed || variant::STRICT) wait_for_inputs(c, task);
  });
  if (!going) return;
  const int first = routed ? slot.first : task.first_tile, count = routed ? slot.last - first : task.tile_count;
  if (count == 0) return signal_only(c, task);
  NormedInput<sizes::HIDDEN>::Type a;
  load_normalized(c, task.norm, weights, a);
  const int halves = routed || task.opcode == static_cast<int32_t>(isa::Opcode::FFN_UP) ? 2 : 1;
  const bool sends = routed || task.opcode == static_cast<int32_t>(isa::Opcode::FFN_UP);
  each_tile<sizes::HIDDEN, 2>(
      c, count, halves, a,
      [&](int index, int half, const Results& results) { normed_tile(c, task, index, half, results); },
      [&](int index) {
        if (sends) send_tile(c, task, task.output, first + index, index, count, ROWS * 16);
      });
  if (sends) c.sequence += count;
  settle_tile(c, task);
}
