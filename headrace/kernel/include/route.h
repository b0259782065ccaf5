// The choice of experts, by a warp of its own: every SM makes it for itself from the router's logits, as soon as they
// are there, so that it is long made when the loader comes to the experts' pages.
#pragma once

#include "wait.h"

// Unsigned order of the result is the order of the numbers; never 0.
__device__ __forceinline__ uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float number_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The experts of a lane: lane, lane + 32, ...
constexpr int OWN_EXPERTS = (EXPERTS + isa::WARP - 1) / isa::WARP;

// Rows that are chosen for side by side, so that their loads and steps overlap: as many as the warp has registers for.
constexpr int ROWS_TOGETHER = ROWS < 2 ? ROWS : 2;

// Choose for rows [first, first + ROWS_TOGETHER); sets bit r of chosen[n] where row r takes the lane's n-th expert. Ties go to
// the lowest index. For all lanes, as all below.
__device__ __forceinline__ void choose_for(Shared& s, const Params& p, int first, int lane, uint32_t (&chosen)[OWN_EXPERTS]) {
  const float* logits = reinterpret_cast<const float*>(p.buffers + variant::ROUTER_LOGITS_OFFSET);
  uint32_t key[ROWS_TOGETHER][OWN_EXPERTS], best[ROWS_TOGETHER];
#pragma unroll
  for (int n = 0; n < OWN_EXPERTS; n++) {
    const int expert = n * isa::WARP + lane;
    const float* at = logits + (expert / 8 * ROWS + first) * 8 + expert % 8;
#pragma unroll
    for (int row = 0; row < ROWS_TOGETHER; row++)
      key[row][n] = expert < EXPERTS ? ordered(ptx::load_shared_float(at + row * 8)) : 0;
  }
#pragma unroll 1
  for (int taken = 0; taken < CHOICES; taken++) {
#pragma unroll
    for (int row = 0; row < ROWS_TOGETHER; row++) {
      best[row] = 0;
#pragma unroll
      for (int n = 0; n < OWN_EXPERTS; n++) best[row] = max(best[row], key[row][n]);
      best[row] = __reduce_max_sync(~0u, best[row]);
    }
#pragma unroll
    for (int row = 0; row < ROWS_TOGETHER; row++) {
      int expert = 0;
#pragma unroll
      for (int n = OWN_EXPERTS - 1; n >= 0; n--) {
        const uint32_t lanes = __ballot_sync(~0u, key[row][n] == best[row]);
        if (lanes) expert = n * isa::WARP + __ffs(lanes) - 1;
      }
#pragma unroll
      for (int n = 0; n < OWN_EXPERTS; n++)
        if (expert == n * isa::WARP + lane) {
          key[row][n] = 0;
          chosen[n] |= 1u << (first + row);
        }
      if (lane == 0) {
        s.route.choice[first + row][taken] = static_cast<int16_t>(expert);
        s.route.choice_logit[first + row][taken] = number_of(best[row]);
      }
    }
  }
}

// List the chosen experts in index order.
__device__ __forceinline__ void list_experts(Shared& s, int lane, const uint32_t (&chosen)[OWN_EXPERTS]) {
  int count = 0;
#pragma unroll
  for (int n = 0; n < OWN_EXPERTS; n++) {
    const uint32_t lanes = __ballot_sync(~0u, chosen[n] != 0);
    if (chosen[n]) {
      const int place = count + __popc(lanes & ((1u << lane) - 1));
      s.route.expert[place] = n * isa::WARP + lane;
      s.route.users[place] = chosen[n];
      s.route.place[n * isa::WARP + lane] = static_cast<int16_t>(place);
    }
    count += __popc(lanes);
  }
  if (lane == 0) s.route.count = count;
  if constexpr (ROWS % 4 == 0)
    for (int n = lane; n < count * (ROWS / 4); n += isa::WARP) reinterpret_cast<float4*>(s.route.weight)[n] = make_float4(0, 0, 0, 0);
  else
    for (int n = lane; n < count * ROWS; n += isa::WARP) (&s.route.weight[0][0])[n] = 0;
  __syncwarp();
  for (int n = lane; n < ROWS * CHOICES; n += isa::WARP) {
    const int row = n / CHOICES, expert = s.route.choice[row][n % CHOICES];
    const float weight = __fdividef(1.0f, 1.0f + expf(-s.route.choice_logit[row][n % CHOICES]));
    if (s.rows.active[row]) s.route.weight[s.route.place[expert]][row] = weight;
  }
  __syncwarp();
}

__device__ __forceinline__ void choose_experts(Shared& s, const Params& p, int lane) {
  uint32_t chosen[OWN_EXPERTS];
#pragma unroll
  for (int n = 0; n < OWN_EXPERTS; n++) chosen[n] = 0;
#pragma unroll 1
  for (int first = 0; first < ROWS; first += ROWS_TOGETHER) choose_for(s, p, first, lane, chosen);
  uint32_t active = 0;
#pragma unroll
  for (int row = 0; row < ROWS; row++) active |= s.rows.active[row] ? 1u << row : 0;
#pragma unroll
  for (int n = 0; n < OWN_EXPERTS; n++) chosen[n] &= active;
  __syncwarp();
  list_experts(s, lane, chosen);
}

// The router's whole life; one warp.
__device__ __forceinline__ void route(Shared& s, const Params& p) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  each_beside(s, p, Agent::ROUTER, isa::Opcode::EXPERT_UP, isa::Field::LOADER_COUNTER, lane, [&](const int32_t*) {
    choose_experts(s, p, lane);
    if (lane == 0) ptx::barrier_arrive(&s.route_full, 1);
  });
}
