// O_PROJ: the attention output onto the residual.
#pragma once

#include "ops/residual.h"

__device__ __forceinline__ void o_proj(Consumer& c, const isa::Descriptor& task) {
  if (begin_task(c, task)) project<sizes::HEADS * HEAD_DIM>(c, task);
}
