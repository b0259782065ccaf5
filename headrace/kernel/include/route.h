// The choice of experts, by the loader's warp: every SM makes it for itself from the router's logits.
#pragma once

#include "wait.h"

// Unsigned order of the result is the order of the numbers; never 0.
__device__ __forceinline__ uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Fill Shared::route for the active rows. For all lanes of the warp; lane l has experts l, l + 32, ...
__device__ __forceinline__ void choose_experts(Shared& s, const Params& p, const isa::Descriptor& task) {
  constexpr int OWN = (EXPERTS + isa::WARP - 1) / isa::WARP;
  uint32_t forgotten = threadIdx.x & 31;
  ptx::forget(forgotten);  // or the addresses of its experts fill the loader's few registers all the time
  const int lane = static_cast<int>(forgotten);
  auto logit_at = [&](int expert, int row) {
    return reinterpret_cast<const float*>(p.buffers + variant::ROUTER_LOGITS_OFFSET) + (expert / 8 * ROWS + row) * 8 + expert % 8;
  };
  uint32_t chosen[OWN];  // bit r: row r takes the lane's n-th expert
#pragma unroll
  for (int n = 0; n < OWN; n++) chosen[n] = 0;
#pragma unroll 1
  for (int row = 0; row < ROWS; row++) {
    if (!s.rows.active[row]) continue;
    uint32_t key[OWN];
#pragma unroll
    for (int n = 0; n < OWN; n++) {
      const int expert = n * isa::WARP + lane;
      key[n] = expert < task.experts ? ordered(ptx::load_shared_float(logit_at(expert, row))) : 0;
    }
#pragma unroll 1
    for (int taken = 0; taken < task.top_k; taken++) {
      uint32_t best = 0;
#pragma unroll
      for (int n = 0; n < OWN; n++) best = max(best, key[n]);
      best = __reduce_max_sync(~0u, best);
      uint32_t expert = EXPERTS;  // the lowest of those with the best logit
#pragma unroll
      for (int n = OWN - 1; n >= 0; n--)
        if (key[n] == best) expert = n * isa::WARP + lane;
      expert = __reduce_min_sync(~0u, expert);
#pragma unroll
      for (int n = 0; n < OWN; n++)
        if (expert == static_cast<uint32_t>(n * isa::WARP + lane)) {
          key[n] = 0;
          chosen[n] |= 1u << row;
        }
    }
  }
  int count = 0;
#pragma unroll
  for (int n = 0; n < OWN; n++) {
    const uint32_t lanes = __ballot_sync(~0u, chosen[n] != 0);
    if (chosen[n]) {
      const int slot = count + __popc(lanes & ((1u << lane) - 1));
      s.route.expert[slot] = n * isa::WARP + lane;
      s.route.users[slot] = chosen[n];
    }
    count += __popc(lanes);
  }
  if (lane == 0) s.route.count = count;
  __syncwarp();
#pragma unroll 1
  for (int entry = lane; entry < count * ROWS; entry += isa::WARP) {
    const int slot = entry / ROWS, row = entry % ROWS;
    float weight = 0;
    if (s.route.users[slot] >> row & 1)
      weight = __fdividef(1.0f, 1.0f + expf(-ptx::load_shared_float(logit_at(s.route.expert[slot], row))));
    s.route.weight[slot][row] = weight;
  }
  __syncwarp();
}
