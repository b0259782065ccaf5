// FFN_UP: gate and up of a feed-forward that every row goes through.
#pragma once

#include "ops/gated.h"

__device__ __forceinline__ void ffn_up(Consumer& c, const isa::Descriptor& task) {
  fetch_norm(c, task.norm);
  if (begin_task(c, task)) gated_tiles(c, task, task.first_tile, task.tile_count);
}
