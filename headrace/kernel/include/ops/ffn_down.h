// FFN_DOWN: the down projection of a feed-forward that every row goes through.
#pragma once

#include "ops/residual.h"

template <int... WIDTHS>
__device__ __forceinline__ void ffn_down_of(Consumer& c, const isa::Descriptor& task, variant::Widths<WIDTHS...>) {
  (void)((task.k == WIDTHS && (project<WIDTHS>(c, task), true)) || ...);
}

__device__ __forceinline__ void ffn_down(Consumer& c, const isa::Descriptor& task) {
  if (begin_task(c, task)) ffn_down_of(c, task, variant::FfnDown{});
}
