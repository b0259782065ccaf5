// SAMPLE_SELECT: one round of the search for the borders of top_k and top_p. Greedy rows need none.
#pragma once

#include "sampling.h"

__device__ __forceinline__ void sample_select(Consumer& c, const isa::Descriptor& task) {
  // A round that nobody needs waits for nothing.
  if (begin_after(c, [] {})) signal_only(c, task);
}
