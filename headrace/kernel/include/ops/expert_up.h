// EXPERT_UP: gate and up of every active expert. Items (expert, tile) are tiles of HIDDEN in their order.
#pragma once

#include "ops/gated.h"

__device__ __forceinline__ void expert_up(Consumer& c, const TaskSlot& slot) {
  if (!begin_task(c, slot.task)) return;
  if (slot.first < slot.last)
    gated_tiles(c, slot.task, slot.first, slot.last - slot.first);
  else
    signal_only(c, slot.task);
}
