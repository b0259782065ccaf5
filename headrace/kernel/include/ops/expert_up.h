// EXPERT_UP: gate and up of every active expert. Items (expert, tile) are tiles of HIDDEN in their order.
#pragma once

#include "ops/gated.h"

__device__ __forceinline__ void expert_up(Consumer& c, const TaskSlot& slot) {
  fetch_norm(c, slot.task.norm);
  // The loader hands this task over when the experts are chosen, so what it waits for has come. STRICT asks for itself.
  const bool going = variant::STRICT ? begin_task(c, slot.task) : begin_after(c, [] {});
  if (!going) return;
  if (slot.first < slot.last)
    gated_tiles(c, slot.task, slot.first, slot.last - slot.first);
  else
    signal_only(c, slot.task);
}
